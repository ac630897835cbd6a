"""One pass over a text, with everything measured at every point of the stream while it runs, and nothing kept.

`watch` runs the model window by window and shows each point's vectors to what measures them (`Watcher`): sums in
`mainstem.analysis`, whose size does not depend on the text. Each token is counted once, however windows overlap. The
first position of a window is shown apart, because in many models it is a sink with values like no other's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.kurtosis import token_kurtosis
from mainstem.analysis.moments import Moments
from mainstem.analysis.outliers import OutlierCounts
from mainstem.analysis.peaks import MassiveCriterion, Peaks
from mainstem.analysis.rotations import random_rotation
from mainstem.causal.stream_points import PointKind, StreamPoint, tap_at
from mainstem.errors import NotFiniteError
from mainstem.model.hooks import tapped
from mainstem.run.windows import Windows


@dataclass(frozen=True, eq=False)
class Rows:
    """The counted tokens of one batch of windows, those at the first position of a window in front.

    Attributes:
        shape: (batch, pos) of the run.
        index: [token] where they are in the batch made flat.
        firsts: how many of them are at a window's first position.
        ids: [token] the tokens.
        places: [token] where they are in the text.
    """

    shape: tuple[int, int]
    index: Int[Tensor, " token"]
    firsts: int
    ids: Int[Tensor, " token"]
    places: Int[Tensor, " token"]

    @classmethod
    def of(cls, windows: Windows, rows: slice, before: int) -> "Rows":
        """Those of some windows; `before` is how many tokens earlier windows had."""
        fresh, ids = windows.fresh(rows), windows.ids[rows]
        order = torch.arange(fresh.numel())
        counted = order[fresh.flatten()]
        places = before + torch.arange(len(counted))
        first = counted % windows.length == 0
        sorting = torch.cat([first.nonzero()[:, 0], (~first).nonzero()[:, 0]])
        index = counted[sorting]
        return cls(tuple(ids.shape), index, int(first.sum()), ids.flatten()[index], places[sorting])  # type: ignore[arg-type]

    def of_run(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "token d_model"]:
        """The rows of a value of the run; no copy where they are all of it."""
        flat = x.flatten(0, 1)
        if len(self.index) == len(flat) and self.firsts <= 1:
            return flat
        return flat[self.index.to(flat.device)]


class Scratch:
    """Memory that is used again from point to point: fresh memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self.held = torch.empty(0)

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of the shape of `x`, with anything in it; by default of its dtype, float32 at least."""
        dtype = torch.promote_types(x.dtype, torch.float32) if dtype is None else dtype
        if (self.held.shape, self.held.dtype, self.held.device) != (x.shape, dtype, x.device):
            self.held = torch.empty_like(x, dtype=dtype)
        return self.held


@dataclass(frozen=True, eq=False)
class Seen:
    """One point's vectors in one batch, and what several watchers take from them.

    Attributes:
        x: the vectors of the counted tokens, those at first positions of windows in front.
        rows: the tokens.
        scratch: memory to work in, shared by all that look on.
    """

    x: Float[Tensor, "token d_model"]
    rows: Rows
    scratch: Scratch = field(default_factory=Scratch)

    @property
    def firsts(self) -> Float[Tensor, "token d_model"]:
        """Those at the first position of a window."""
        return self.x[: self.rows.firsts]

    @property
    def rest(self) -> Float[Tensor, "token d_model"]:
        """The others."""
        return self.x[self.rows.firsts :]

    @cached_property
    def magnitudes_of_rest(self) -> Float[Tensor, " d_model"]:
        """Each coordinate's largest magnitude among the others; there has to be one."""
        return torch.abs(self.rest, out=self.scratch.like(self.rest, self.rest.dtype)).amax(0)

    @cached_property
    def magnitudes(self) -> Float[Tensor, " d_model"]:
        """Each coordinate's largest magnitude among all."""
        parts = [self.firsts.abs().amax(0)] if len(self.firsts) else []
        parts += [self.magnitudes_of_rest] if len(self.rest) else []
        return torch.stack(parts).amax(0)


class Watcher(Protocol):
    """What measures points of the stream."""

    def see(self, number: int, seen: Seen) -> None:
        """Point `number`'s vectors in one batch."""
        ...


Forward = Callable[[Int[Tensor, "batch pos"]], Any]


@torch.no_grad()
def watch(
    module: torch.nn.Module,
    forward: Forward,
    points: Sequence[StreamPoint],
    windows: Windows,
    watchers: Sequence[Watcher],
    batch: int = 1,
    report: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Runs a text and shows every point of every batch to every watcher.

    Args:
        module: the model; it is left as it was.
        forward: a forward pass of it.
        points: what is watched.
        windows: the text.
        watchers: what measures; the memory is theirs.
        batch: windows that run together.
        report: called after each batch with the number of tokens done.
    """
    state: list[Rows] = []
    scratch = Scratch()

    def tap(number: int, point: StreamPoint):
        def see(x: Tensor) -> None:
            seen = Seen(state[-1].of_run(x), state[-1], scratch)
            for watcher in watchers:
                watcher.see(number, seen)

        return tap_at(point, see, lambda: state[-1].shape)

    done = 0
    with tapped(module, [tap(number, point) for number, point in enumerate(points)]):
        for rows in windows.batches(batch):
            state[:] = [Rows.of(windows, rows, done)]
            forward(windows.ids[rows])
            done += len(state[-1].index)
            report(done)


class PointMoments:
    """The moments of every point: of tokens at the first position of a window, and of the rest."""

    FIRSTS = 64
    """How many vectors at first positions are held until their moments are worth computing."""

    def __init__(self, points: Sequence[StreamPoint]) -> None:
        self.points = points
        self.rest: list[Moments | None] = [None] * len(points)
        self.first: list[Moments | None] = [None] * len(points)
        self.held: list[list[Tensor]] = [[] for _ in points]

    def see(self, number: int, seen: Seen) -> None:
        """Adds one batch's; see `Watcher`.

        Raises:
            NotFiniteError: something in it is no finite number; names the point.
        """
        if len(seen.firsts):
            self.held[number].append(seen.firsts.clone())
            if sum(len(part) for part in self.held[number]) >= self.FIRSTS:
                self._add_firsts(number)
        if len(seen.rest):
            self._add(self.rest, number, Moments.of(seen.rest, seen.magnitudes_of_rest, seen.scratch.like(seen.rest)))

    def _add_firsts(self, number: int) -> None:
        self._add(self.first, number, Moments.of(torch.cat(self.held[number])))
        self.held[number].clear()

    def _add(self, sums: list[Moments | None], number: int, made: Moments) -> None:
        known = sums[number]
        if not bool(torch.isfinite(made.magnitude).all()):
            raise NotFiniteError("A value of the stream is not finite", self.points[number].name)
        sums[number] = made if known is None else known + made

    def only(self, numbers: Sequence[int]) -> "PointMoments":
        """The same of some of the points."""
        made = PointMoments([self.points[number] for number in numbers])
        made.first = [self.first_positions(number) for number in numbers]
        made.rest = [self.rest[number] for number in numbers]
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
        """The moments at a point without the first positions of windows."""
        found = self.rest[number]
        assert found is not None, "windows have two tokens at least"
        return found


class PointOutliers:
    """Outlier features over the points of one kind, in units of their vectors or of each token's root mean square.

    There are no counts where the points' widths differ, as those of heads may: they have no dimensions in common.
    """

    def __init__(self, points: Sequence[StreamPoint], kind: PointKind, magnitude: float, per_rms: bool = False) -> None:
        self.numbers = [number for number, point in enumerate(points) if point.kind == kind and point.layer is not None]
        self.layers = [point.layer for point in points]
        self.magnitude, self.per_rms = magnitude, per_rms
        self.counts: OutlierCounts | None = None

    def see(self, number: int, seen: Seen) -> None:
        """Counts one batch's; see `Watcher`."""
        if number not in self.numbers:
            return
        x = seen.x
        if self.counts is None:
            layers = [self.layers[own] or 0 for own in self.numbers]
            self.counts = OutlierCounts(layers, x.shape[1], self.magnitude)
        if x.shape[1] != self.counts.hits.shape[1]:
            self.numbers, self.counts = [], None
            return
        place, magnitudes = self.numbers.index(number), None if self.per_rms else seen.magnitudes
        self.counts.add(place, in_units(x, seen.scratch) if self.per_rms else x, magnitudes)


def in_units(x: Float[Tensor, "token d_model"], scratch: Scratch) -> Float[Tensor, "token d_model"]:
    """Vectors in units of their root mean square, in `scratch`; zeros stay zeros."""
    wide = x if x.dtype == torch.float64 else x.float()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return torch.mul(wide, (x.shape[1] ** 0.5 / norms).nan_to_num(posinf=0.0), out=scratch.like(x))


class PointPeaks:
    """Massive activations at the states of the stream."""

    def __init__(self, points: Sequence[StreamPoint], criterion: MassiveCriterion) -> None:
        self.peaks = {number: Peaks(criterion) for number, point in enumerate(points) if point.kind == "stream"}

    def see(self, number: int, seen: Seen) -> None:
        """Adds one batch's; see `Watcher`."""
        if number in self.peaks:
            rows, length = seen.rows, seen.rows.shape[1]
            self.peaks[number].add(seen.x, rows.ids, rows.places, rows.index // length, rows.index % length)

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

    def see(self, number: int, seen: Seen) -> None:
        """Adds one batch's; see `Watcher`. First positions of windows and tokens that are all zero are left out."""
        x = seen.rest
        kept = x if x.dtype == torch.float64 else x.float()
        key = kept.dtype, kept.device
        if key not in self.cast:
            self.cast[key] = self.rotations.to(kept)
        turned = (kept @ self.cast[key]).reshape(-1, self.d_model)
        kurtosis = token_kurtosis(turned).reshape(len(kept), self.draws)
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

    def see(self, number: int, seen: Seen) -> None:
        """Adds one batch's; see `Watcher`. Tokens whose other dimensions are all equal are left out."""
        left = self.dimensions[number]
        x = seen.rest
        kurtosis = token_kurtosis(torch.cat([x[:, :left], x[:, left + 1 :]], 1))
        self.sums[number] += kurtosis.nansum().cpu()
        self.tokens[number] += int((~kurtosis.isnan()).sum())

    def kurtosis(self) -> Float[Tensor, " point"]:
        """Each point's mean kurtosis; NaN where no token has one."""
        return self.sums / self.tokens
