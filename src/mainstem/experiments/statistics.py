"""Bootstrap intervals of means over prompts."""

import math
from collections.abc import Sequence

import torch

from mainstem.experiments.outcome import Interval

DRAWS = 2000


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
