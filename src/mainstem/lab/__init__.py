"""Prompt pairs, generators of tasks, models with a planted circuit, and small models to train with their data."""
