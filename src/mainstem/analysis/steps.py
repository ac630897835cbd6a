"""The steps of a target, and the same unit at each of them.

A continuation of n tokens is explained at n destinations of one teacher-forced run: step j predicts token j from the
prompt and the tokens before it. A unit's address says where it writes from, not where to, so it is the same unit at
each step (a neuron with another activation, a head reading the same source with another weight), and its score is the
sum of its scores at the steps. Every other target has one step. A unit that is not there at a step (a routed expert
that was not used, a source that does not exist yet) scores 0 at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.targets import Target
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class Slot:
    """One group of units, as it is at each step; None where it is not there."""

    kind: str
    owner: Unit
    groups: tuple[Group | None, ...]

    @property
    def units(self) -> Sequence[Unit]:
        """The addresses, which are the same at every step."""
        return next(group for group in self.groups if group is not None).units

    def __len__(self) -> int:
        return len(self.units)


def step_targets(target: Target) -> list[Target]:
    """The target of each step, in order."""
    if not target.continuation:
        return [target]
    return [Target(ids=(token,), text=target.text) for token in target.continuation]


def slots(decompositions: Sequence[Decomposition], kinds: set[str]) -> list[Slot]:
    """The groups of the kinds at all steps, each with its counterparts at the others."""
    found: dict[tuple[str, Unit, int], list[Group | None]] = {}
    for number, made in enumerate(decompositions):
        for group in made.groups:
            if group.kind in kinds:
                key = (group.kind, group.units[0], len(group))
                found.setdefault(key, [None] * len(decompositions))[number] = group
    return [
        Slot(kind, next(g.sublayer or first for g in groups if g is not None), tuple(groups))
        for (kind, first, _), groups in found.items()
    ]
