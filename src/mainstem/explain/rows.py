"""The tables of an explanation: layers, values, account. For a continuation every number is a sum over its steps."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from mainstem.analysis.attribution import Scored, attribute, functional, promoted
from mainstem.analysis.increase import increases
from mainstem.analysis.lens import lens
from mainstem.analysis.ranking import Ranking
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.recomputed import direct_recomputed
from mainstem.errors import LevelRefusedError
from mainstem.explain.steps import Step
from mainstem.results.explanation import LayerRow, ValueRow

SHOWN_TOKENS = 5


def layer_rows(steps: Sequence[Step]) -> list[LayerRow]:
    """The target's lens after every addition to the stream, and each sublayer's direct share."""
    courses, likeliest, units = [], [], []
    for step in steps:
        states = lens(step.sublayers)
        units = states.units
        ids = torch.tensor(step.target.ids, dtype=torch.long, device=states.logits.device)
        courses.append(states.log_probabilities[:, ids].double().logsumexp(-1).tolist() if step.target.ids else None)
        likeliest.append([step.trace.model.token(int(token)) for token in states.top(1)[1][:, 0]])
    direct = _direct_by_unit(steps)
    rows, before = [], 0.0
    for i, unit in enumerate(units):
        tokens, name = [tokens[i] for tokens in likeliest], str(unit)
        if courses[0] is None:
            rows.append(LayerRow(name, None, None, direct.get(name), tokens))
            continue
        value = sum(course[i] for course in courses if course is not None)
        rows.append(LayerRow(name, value, value - before, direct.get(name), tokens))
        before = value
    return rows


def _direct_by_unit(steps: Sequence[Step]) -> dict[str, float]:
    direct: dict[str, float] = defaultdict(float)
    try:
        for step in steps:
            made = attribute(step.sublayers, step.target)
            for group, scores in zip(step.sublayers.groups, made.scores, strict=True):
                if group.kind in ("sublayer", "embedding"):
                    direct[str(group.units[0])] += float(scores.sum())
    except LevelRefusedError:
        return {}
    return direct


def value_rows(steps: Sequence[Step], ranking: Ranking, norm: NormConvention) -> list[ValueRow]:
    """The listed units with all their scores."""
    ranked = ranking.values
    if not ranked:
        return []
    vectors = torch.stack([part.vector() for part in ranked])
    up, down = promoted(steps[0].main, vectors, SHOWN_TOKENS)
    probable = not steps[0].target.direction
    increase = _increases(steps, ranked, norm) if probable else None
    additive = _along(steps, ranked, "additive") if probable else None
    direct = _along(steps, ranked, "direct") if norm == "frozen" else _recomputed(steps, ranked)
    model, tokens = steps[0].trace.model, steps[-1].trace.tokens(steps[-1].row)
    rows = []
    for i, part in enumerate(ranked):
        source = part.unit.source
        rows.append(
            ValueRow(
                unit=str(part.unit),
                kind=part.group.kind,
                coefficient=part.coefficient,
                increase=None if increase is None else increase[i],
                additive=None if additive is None else additive[i],
                direct=direct[i],
                bound=ranking.bounds.get(part.unit),
                kl=ranking.gaps.get(part.unit),
                promotes=[model.token(int(t)) for t in up[i]],
                suppresses=[model.token(int(t)) for t in down[i]],
                source=tokens[source] if source is not None else None,
                score=part.score,
                steps=list(part.shares),
            )
        )
    return rows


def _at_step(ranked: Sequence[Scored], number: int) -> dict[int, Scored]:
    """The parts that are there at a step, by their place in the ranking."""
    found = {i: part.at(number) for i, part in enumerate(ranked)}
    return {i: part for i, part in found.items() if part is not None}


def _increases(steps: Sequence[Step], ranked: Sequence[Scored], norm: NormConvention) -> list[float]:
    sums = [0.0] * len(ranked)
    for number, step in enumerate(steps):
        there = _at_step(ranked, number)
        for decomposition in step.decompositions.values():
            own = {i: part for i, part in there.items() if any(part.group is g for g in decomposition.groups)}
            found = increases(decomposition, list(own.values()), step.target, norm)
            for i, value in zip(own, found, strict=True):
                sums[i] += value
    return sums


def _along(steps: Sequence[Step], ranked: Sequence[Scored], score) -> list[float]:
    """The scores that are inner products with one direction at each step."""
    sums = [0.0] * len(ranked)
    for number, step in enumerate(steps):
        direction = functional(step.main, step.target, score).direction
        for i, part in _at_step(ranked, number).items():
            sums[i] += float(part.vector() @ direction)
    return sums


def _recomputed(steps: Sequence[Step], ranked: Sequence[Scored]) -> list[float]:
    """z_t(x + v) - z_t(x) of the listed units."""
    sums = [0.0] * len(ranked)
    for number, step in enumerate(steps):
        there = _at_step(ranked, number)
        for decomposition in step.decompositions.values():
            own = {i: part for i, part in there.items() if any(part.group is g for g in decomposition.groups)}
            if own:
                scores = direct_recomputed(decomposition, step.target).scores
                by_group = {id(g): s for g, s in zip(decomposition.groups, scores, strict=True)}
                for i, part in own.items():
                    sums[i] += float(by_group[id(part.group)][part.index])
    return sums


def account(steps: Sequence[Step]) -> dict[str, float]:
    """The target's logit (or value along a direction) by kind of writer; the entries sum to `total`."""
    sums: dict[str, float] = defaultdict(float)
    last = {"readout": 0.0, "unexplained": 0.0, "total": 0.0}
    for step in steps:
        made = attribute(step.sublayers, step.target)
        for group, scores in zip(step.sublayers.groups, made.scores, strict=True):
            kind = group.kind
            if kind == "sublayer":
                kind = str(group.units[0]).partition(".")[2].rstrip("23456789")
            sums[kind] += float(scores.sum())
        last["readout"] += sum(made.functional.constants.values())
        last["unexplained"] += made.unexplained
        last["total"] += made.functional.total
    return {**sums, **last}
