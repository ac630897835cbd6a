"""Runs and patterns of an ablation as the rows of its result."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.statistics import difference
from mainstem.analysis.top_mass import MEASURES
from mainstem.analysis.warnings import Warning, size_warning, zero_warning
from mainstem.basis.reference import Reference
from mainstem.causal.evaluation import Evaluation
from mainstem.results.basis_ablations import (
    AblationRow,
    ControlVerdict,
    DimensionRow,
    GroupRow,
    HeadRow,
    LayerRow,
    PatternRow,
    TokenRow,
)
from mainstem.run.windows import Windows
from mainstem.units import Unit

CONTROLS = ("random", "nearest", "same_norm")
PLAIN = "nowhere none"
BEFORE = 6
"""How many tokens are shown before one."""
EARLY = 32
"""The positions of a window that count as its beginning."""
MOST = 700.0
"""The largest exponent: beyond it a float overflows."""

Evaluations = Mapping[str, Evaluation]
Patterns = Mapping[str, Float[Tensor, "unit measure"]]


def run_rows(made: Evaluations, seed: int) -> list[AblationRow]:
    """A row for each run, draws of one control together; the model as it is comes first."""
    grouped: dict[tuple[str, str], list[Evaluation]] = {}
    for name, own in made.items():
        where, what, *_ = name.split(" ")
        if where != "alone":
            grouped.setdefault((where, what), []).append(own)
    return [_run_row(where, what, own, made[PLAIN], seed) for (where, what), own in grouped.items()]


def _run_row(where: str, what: str, own: Sequence[Evaluation], plain: Evaluation, seed: int) -> AblationRow:
    changes = [change(each, plain) for each in own]
    mean, low, high = sum(changes) / len(changes), min(changes), max(changes)
    if len(own) == 1 and what not in CONTROLS:
        found = difference(own[0].nats.tolist(), plain.nats.tolist(), seed)
        low, high = found.low, found.high
    return AblationRow(
        where=where,
        what=what,
        draws=len(own),
        tokens=len(plain.nats),
        change=mean,
        low=low,
        high=high,
        perplexity=math.exp(min(plain.loss + mean, MOST)),
        ratio=math.exp(min(mean, MOST)),
        kl=_mean([float(each.kl.mean()) for each in own]),
        flips=_mean([each.flip_rate for each in own]),
        output_top=_mean([float(each.top.mean()) for each in own]),
    )


def change(run: Evaluation, plain: Evaluation) -> float:
    """How much more loss a token has, in nats."""
    return float((run.nats - plain.nats).mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def dimension_rows(
    dimensions: Sequence[int], sizes: Float[Tensor, " d_model"], controls: Evaluations
) -> list[DimensionRow]:
    """Each dimension with its size and, where it was taken out alone, what that did."""
    plain = controls[PLAIN]
    alone = {d: controls.get(f"alone {d}") for d in dimensions}
    if len(dimensions) == 1:
        alone = {dimensions[0]: controls["attention zero"]}
    return [
        DimensionRow(d, float(sizes[d]), None if (run := alone[d]) is None else change(run, plain)) for d in dimensions
    ]


def verdicts(controls: Evaluations) -> list[ControlVerdict]:
    """The dimensions against each control."""
    plain, found = controls[PLAIN], []
    for where in ("attention", "everywhere"):
        own = change(controls[f"{where} zero"], plain)
        for control in CONTROLS:
            draws = draws_of(controls, where, control)
            raised = math.expm1(min(_mean(draws), MOST))
            times = math.expm1(min(own, MOST)) / raised if min(own, raised) > 0 else None
            found.append(ControlVerdict(where, control, times, own > max(draws)))
    return found


# --- patterns ---------------------------------------------------------------------------------------------


def pattern_rows(patterns: Patterns) -> list[PatternRow]:
    """A row for each variant, draws of one control together."""
    grouped: dict[str, list[Tensor]] = {}
    for name, measures in patterns.items():
        grouped.setdefault(name.split(" ")[0], []).append(measures.mean(0))
    rows = []
    for what, draws in grouped.items():
        table = torch.stack(draws)
        top, first, moved = (table[:, MEASURES.index(name)] for name in ("top", "first", "moved"))
        mean = tuple(float(each.mean()) for each in (top, first, moved))
        rows.append(PatternRow(what, len(draws), mean[0], float(top.min()), float(top.max()), mean[1], mean[2]))
    return rows


def layer_rows(heads: Sequence[Unit], patterns: Patterns) -> list[LayerRow]:
    """A row for each sublayer, a mean over its heads."""
    if not heads:
        return []
    top = MEASURES.index("top")
    random = torch.stack([own[:, top] for name, own in patterns.items() if name.startswith("random ")]).mean(0)
    columns = (patterns["none"][:, top], patterns["zero"][:, top], random)
    rows = []
    for sublayer in dict.fromkeys(head.sublayer for head in heads):
        own = torch.tensor([head.sublayer == sublayer for head in heads])
        rows.append(LayerRow(str(sublayer), *(float(column[own].mean()) for column in columns)))
    return rows


def head_rows(heads: Sequence[Unit], patterns: Patterns) -> list[HeadRow]:
    """A row for each head, the most moved first."""
    if not heads:
        return []
    top, first, moved = (MEASURES.index(name) for name in ("top", "first", "moved"))
    plain, zero = patterns["none"].tolist(), patterns["zero"].tolist()
    rows = [
        HeadRow(str(head), before[top], after[top], before[first], after[first], after[moved])
        for head, before, after in zip(heads, plain, zero, strict=True)
    ]
    return sorted(rows, key=lambda row: row.moved, reverse=True)


# --- tokens -----------------------------------------------------------------------------------------------


def token_rows(whole: Evaluations, on: Reference, token: Callable[[int], str], top: int) -> list[TokenRow]:
    """The tokens whose loss rises most with the dimensions zeroed at attention's inputs."""
    before, after = whole[PLAIN].nats, whole["attention zero"].nats
    fresh, predicted = on.windows.fresh(), on.windows.predicted()
    places = torch.arange(int(fresh.sum()))[predicted[fresh]]
    most = (after - before).topk(min(top, len(before))).indices.tolist()
    rows = []
    for i in most:
        place = int(places[i])
        earlier = "".join(map(token, on.ids[max(place - BEFORE, 0) : place]))
        rows.append(TokenRow(place, earlier, token(on.ids[place]), float(before[i]), float(after[i])))
    return rows


def group_rows(whole: Evaluations, windows: Windows) -> list[GroupRow]:
    """Kinds of tokens: at the beginning of a window or later, there before in the window or new."""
    before, after = whole[PLAIN].nats, whole["attention zero"].nats
    counted = windows.predicted()
    place = torch.arange(windows.length).expand_as(windows.ids)[counted]
    seen = torch.stack([_seen_before(row) for row in windows.ids])[counted]
    kinds = {
        f"positions 1 to {EARLY - 1}": place < EARLY,
        f"position {EARLY} and later": place >= EARLY,
        "new in the window": ~seen,
        "there before in the window": seen,
    }
    return [
        GroupRow(name, int(own.sum()), float(before[own].mean()), float((after - before)[own].mean()))
        for name, own in kinds.items()
        if bool(own.any())
    ]


def _seen_before(ids: Tensor) -> Tensor:
    return (ids[:, None] == ids).tril(-1).any(-1)


# --- warnings ---------------------------------------------------------------------------------------------


def warnings(whole: Evaluations, controls: Evaluations) -> list[Warning]:
    """What a reader of the section should know, of what is done at attention's inputs."""
    zero, constant = (change(whole[f"attention {what}"], whole[PLAIN]) for what in ("zero", "mean_by_place"))
    short = change(controls["attention zero"], controls[PLAIN])
    return zero_warning(zero, constant) + size_warning(short, max(draws_of(controls, "attention", "same_norm")))


def draws_of(controls: Evaluations, where: str, control: str) -> list[float]:
    """How much more loss each draw of a control has."""
    plain = controls[PLAIN]
    return [change(run, plain) for name, run in controls.items() if name.startswith(f"{where} {control} ")]
