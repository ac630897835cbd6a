"""Numbers of several seeds as words."""

from collections.abc import Sequence
from statistics import fmean


def percents(values: Sequence[float]) -> str:
    """The mean, the smallest and the largest, in percent."""
    return f"{fmean(values):.1%} [{min(values):.1%}, {max(values):.1%}]"


def listed(values: Sequence[float]) -> str:
    """The mean and, in brackets, the smallest and the largest."""
    return f"{fmean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def span(values: Sequence[float], form: str = ".2g") -> str:
    """The smallest and the largest, or the one that all are: whole numbers as they are, others in a format."""
    if not values:
        return "none"
    words = [str(value) if isinstance(value, int) else format(value, form) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(words))


def percent_span(values: Sequence[float]) -> str:
    """The same in whole percents."""
    return span(values, ".0%").replace("%", " %")
