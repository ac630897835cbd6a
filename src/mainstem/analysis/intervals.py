"""A mean with the interval around it: what `statistics` computes and reports show; nothing heavy is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval of 95 %."""

    mean: float
    low: float
    high: float
