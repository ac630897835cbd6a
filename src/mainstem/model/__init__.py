"""Opening a model, and everything that is known about it before any prompt is run."""
