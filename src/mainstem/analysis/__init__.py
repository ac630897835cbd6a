"""Pure analysis: tensors and dataclasses in, dataclasses out; nothing here runs a model."""
