"""Prompt pairs, generators of tasks, and a model with a planted circuit: what interventions are tried out on."""
