"""Massive activations (Sun et al. 2024): single numbers that dwarf all others of their vector, and on which tokens.

Published: a magnitude above 100 that is at least about 1,000 times the median magnitude of the hidden state of its
sequence, here of its window: the median of its tokens' medians. A vector's largest magnitude over its median one (He et
al. 2024) is another number. Medians are taken of every eighth token, because they cost more than all moments together.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
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
        ids: Int[Tensor, " token"],
        places: Int[Tensor, " token"],
        windows: Int[Tensor, " token"],
        positions: Int[Tensor, " token"],
    ) -> None:
        """One batch.

        Args:
            x: vectors.
            ids: their tokens.
            places: where they are in the text.
            windows: which window of the batch they are in.
            positions: where they are in it.
        """
        largest = torch.maximum(x.amax(1), -x.amin(1)).cpu()
        sampled = (positions % EVERY == EVERY // 2).nonzero()[:, 0]
        medians = _medians(x[sampled.to(x.device)])
        ratios = largest[sampled].double() / medians
        finite = ratios.isfinite()
        self.ratio_sum += float(ratios[finite].sum())
        self.sampled += int(finite.sum())
        for window in windows[largest > self.criterion.magnitude].unique().tolist():
            inside = windows == window
            known = medians[inside[sampled]]
            median = float((known if len(known) else _medians(x[inside.to(x.device)])).median())
            least = max(self.criterion.magnitude, self.criterion.times * median)
            for row in (inside & (largest >= least)).nonzero()[:, 0].tolist():
                for dimension in (x[row].abs() >= least).nonzero()[:, 0].tolist():
                    found = self.massive.setdefault(dimension, Massive())
                    found.add(float(x[row, dimension]), median, int(ids[row]), int(places[row]))
                    found.firsts += int(positions[row]) == 0

    @property
    def max_over_median(self) -> float:
        """The largest magnitude over the median one, a mean over sampled tokens, none of them at a first position."""
        return self.ratio_sum / self.sampled if self.sampled else float("nan")


def _medians(x: Float[Tensor, "token d_model"]) -> Float[Tensor, " token"]:
    """Each row's median magnitude (the lower one of an even number), by NumPy's selection, which is faster."""
    middle = (x.shape[1] - 1) // 2
    rows = np.partition(x.abs().float().cpu().numpy(), middle, axis=1)[:, middle]
    return torch.from_numpy(rows).double()
