"""Statistics of every point of the stream over a text, and what the basis report says of their kurtosis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.analysis.kurtosis import random_expectation
from mainstem.basis.reference import Reference
from mainstem.causal.stream_points import StreamPoint, stream_points
from mainstem.causal.stream_statistics import Forward, PointMoments, RotatedKurtosis, watch
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow
from mainstem.run.inputs import base_arguments
from mainstem.run.windows import windows

if TYPE_CHECKING:
    from mainstem.session import Model

ROTATIONS, ROTATED_TOKENS = 10, 512


@dataclass(frozen=True, eq=False)
class StreamStatistics:
    """What one pass over a text left: moments of every point of the stream, and of what sublayers read."""

    points: list[StreamPoint]
    moments: PointMoments
    rotated: RotatedKurtosis


def forward_of(model: "Model") -> Forward:
    """A forward pass of windows of tokens."""
    device = next(model.module.parameters()).device
    arguments = base_arguments(model.module)

    def forward(ids: Int[Tensor, "batch pos"]) -> object:
        return model.module(input_ids=ids.to(device), **arguments)

    return forward


def measure_stream(
    model: "Model",
    on: Reference,
    rotations: int = ROTATIONS,
    rotated_tokens: int = ROTATED_TOKENS,
    report: Callable[[str], None] = lambda text: None,
) -> StreamStatistics:
    """One pass over a text, and a short one for the null.

    Args:
        model: the model.
        on: the text.
        rotations: random rotations of the null.
        rotated_tokens: how many tokens of the text the null is made of, at most 2,048; whole windows, one at least.
        report: is told what is going on.
    """
    points = stream_points(model.anatomy, "stream", "input")
    moments, forward = PointMoments(points), forward_of(model)
    total = on.windows.n_tokens
    watch(model.module, forward, points, on.windows, [moments], report=lambda n: report(f"{n:,} of {total:,} tokens"))
    length = on.windows.length
    short = windows(on.ids[: max(rotated_tokens // length, 1) * length], length)
    widths = [len(moments.rest[number].mean) for number in range(len(points))]  # type: ignore[union-attr]
    rotated = RotatedKurtosis(points, widths, rotations, model.seed)
    watch(model.module, forward, points, short, [rotated])
    return StreamStatistics(points, moments, rotated)


def kurtosis_section(statistics: StreamStatistics, d_model: int) -> KurtosisSection:
    """What the report says of kurtosis."""
    moments, rotated = statistics.moments, statistics.rotated
    null = rotated.kurtosis()
    rows = [_row(point, number, moments, null[number]) for number, point in enumerate(statistics.points)]
    first = moments.first[0]
    return KurtosisSection(
        tokens={"all": moments.whole(0).tokens, "first": 0 if first is None else first.tokens},
        expectation=random_expectation(d_model),
        rotations={"draws": rotated.draws, "tokens": int(rotated.tokens[0])},
        points=rows,
    )


def _row(point: StreamPoint, number: int, moments: PointMoments, null: torch.Tensor) -> PointRow:
    whole, rest = moments.whole(number), moments.without_first(number)
    return PointRow(
        point.name, point.kind, point.layer, whole.kurtosis, rest.kurtosis, float(null.mean()), float(null.min()),
        float(null.max()), whole.neuron_kurtosis, rest.neuron_kurtosis,
    )  # fmt: skip
