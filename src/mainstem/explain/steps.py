"""The destinations that an explanation is about: one or, for a continuation, one for each of its tokens.

A continuation is teacher-forced: the prompt up to the destination and all but the continuation's last token run once,
and step j is the destination that predicts its token j. What followed the destination in the prompt is not there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.steps import step_targets
from mainstem.errors import TargetError
from mainstem.targets import Target, check_token_id

if TYPE_CHECKING:
    from mainstem.tracing import Trace


@dataclass(frozen=True, eq=False)
class Step:
    """One destination: `target` is what is explained there, `decompositions` are by level."""

    trace: "Trace"
    position: int
    row: int
    target: Target
    decompositions: dict[str, Decomposition]

    @property
    def main(self) -> Decomposition:
        """The decomposition whose certificate is shown."""
        return self.decompositions["units"]

    @property
    def sublayers(self) -> Decomposition:
        """The coarsest decomposition."""
        return self.decompositions["sublayers"]


def steps_of(trace: "Trace", target: Target, position: int, row: int, levels: Iterable[str]) -> list[Step]:
    """The steps of a target, each with its decompositions.

    Raises:
        TokenError: if the continuation has an id outside the vocabulary; TargetError: if a direction does not fit.
    """
    anatomy = trace.model.anatomy
    for token in (*target.ids, *target.against, *target.continuation):
        check_token_id(token, anatomy.sizes.d_vocab)
    if target.direction and len(target.direction) != anatomy.sizes.d_model:
        raise TargetError(
            f"The direction has {len(target.direction)} numbers and the stream {anatomy.sizes.d_model}",
            remedy=f"Give d_model = {anatomy.sizes.d_model} numbers.",
        )
    if target.continuation:
        first = trace.inputs.place(position, row)
        ids = [*trace.ids(row)[: first + 1], *target.continuation[:-1]]
        places = range(first, len(ids))
        trace, row = trace.model.trace(ids, positions=places), 0
    else:
        places = [position]
    return [
        Step(trace, place, row, own, {level: trace.decompose(level, place, row) for level in levels})  # type: ignore[arg-type]
        for place, own in zip(places, step_targets(target), strict=True)
    ]
