"""What can be said about many prompts: bootstrap intervals of means, and how stable a ranking of units is.

`split_half` asks whether other prompts would have given the same picture: prompts are split into two halves at random,
each unit's mean is taken in both, and the correlation of the two over units is r. Half as many prompts make noisier
means than all of them; what all of them would give against as many others is estimated by the formula of Spearman and
of Brown (1910), 2 r / (1 + r).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.intervals import Interval
from mainstem.analysis.ranks import pearson

DRAWS = 2000
SPLITS = 100


@dataclass(frozen=True)
class Stability:
    """How well two halves of the prompts agree about units.

    Attributes:
        half: the correlation between halves, a mean over random splits.
        whole: the same for all prompts against as many others, by the formula of Spearman and Brown.
        splits: how many splits were drawn.
    """

    half: float
    whole: float
    splits: int


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean of some values and the bootstrap interval of 95 % around it (percentile, 2,000 draws)."""
    if len(values) < 2:
        return Interval(values[0] if values else math.nan, math.nan, math.nan)
    data = torch.tensor(list(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = data[torch.randint(len(data), (DRAWS, len(data)), generator=generator)].mean(-1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(data.mean()), low, high)


def difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Interval:
    """The mean paired difference first - second and its interval."""
    return interval([a - b for a, b in zip(first, second, strict=True)], seed)


def split_half(table: Float[Tensor, "unit prompt"], seed: int = 0, splits: int = SPLITS) -> Stability:
    """The split-half stability of units' means over prompts.

    NaN where it is not defined: fewer than two units or prompts, or the same mean for all units in a half. With an odd
    number of prompts each split leaves one out, because the formula is for equal halves.

    Args:
        table: one number for each unit on each prompt.
        seed: of the splits.
        splits: how many.
    """
    units, prompts = table.shape
    half = prompts // 2
    if units < 2 or half == 0:
        return Stability(math.nan, math.nan, splits)
    generator = torch.Generator().manual_seed(seed)
    data = table.detach().cpu().double()
    correlations = []
    for _ in range(splits):
        order = torch.randperm(prompts, generator=generator)
        first, second = (data[:, order[part]].mean(-1) for part in (slice(half), slice(half, 2 * half)))
        correlations.append(float(pearson(first, second)))
    r = sum(correlations) / splits
    return Stability(r, 2 * r / (1 + r) if r > -1 else math.nan, splits)
