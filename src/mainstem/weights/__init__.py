"""What the weights say, and heads by behaviour: circuits, composition, subspaces."""
