"""Where the experts of a sublayer receive what they read, as one place that a run can change.

Experts choose their tokens inside a module, so there is no matrix at whose input all of them could be changed. What can
be changed is the input of a module call around them: the widest that receives the stream value and makes nothing of
it but this sublayer's write. Its router and shared experts are mostly in the same call, and then read the change too;
those matrices are named, so that nobody counts them twice.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mainstem.model.hooks import Site
from mainstem.model.recording import Value
from mainstem.model.sites import SiteFinder
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class Matrix:
    """A product of a matrix with a value of the stream: its result, the sublayer it serves, and what it reads."""

    result: Value
    unit: Unit
    source: Value


class ExpertInputs:
    """The places where experts receive the stream in one recording.

    Args:
        finder: of sites.
        stream: the ids of the values that the stream before the final norm is made of.
        matrices: all that read the stream.
    """

    def __init__(self, finder: SiteFinder, stream: Collection[int], matrices: Sequence[Matrix]) -> None:
        self.finder, self.stream, self.matrices = finder, stream, matrices

    def of(self, source: Value, write: Value, unit: Unit) -> tuple[Site | None, tuple[int, ...]]:
        """Where the experts that make `write` receive `source`, and the matrices that read it in the same call."""
        if write.call is None or write.call.frame is None:
            return None, ()
        same = {value.id for value in self.finder.views_of(source)}
        reading = [i for i, matrix in enumerate(self.matrices) if self._made_of(matrix.source, same)]
        foreign = [self.matrices[i].result for i in reading if self.matrices[i].unit != unit]
        foreign += [
            user
            for i in same
            for user in self.finder.made_from.get(i, ())
            if user.id in self.stream and user is not write
        ]
        found = self.finder.widest_input(source, write.call.frame, [v for v in foreign if v.id not in same])
        if found is None:
            return None, ()
        site, frame = found
        calls = {i: self.matrices[i].result.call for i in reading}
        return site, tuple(i for i, call in calls.items() if call is not None and call.inside(frame))

    def _made_of(self, value: Value, ids: Collection[int]) -> bool:
        """Whether a value is made of one of `ids` with no value of the stream in between."""
        pending, seen = [value], set[int]()
        while pending:
            current = pending.pop()
            if current.id in ids:
                return True
            if current.id in seen or current.id in self.stream or current.call is None:
                continue
            seen.add(current.id)
            pending.extend(current.call.active_operands())
        return False
