"""Outlier features of a model's stream, and how they emerge with size: what `basis outliers` finds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mainstem.analysis.outliers import PUBLISHED, Criterion, Feature, OutlierCounts, variance_ranking
from mainstem.analysis.peaks import Massive
from mainstem.basis.measuring import Watched, measure_stream
from mainstem.basis.perplexing import perplexity
from mainstem.basis.reference import Reference, reference
from mainstem.causal.stream_statistics import PointOutliers
from mainstem.errors import UsageError
from mainstem.lab.texts import Text
from mainstem.results.basis_outliers import (
    EmergenceSection,
    FeatureRow,
    MassiveRow,
    OutlierSection,
    OutlierTable,
    ScaleRow,
    VarianceRow,
)
from mainstem.results.basis_report import BasisReport

if TYPE_CHECKING:
    from mainstem.session import Model

LISTED, COMMONEST, TOKENS = 10, 5, 2048


def read_outliers(
    model: "Model",
    text: Text | str | Path = "drama",
    others: Sequence[Callable[[], "Model"]] = (),
    tokens: int = 20_000,
    eval_tokens: int = 3_072,
    window: int | None = None,
    criterion: Criterion = PUBLISHED,
    say: Callable[[str], None] = lambda text: None,
) -> BasisReport:
    """Outlier features by the published criterion, in one model or in several.

    Args:
        model: the model.
        text: what `open_text` takes, or a text.
        others: functions that open further models, one at a time, to compare with.
        tokens: how many tokens are measured.
        eval_tokens: how many tokens perplexities are computed on.
        window: tokens of a window; 512 by default, or `tokens` or the model's context where that is shorter.
        criterion: the thresholds.
        say: is told what is going on.

    Raises:
        UsageError: a threshold that means nothing.
        TextError: the text cannot be had, or is shorter than a window.
    """
    check_criterion(criterion)
    on = reference(model, text, tokens, window)
    watched = measure_stream(model, on, criterion.magnitude, say=say)
    section = outlier_section(model, watched, criterion)
    short = on.first(eval_tokens)
    rows = [_scale_row(model, short, watched, section, say)] if others else []
    for opening in others:
        other = opening()
        seen = reference(other, on.text, tokens, window)
        measured = measure_stream(other, seen, criterion.magnitude, say=say)
        made = outlier_section(other, measured, criterion)
        rows.append(_scale_row(other, seen.first(eval_tokens), measured, made, say))
    return BasisReport(
        provenance=model.provenance(),
        warnings=[],
        model=model.summary,
        text=on.summary() | {"eval_tokens": short.windows.n_tokens},
        outliers=section,
        emergence=EmergenceSection(sorted(rows, key=lambda row: row.parameters)) if others else None,
        command="basis outliers",
    )


def check_criterion(criterion: Criterion) -> None:
    """Refuses thresholds that mean nothing.

    Raises:
        UsageError: a magnitude of nothing, or a share outside 0 to 1.
    """
    if not criterion.magnitude > 0:
        raise UsageError("An outlier has a magnitude above 0", f"magnitude {criterion.magnitude}", "6 was published.")
    for name in ("layers", "positions"):
        if not 0 <= getattr(criterion, name) <= 1:
            raise UsageError("A share is from 0 to 1", f"{name} {getattr(criterion, name)}", "Write 0.25 for 25 %.")


def outlier_section(model: "Model", watched: Watched, criterion: Criterion) -> OutlierSection:
    """What the report says of outliers."""
    kinds = {"input": watched.inputs, "heads": watched.heads, "stream": watched.stream}
    reads = [number for number, point in enumerate(watched.points) if point.kind == "input"]
    variances = torch.stack([watched.moments.without_first(number).variance for number in reads])
    ranked = variance_ranking(variances, LISTED)
    return OutlierSection(
        criterion=asdict(criterion),
        massive_criterion=asdict(watched.massive_criterion),
        tables=[
            _table(kind, seen, seen.counts, watched, criterion)
            for kind, seen in kinds.items()
            if seen.counts is not None
        ],
        variance=[VarianceRow(int(d), float(times)) for d, times in zip(*ranked, strict=True)],
        massive=_massive(model, watched),
    )


def _table(
    kind: str, seen: PointOutliers, counts: OutlierCounts, watched: Watched, criterion: Criterion
) -> OutlierTable:
    features = counts.features(criterion)
    chosen = [one for one in features if one.qualifies]
    return OutlierTable(
        kind=kind,
        places=[watched.points[number].name for number in seen.numbers],
        layers=len(set(counts.layers)),
        tokens=int(counts.tokens[0]),
        features=len(chosen),
        one_sided=sum(one.one_sided for one in chosen),
        layers_affected=max((one.layers for one in chosen), default=0.0),
        positions_affected=max((one.positions for one in chosen), default=0.0),
        values=counts.values / int(counts.tokens[0]) * TOKENS,
        rows=[_feature_row(one, counts) for one in features[: max(LISTED, len(chosen))]],
    )


def _feature_row(one: Feature, counts: OutlierCounts) -> FeatureRow:
    by_place = counts.hits[:, one.dimension].double() / counts.tokens
    return FeatureRow(
        one.dimension, one.qualifies, one.layers, one.layers_often, one.positions, one.count, one.positive,
        one.one_sided, one.quartiles, by_place.tolist(),
    )  # fmt: skip


def _massive(model: "Model", watched: Watched) -> list[MassiveRow]:
    """Each dimension's massive activations along the stream."""
    found: dict[int, list[tuple[str, Massive]]] = {}
    for number, peaks in watched.peaks.peaks.items():
        for dimension, one in peaks.massive.items():
            found.setdefault(dimension, []).append((watched.points[number].name, one))
    rows = []
    for dimension, states in found.items():
        largest = max((one for _, one in states), key=lambda one: abs(one.value))
        most = max((one for _, one in states), key=lambda one: one.count)
        rows.append(
            MassiveRow(
                dimension=dimension,
                first=states[0][0],
                last=states[-1][0],
                states=len(states),
                count=most.count,
                firsts=most.firsts,
                value=largest.value,
                times=largest.times,
                place=largest.place,
                token=model.token(largest.token),
                tokens=[model.token(token) for token, _ in most.tokens.most_common(COMMONEST)],
            )
        )
    return sorted(rows, key=lambda row: -abs(row.value))[:LISTED]


def _scale_row(
    model: "Model",
    on: Reference,
    watched: Watched,
    section: OutlierSection,
    say: Callable[[str], None],
) -> ScaleRow:
    say(f"Predicting {on.windows.n_tokens:,} tokens")
    table, sizes = section.table("input"), model.anatomy.sizes
    kurtosis = [
        watched.moments.whole(number).kurtosis for number, point in enumerate(watched.points) if point.kind == "stream"
    ]
    return ScaleRow(
        model=model.loaded.name,
        parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        n_layers=sizes.n_layers,
        d_model=sizes.d_model,
        perplexity=perplexity(model, on),
        features=table.features,
        one_sided=table.one_sided,
        layers_affected=table.layers_affected,
        positions_affected=table.positions_affected,
        values=table.values,
        kurtosis=max(kurtosis),
    )
