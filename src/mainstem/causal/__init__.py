"""Everything that must run a model again: label checks, edits, verdicts."""
