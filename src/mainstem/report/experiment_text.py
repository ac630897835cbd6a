"""An experiment in words: what its tables for the terminal and its page both say."""

from collections.abc import Iterable
from typing import Any

from mainstem.analysis.intervals import Interval
from mainstem.report.text import NOTHING, compact, count, visible_or

MARKS = {"reproduced": "✓", "in part": "~", "not reproduced": "✗", "measured": "·"}
"""A sign for each finding."""


def cell_text(value: Any) -> str:
    """A cell of a table: an interval as a mean with its ends, numbers to the digits that matter."""
    if isinstance(value, Interval):
        return f"{compact(value.mean)} [{compact(value.low)}, {compact(value.high)}]"
    if isinstance(value, bool) or value is None:
        return NOTHING if value is None else "yes" if value else "no"
    if isinstance(value, int):
        return count(value)
    return compact(value) if isinstance(value, float) else visible_or(str(value))


def is_number(value: Any) -> bool:
    """Whether a cell is set to the right."""
    return isinstance(value, Interval | int | float) and not isinstance(value, bool)


def arms(names: Iterable[str]) -> dict[str, list[str]]:
    """The lines of each arm: `plain-20, seed 0` and `plain-20, seed 1` are of one."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(", seed ")[0], []).append(name)
    return found
