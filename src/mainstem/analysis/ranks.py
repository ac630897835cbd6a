"""Whether two lists of scores put the same units in the same order: Spearman's rank correlation.

Equal scores share the mean of their ranks. The interval is the percentile bootstrap over units, 95 %.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

DRAWS = 1000


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's correlation, its bootstrap interval of 95 %, and how many units it is over; NaN for too few."""

    value: float
    low: float
    high: float
    units: int


def ranks(scores: Float[Tensor, "*draw unit"]) -> Float[Tensor, "*draw unit"]:
    """Ranks from 0 along the last axis; equal scores share their mean rank."""
    ordered, order = scores.sort(-1)
    first = torch.searchsorted(ordered, ordered, side="left")
    last = torch.searchsorted(ordered, ordered, side="right") - 1
    shared = (first + last).double() / 2
    return torch.empty_like(shared).scatter_(-1, order, shared)


def pearson(a: Float[Tensor, "*draw unit"], b: Float[Tensor, "*draw unit"]) -> Float[Tensor, "*draw"]:
    """The correlation along the last axis; NaN where all entries of one list are equal."""
    x, y = (scores - scores.mean(-1, keepdim=True) for scores in (a, b))
    return ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).clamp(-1, 1)


def correlation(a: Float[Tensor, "*draw unit"], b: Float[Tensor, "*draw unit"]) -> Float[Tensor, "*draw"]:
    """Spearman's correlation along the last axis: that of the ranks; NaN where all scores of one list are equal."""
    return pearson(ranks(a), ranks(b))


def rank_correlation(a: Float[Tensor, " unit"], b: Float[Tensor, " unit"], seed: int = 0) -> RankCorrelation:
    """Spearman's correlation of two scores of the same units, with its interval."""
    count = len(a)
    if count < 3:
        return RankCorrelation(math.nan, math.nan, math.nan, count)
    a, b = a.double(), b.double()
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(seed)).to(a.device)
    draws = correlation(a[drawn], b[drawn])
    low, high = torch.nanquantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64, device=a.device)).tolist()
    return RankCorrelation(float(correlation(a, b)), low, high, count)
