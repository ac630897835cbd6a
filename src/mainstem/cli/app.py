"""The application with all its commands, in the order of the help: each module registers its own when imported."""

from mainstem.cli import explaining, reading, intervening  # noqa: F401, I001 (the order is the help's)
from mainstem.cli import heads, circuits, subspaces, basis, reproducing  # noqa: F401
from mainstem.cli.command import app, attempt

__all__ = ["app", "attempt"]
