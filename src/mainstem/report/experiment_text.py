"""An experiment in words: what its tables for the terminal and its page both say."""

from collections.abc import Iterable
from typing import Any

from mainstem.analysis.intervals import Interval
from mainstem.experiments.everything import Part
from mainstem.report.text import NOTHING, compact, count, plural, visible_or

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


def duration(seconds: float | None) -> str:
    """A time to the digits that matter: 40 s, 3 min, 1.5 h."""
    if seconds is None:
        return NOTHING
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def about_part(part: Part) -> str:
    """How long a part took, and whether an earlier run did it."""
    return f"{duration(part.seconds)}, kept from {part.kept[:10]}" if part.kept else duration(part.seconds)


def findings(parts: Iterable[Part]) -> str:
    """How many claims have which finding, and how many experiments failed."""
    made = list(parts)
    claims = [claim for part in made if part.experiment for claim in part.experiment.claims]
    counts = [(sum(claim.finding == finding for claim in claims), finding) for finding in MARKS]
    failed = sum(part.failure is not None for part in made)
    words = [f"{count(n)} {finding}" for n, finding in counts if n]
    if failed:
        words.append(f"{plural(failed, 'experiment')} failed")
    return f"{plural(len(claims), 'claim')} of {plural(len(made), 'experiment')}: {', '.join(words) or 'nothing found'}"
