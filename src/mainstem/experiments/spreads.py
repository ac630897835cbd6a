"""Numbers of several seeds as words."""

from collections.abc import Sequence
from statistics import fmean


def percents(values: Sequence[float]) -> str:
    """The mean, the smallest and the largest, in percent."""
    return f"{fmean(values):.1%} [{min(values):.1%}, {max(values):.1%}]"
