"""What is measured at the points of the stream while a text goes by: see `mainstem.causal.stream_watch.watch`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.kurtosis import token_kurtosis
from mainstem.analysis.moments import Moments, MomentTable
from mainstem.analysis.outliers import OutlierCounts
from mainstem.analysis.peaks import MassiveCriterion, Peaks, medians_and_largest
from mainstem.analysis.rotations import random_rotation
from mainstem.causal.stream_points import PointKind, StreamPoint
from mainstem.causal.stream_watch import Scratch, Seen
from mainstem.errors import RunError


class PointMoments:
    """The moments of every point: of tokens at the first position of a window, and of the rest."""

    FIRSTS = 64
    """How many vectors at first positions are held until their moments are worth computing."""

    def __init__(self, points: Sequence[StreamPoint]) -> None:
        self.points = points
        self.rest: dict[int, MomentTable] = {}
        self.first: list[Moments | None] = [None] * len(points)
        self.held: list[list[Tensor]] = [[] for _ in points]

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """Adds one batch's; see `Watcher`."""
        for number, firsts in zip(numbers, seen.firsts, strict=True):
            if len(firsts):
                self.held[number].append(firsts.clone())
            if sum(len(part) for part in self.held[number]) >= self.FIRSTS:
                self._add_firsts(number)
        rest = seen.rest
        if rest.shape[1]:
            self._add(numbers, Moments.of(rest, seen.magnitudes_of_rest, seen.scratch.like(rest)))

    def _add(self, numbers: Sequence[int], made: Moments) -> None:
        width = made.mean.shape[-1]
        self.rest.setdefault(width, MomentTable(width)).add(numbers, made)

    def _add_firsts(self, number: int) -> None:
        made, known = Moments.of(torch.cat(self.held[number])), self.first[number]
        self.first[number] = made if known is None else known + made
        self.held[number].clear()

    def only(self, numbers: Sequence[int]) -> "PointMoments":
        """The same of some of the points."""
        made = PointMoments([self.points[number] for number in numbers])
        made.first = [self.first_positions(number) for number in numbers]
        for own, number in enumerate(numbers):
            made._add([own], self.without_first(number)[None])
        return made

    def whole(self, number: int) -> Moments:
        """All tokens' moments at a point."""
        first, rest = self.first_positions(number), self.without_first(number)
        return rest if first is None else first + rest

    def first_positions(self, number: int) -> Moments | None:
        """The moments at a point of the first positions of windows; None if none was counted."""
        if self.held[number]:
            self._add_firsts(number)
        return self.first[number]

    def without_first(self, number: int) -> Moments:
        """The moments at a point without the first positions of windows; windows have two tokens at least.

        Raises:
            RunError: the model did not come by it.
        """
        for table in self.rest.values():
            found = table.of(number)
            if found is not None:
                return found
        raise RunError("A place of the stream was not reached in the run", self.points[number].name)


class PointOutliers:
    """Outlier features over the points of one kind, in units of their vectors or of each token's root mean square.

    There are no counts where the points' widths differ, as those of heads may: they have no dimensions in common.
    """

    def __init__(self, points: Sequence[StreamPoint], kind: PointKind, magnitude: float, per_rms: bool = False) -> None:
        self.numbers = [number for number, point in enumerate(points) if point.kind == kind and point.layer is not None]
        self.layers = [points[number].layer or 0 for number in self.numbers]
        self.magnitude, self.per_rms = magnitude, per_rms
        self.counts: OutlierCounts | None = None

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """Counts one batch's; see `Watcher`."""
        rows = [row for row, number in enumerate(numbers) if number in self.numbers]
        if not rows:
            return
        width = seen.x.shape[-1]
        if self.counts is None:
            self.counts = OutlierCounts(self.layers, width, self.magnitude)
        if width != self.counts.hits.shape[1]:
            self.numbers, self.counts = [], None
            return
        all_are = len(rows) == len(numbers)
        x = seen.x if all_are else seen.x[rows]
        places = [self.numbers.index(numbers[row]) for row in rows]
        if self.per_rms:
            self.counts.add(places, in_units(x, seen.scratch))
        else:
            self.counts.add(places, x, seen.magnitudes if all_are else seen.magnitudes[rows])


def in_units(x: Float[Tensor, "point token d_model"], scratch: Scratch) -> Float[Tensor, "point token d_model"]:
    """Vectors in units of their root mean square, in `scratch`; zeros stay zeros."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.mul(x, (x.shape[-1] ** 0.5 / norms).nan_to_num(posinf=0.0), out=scratch.like(x))


class PointPeaks:
    """Massive activations at the states of the stream."""

    def __init__(self, points: Sequence[StreamPoint], criterion: MassiveCriterion) -> None:
        self.peaks = {number: Peaks(criterion) for number, point in enumerate(points) if point.kind == "stream"}

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """Adds one batch's; see `Watcher`."""
        if numbers[0] not in self.peaks:
            return
        tokens = seen.rows.tokens
        medians, largest = medians_and_largest(seen.x[:, tokens.sampled.to(seen.x.device)])
        for row, number in enumerate(numbers):
            self.peaks[number].add(seen.x[row], tokens, medians[row], largest[row], seen.magnitudes[row])

    def ratio(self, number: int) -> float | None:
        """The mean of the largest magnitude over the median one, where it was measured."""
        return self.peaks[number].max_over_median if number in self.peaks else None


class RotatedKurtosis:
    """The null: each point's mean kurtosis after each of some random rotations, the same ones at all points."""

    def __init__(self, points: Sequence[StreamPoint], d_model: int, draws: int, seed: int) -> None:
        self.points, self.d_model, self.draws = list(points), d_model, draws
        self.rotations = torch.cat([random_rotation(d_model, seed + draw) for draw in range(draws)], 1)
        self.cast: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.sums = torch.zeros(len(points), draws, dtype=torch.float64)
        self.tokens = torch.zeros(len(points), dtype=torch.int64)

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """Adds one batch's; see `Watcher`. First positions of windows and tokens that are all zero are left out."""
        for number, x in zip(numbers, seen.rest, strict=True):
            key = x.dtype, x.device
            if key not in self.cast:
                self.cast[key] = self.rotations.to(x)
            turned = (x @ self.cast[key]).reshape(-1, self.d_model)
            kurtosis = token_kurtosis(turned).reshape(len(x), self.draws)
            varied = ~kurtosis.isnan().any(1)
            self.sums[number] += kurtosis[varied].sum(0).cpu()
            self.tokens[number] += int(varied.sum())

    def kurtosis(self) -> Float[Tensor, "point draw"]:
        """Each point's mean kurtosis after each rotation; NaN where no token has one."""
        return self.sums / self.tokens[:, None]


class ThinnedKurtosis:
    """Each point's mean kurtosis over all dimensions but one, its own for each point; no first positions of windows."""

    def __init__(self, dimensions: Sequence[int]) -> None:
        """Nothing seen yet; `dimensions` names the one that each point is without."""
        self.dimensions = list(dimensions)
        self.sums = torch.zeros(len(self.dimensions), dtype=torch.float64)
        self.tokens = torch.zeros(len(self.dimensions), dtype=torch.int64)

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """Adds one batch's; see `Watcher`. Tokens whose other dimensions are all equal are left out."""
        for number, x in zip(numbers, seen.rest, strict=True):
            left = self.dimensions[number]
            kurtosis = token_kurtosis(torch.cat([x[:, :left], x[:, left + 1 :]], 1))
            self.sums[number] += kurtosis.nansum().cpu()
            self.tokens[number] += int((~kurtosis.isnan()).sum())

    def kurtosis(self) -> Float[Tensor, " point"]:
        """Each point's mean kurtosis; NaN where no token has one."""
        return self.sums / self.tokens
