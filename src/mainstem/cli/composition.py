"""What `mainstem circuits --composition` does: every pair of a reader and a writer, from the weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainstem.cli import options as o
from mainstem.cli.running import Run

if TYPE_CHECKING:
    from mainstem.composition_description import CompositionReading


def composition_of(run: Run, kinds: Sequence[str], writers: str, offset: int, top: int) -> "CompositionReading":
    """The compositions that the options ask for.

    Raises:
        ChoiceError: an unknown kind. Others as `mainstem.composing.composition`.
    """
    for kind in kinds:
        o.choice("kind of composition", kind, o.COMPOSITIONS)
    o.choice("kind of writer", writers, o.WRITERS)
    model = run.open()
    with run.step("Composing ..."):
        return model.composition(tuple(kinds) or o.COMPOSITIONS[:3], offset=offset, writers=writers, top=top)
