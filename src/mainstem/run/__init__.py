"""Running a model and keeping what the anatomy names: capture, pattern rows, traces."""
