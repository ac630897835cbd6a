"""One ranking of units of several kinds by one score, whichever way that score is found.

`increase` is found by exact search; every other score is computed for each unit (see `scores`), or was measured on the
model. Kinds that need different decompositions (heads beside neurons) are ranked together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mainstem.analysis.attribution import Attribution, Scored, attribute, best_of
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.recomputed import direct_recomputed
from mainstem.analysis.scores import chosen_groups, score_all
from mainstem.analysis.search import SLACK, IncreaseSearch
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
        target: what is explained.
        score: one of `scores.RANKINGS`.
        norm: the convention.
        kinds: of the units.
        negative: whether the smallest come first.
        exhaustive: whether the search of `increase` scores every unit.
        top: how many; all if there are fewer.
        measured: for a score that was measured on the model, for each level one tensor for each chosen group.
    """
    made = []
    for decomposition, own in _by_level(decompositions, kinds):
        if score == "increase":
            made.append(_by_increase(decomposition, target, norm, own, negative, exhaustive, top))
        elif score in ("direct", "additive"):
            made.append(_linear(decomposition, target, score, norm, own, negative, top))
        else:
            given = None if measured is None else measured[decomposition.level]
            made.append(_scored(decomposition, target, score, norm, own, negative, top, given))
    sign = 1 if negative else -1
    values = sorted((v for m in made for v in m.values), key=lambda part: (sign * part.score, part.unit.sort_key))
    if len(made) > 1 and score == "increase":
        values.sort(key=lambda part: (round(sign * part.score / SLACK), part.unit.sort_key))
    return Ranking(
        values=values[:top],
        attributions=[a for m in made for a in m.attributions],
        search={
            "units": sum(m.search["units"] for m in made),
            "scored": sum(m.search["scored"] for m in made),
            "exact": True,
            "slack": max((m.search["slack"] for m in made), default=0.0),
            "kinds": counts(decompositions, kinds),
        },
        bounds={unit: bound for m in made for unit, bound in m.bounds.items()},
        gaps={unit: gap for m in made for unit, gap in m.gaps.items()},
    )


def counts(decompositions: Mapping[str, Decomposition], kinds: set[str]) -> dict[str, int]:
    """How many units of each of the kinds there are; kinds that the model lacks are left out."""
    found: dict[str, int] = {}
    for decomposition, own in _by_level(decompositions, kinds):
        for group in chosen_groups(decomposition, own):
            found[group.kind] = found.get(group.kind, 0) + len(group)
    return {kind: found[kind] for kind in KIND_LEVELS if kind in found}


def _by_level(decompositions: Mapping[str, Decomposition], kinds: set[str]):
    for level in dict.fromkeys(KIND_LEVELS[kind] for kind in sorted(kinds)):
        yield decompositions[level], {kind for kind in kinds if KIND_LEVELS[kind] == level}


def _by_increase(
    decomposition: Decomposition,
    target: Target,
    norm: NormConvention,
    kinds: set[str],
    negative: bool,
    exhaustive: bool,
    top: int,
) -> Ranking:
    result = IncreaseSearch(decomposition, target, norm, kinds).top(top, negative, exhaustive)
    values = [Scored(found.unit, found.group, found.index, found.increase) for found in result.found]
    search = {"units": result.units, "scored": result.scored, "slack": result.slack}
    bounds = {found.unit: found.bound for found in result.found if math.isfinite(found.bound)}
    gaps = {found.unit: found.kl for found in result.found}
    return Ranking(values, [attribute(decomposition, target)], search, bounds, gaps)


def _linear(
    decomposition: Decomposition,
    target: Target,
    score: str,
    norm: NormConvention,
    kinds: set[str],
    negative: bool,
    top: int,
) -> Ranking:
    made = attribute(decomposition, target, score)  # type: ignore[arg-type]
    if norm == "recompute":
        recomputed = direct_recomputed(decomposition, target)
        made = Attribution(made.functional, decomposition, recomputed.scores, recomputed.remainder)
    count = sum(len(group) for group in decomposition.groups if group.kind in kinds)
    search = {"units": count, "scored": count, "slack": 0.0}
    return Ranking(made.top(top, kinds, negative), [made], search)


def _scored(
    decomposition: Decomposition,
    target: Target,
    score: str,
    norm: NormConvention,
    kinds: set[str],
    negative: bool,
    top: int,
    measured: list[Tensor] | None,
) -> Ranking:
    groups = chosen_groups(decomposition, kinds)
    scores = measured if measured is not None else score_all(decomposition, target, [score], norm, kinds)[score]
    count = sum(len(group) for group in groups)
    search = {"units": count, "scored": count, "slack": 0.0}
    return Ranking(best_of(groups, scores, top, negative=negative), [attribute(decomposition, target)], search)
