"""Massive activations (Sun et al. 2024): single numbers that dwarf all others of their vector, and on which tokens.

Published: a magnitude above 100 that is at least about 1,000 times the median magnitude of the hidden state of its
sequence, here of its window: the median of its tokens' medians. A vector's largest magnitude over its median one (He et
al. 2024) is another number. Medians are taken of every eighth token, because they cost more than all moments together.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EVERY = 8


@dataclass(frozen=True)
class MassiveCriterion:
    """What makes an activation massive: a magnitude, and how many times the median of its window."""

    magnitude: float = 100.0
    times: float = 1000.0


@dataclass
class Massive:
    """One dimension's massive activations at one place.

    Attributes:
        count: how many.
        firsts: how many of them are at the first position of a window.
        value: the largest.
        times: how many times the median magnitude of its window that is.
        token, place: its token's id, and where it is in the text.
        tokens: how many of them are on which token.
    """

    count: int = 0
    firsts: int = 0
    value: float = 0.0
    times: float = 0.0
    token: int = 0
    place: int = 0
    tokens: Counter[int] = field(default_factory=Counter)

    def add(self, value: float, median: float, token: int, place: int) -> None:
        """One more."""
        self.count += 1
        self.tokens[token] += 1
        if abs(value) > abs(self.value):
            self.value, self.token, self.place = value, token, place
            self.times = abs(value) / median if median else float("inf")


@dataclass(frozen=True, eq=False)
class Tokens:
    """Where the vectors of one batch are from.

    Attributes:
        ids: the tokens.
        places: where they are in the text.
        windows: which window of the batch they are in.
        positions: where they are in it.
    """

    ids: Int[Tensor, " token"]
    places: Int[Tensor, " token"]
    windows: Int[Tensor, " token"]
    positions: Int[Tensor, " token"]

    @cached_property
    def sampled(self) -> Int[Tensor, " sample"]:
        """Those of which medians are taken; none is at a first position."""
        return (self.positions % EVERY == EVERY // 2).nonzero()[:, 0]

    @cached_property
    def by_window(self) -> list[Bool[Tensor, " token"]]:
        """For each window which tokens are in it."""
        return [self.windows == window for window in self.windows.unique().tolist()]


class Peaks:
    """What stands out at one place, token by token."""

    def __init__(self, criterion: MassiveCriterion) -> None:
        self.criterion = criterion
        self.massive: dict[int, Massive] = {}
        self.ratio_sum = 0.0
        self.sampled = 0

    def add(
        self,
        x: Float[Tensor, "token d_model"],
        tokens: Tokens,
        medians: Float[Tensor, " sample"],
        largest: Float[Tensor, " sample"],
        magnitudes: Float[Tensor, " d_model"],
    ) -> None:
        """One batch.

        Args:
            x: vectors.
            tokens: where they are from.
            medians: the median magnitude of each sampled one, from `medians_and_largest`.
            largest: the largest of each, from there too.
            magnitudes: each coordinate's largest magnitude in `x`.
        """
        ratios = largest / medians
        finite = ratios.isfinite()
        self.ratio_sum += float(ratios[finite].sum())
        self.sampled += int(finite.sum())
        if float(magnitudes.max()) <= self.criterion.magnitude:
            return
        for inside in tokens.by_window:
            known = medians[inside[tokens.sampled]]
            known = known if len(known) else medians_and_largest(x[inside.to(x.device)])[0]
            self._add_massive(x, tokens, inside, float(known.median()), magnitudes)

    def _add_massive(
        self,
        x: Float[Tensor, "token d_model"],
        tokens: Tokens,
        inside: Bool[Tensor, " token"],
        median: float,
        magnitudes: Float[Tensor, " d_model"],
    ) -> None:
        """Those of one window with this median."""
        large, least = self.criterion.magnitude, self.criterion.times * median
        dimensions = ((magnitudes > large) & (magnitudes >= least)).nonzero()[:, 0]
        columns = x[:, dimensions].cpu()
        sizes = columns.abs()
        for row, column in ((sizes > large) & (sizes >= least) & inside[:, None]).nonzero().tolist():
            found = self.massive.setdefault(int(dimensions[column]), Massive())
            found.add(float(columns[row, column]), median, int(tokens.ids[row]), int(tokens.places[row]))
            found.firsts += int(tokens.positions[row]) == 0

    @property
    def max_over_median(self) -> float:
        """The largest magnitude over the median one, a mean over sampled tokens, none of them at a first position."""
        return self.ratio_sum / self.sampled if self.sampled else float("nan")


def medians_and_largest(
    x: Float[Tensor, "*point token d_model"],
) -> tuple[Float[Tensor, "*point token"], Float[Tensor, "*point token"]]:
    """Each vector's median magnitude (the lower one of an even number) and its largest, by NumPy's faster selection."""
    middle = (x.shape[-1] - 1) // 2
    parted = np.partition(x.abs().float().cpu().numpy(), middle, axis=-1)
    return torch.from_numpy(parted[..., middle]).double(), torch.from_numpy(parted[..., middle:].max(-1)).double()
