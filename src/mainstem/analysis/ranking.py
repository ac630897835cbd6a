"""One ranking of units of several kinds by one score, whichever way that score is found.

`increase` is found by exact search; every other score is computed for each unit (see `scores`), or was measured on the
model. Kinds that need different decompositions (heads beside neurons) are ranked together. A target of several steps (a
continuation) ranks units by the sum of their scores at the steps, each at its own destination.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mainstem.analysis.attribution import Attribution, Scored, attribute, no_probability
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.recomputed import direct_recomputed
from mainstem.analysis.scores import RULES, chosen_groups, score_all
from mainstem.analysis.search import SLACK, IncreaseSearch
from mainstem.analysis.steps import slots
from mainstem.model.reach import Reach
from mainstem.targets import Target
from mainstem.units import Unit

KIND_LEVELS = {
    "sublayer": "sublayers",
    "head": "heads",
    "attention_subvalue": "units",
    "attention_neuron": "attention_neurons",
    "ffn_neuron": "units",
    "expert_neuron": "units",
}
"""For each kind of unit the level of decomposition that has it."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Units in order; `search` says how many of each kind there were, how many were scored, and with what slack."""

    values: list[Scored]
    attributions: list[Attribution]
    search: dict[str, Any]
    bounds: dict[Unit, float] = field(default_factory=dict)
    gaps: dict[Unit, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """How to rank: by which score under which norm, which kinds, from which end, how many.

    `exhaustive`: whether the search of `increase` scores every unit.
    """

    score: str
    norm: NormConvention
    kinds: frozenset[str]
    negative: bool
    exhaustive: bool
    top: int


AtDestination = tuple[Mapping[str, Decomposition], Target]
"""The decompositions by level at one step of a target, and the target there."""
OF_DIRECTIONS = ("direct", "norm", "coefficient", "coefficient-norm")
"""Scores that need no probability."""


def rank(
    decompositions: Mapping[str, Decomposition],
    target: Target,
    score: str,
    norm: NormConvention,
    kinds: set[str],
    negative: bool,
    exhaustive: bool,
    top: int,
    measured: Mapping[str, list[Tensor]] | None = None,
) -> Ranking:
    """The `top` units of the kinds by the score, the most positive or the most negative first.

    Args:
        decompositions: those levels that the kinds need (see `KIND_LEVELS`).
        target: what is explained, at one destination.
        score: one of `scores.RANKINGS`.
        norm: the convention.
        kinds: of the units.
        negative: whether the smallest come first.
        exhaustive: whether the search of `increase` scores every unit.
        top: how many; all if there are fewer.
        measured: for a score that was measured on the model, for each level one tensor for each chosen group.
    """
    request = Request(score, norm, frozenset(kinds), negative, exhaustive, top)
    return rank_steps([(decompositions, target)], request, None if measured is None else [measured])


def rank_steps(
    steps: Sequence[AtDestination],
    request: Request,
    measured: Sequence[Mapping[str, list[Tensor]]] | None = None,
    reach: Mapping[str, Reach] | None = None,
) -> Ranking:
    """The same for a target of one step or several, with `measured` for each; `reach` speeds up negative searches.

    Raises:
        TargetError: if the target has no such score.
    """
    if request.score not in OF_DIRECTIONS and any(target.direction for _, target in steps):
        raise no_probability(request.score)
    made = []
    for level, kinds in _levels(request.kinds):
        own = [(decompositions[level], target) for decompositions, target in steps]
        if request.score == "increase":
            made.append(_by_increase(own, request, kinds, reach))
        else:
            made.append(_scored(own, request, kinds, None if measured is None else [m[level] for m in measured]))
    sign = 1 if request.negative else -1
    values = sorted((v for m in made for v in m.values), key=lambda part: (sign * part.score, part.unit.sort_key))
    if request.score == "increase" and len(made) == 1:
        values = made[0].values  # in its own order: ties within the slack by address
    elif request.score == "increase":
        values.sort(key=lambda part: (round(sign * part.score / SLACK), part.unit.sort_key))
    return Ranking(
        values=values[: request.top],
        attributions=[a for m in made for a in m.attributions],
        search={
            "units": sum(m.search["units"] for m in made),
            "scored": sum(m.search["scored"] for m in made),
            "exact": True,
            "slack": max((m.search["slack"] for m in made), default=0.0),
            "kinds": counts([decompositions for decompositions, _ in steps], request.kinds),
        },
        bounds={unit: bound for m in made for unit, bound in m.bounds.items()},
        gaps={unit: gap for m in made for unit, gap in m.gaps.items()},
    )


def counts(decompositions: Sequence[Mapping[str, Decomposition]], kinds: Iterable[str]) -> dict[str, int]:
    """How many units of each of the kinds there are, at all steps; kinds that the model lacks are left out."""
    found: dict[str, int] = {}
    for level, own in _levels(kinds):
        for slot in slots([made[level] for made in decompositions], own):
            found[slot.kind] = found.get(slot.kind, 0) + len(slot)
    return {kind: found[kind] for kind in KIND_LEVELS if kind in found}


def _levels(kinds: Iterable[str]) -> list[tuple[str, set[str]]]:
    """The levels that the kinds need, each with those that it has."""
    levels = dict.fromkeys(KIND_LEVELS[kind] for kind in sorted(kinds))
    return [(level, {kind for kind in kinds if KIND_LEVELS[kind] == level}) for level in levels]


Steps = Sequence[tuple[Decomposition, Target]]
"""A decomposition and the target there, for each step of a target."""


def _by_increase(steps: Steps, request: Request, kinds: set[str], reach: Mapping[str, Reach] | None) -> Ranking:
    search = IncreaseSearch(steps, request.norm, kinds, reach)
    result = search.top(request.top, request.negative, request.exhaustive)
    values = [Scored.at_steps(found.unit, found.groups, found.index, found.increases) for found in result.found]
    scored = {"units": result.units, "scored": result.scored, "slack": result.slack}
    bounds = {found.unit: found.bound for found in result.found if math.isfinite(found.bound)}
    gaps = {found.unit: found.kl for found in result.found if math.isfinite(found.kl)}
    return Ranking(values, [attribute(made, target) for made, target in steps], scored, bounds, gaps)


def _scored(steps: Steps, request: Request, kinds: set[str], measured: Sequence[list[Tensor]] | None) -> Ranking:
    attributions, scores = [], []
    for number, (made, target) in enumerate(steps):
        attribution, own = _scores_at(made, target, request, kinds)
        attributions.append(attribution)
        scores.append(own if measured is None else measured[number])
    values = summed_top([made for made, _ in steps], scores, request.top, kinds, request.negative)
    count = sum(len(slot) for slot in slots([made for made, _ in steps], kinds))
    return Ranking(values, attributions, {"units": count, "scored": count, "slack": 0.0})


def _scores_at(made: Decomposition, target: Target, request: Request, kinds: set[str]):
    """The attribution that warnings are about, and one tensor of scores for each chosen group (none if measured)."""
    score = request.score
    if score in ("direct", "additive"):
        attribution = attribute(made, target, score)  # type: ignore[arg-type]
        if request.norm == "recompute":
            recomputed = direct_recomputed(made, target)
            attribution = Attribution(attribution.functional, made, recomputed.scores, recomputed.remainder)
        by_group = {id(group): own for group, own in zip(made.groups, attribution.scores, strict=True)}
        return attribution, [by_group[id(group)] for group in chosen_groups(made, kinds)]
    attribution = attribute(made, target)
    measured = RULES[score].measured
    return attribution, [] if measured else score_all(made, target, [score], request.norm, kinds)[score]


def summed_top(
    decompositions: Sequence[Decomposition],
    scores: Sequence[list[Tensor]],
    count: int,
    kinds: set[str],
    negative: bool,
) -> list[Scored]:
    """The units with the largest (or smallest) sums of scores over the steps, ties ordered by address.

    For each step there is one tensor for each of its `chosen_groups`.
    """
    by_group = {
        id(group): own
        for made, values in zip(decompositions, scores, strict=True)
        for group, own in zip(chosen_groups(made, kinds), values, strict=True)
    }
    found: list[Scored] = []
    for slot in slots(decompositions, kinds):
        zero = torch.zeros(len(slot), dtype=torch.float64)
        shares = torch.stack([zero if g is None else by_group[id(g)].double().cpu() for g in slot.groups], -1)
        best = shares.sum(-1).sort(descending=not negative, stable=True).indices[:count].tolist()
        units = slot.units
        found += [Scored.at_steps(units[index], slot.groups, index, shares[index].tolist()) for index in best]
    sign = 1 if negative else -1
    return sorted(found, key=lambda part: (sign * part.score, part.unit.sort_key))[:count]
