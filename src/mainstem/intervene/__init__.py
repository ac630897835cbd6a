"""Running a model again with edits: patching, steering, knocking out, tracing causes, following paths."""
