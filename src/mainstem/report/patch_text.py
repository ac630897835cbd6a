"""A patching sweep in words: what its heat map on the terminal and on its page both say."""

import math

from mainstem.report.text import NOTHING, compact, count, halves_text, plural, scientific, visible
from mainstem.results.patch import PatchReading

SMALLEST = 0.005
"""Effects smaller than this are shown as a dot."""


def column_text(label: str) -> str:
    """A column's label; what follows a position is a token, or two of them."""
    place, space, token = label.partition(" ")
    return f"{place} {visible(token)}" if space and place.isdigit() else label


def short_column(label: str) -> str:
    """A position's number; other labels as they are."""
    place, space, _ = label.partition(" ")
    return place if space and place.isdigit() else label


def percent(effect: float | None) -> str:
    """An effect in whole percent, a dot for nothing, and nothing where there is no such unit."""
    if effect is None:
        return ""
    if abs(effect) < SMALLEST:
        return "·"
    return f"{100 * effect:.0f}".replace("-", "−")


def percent_exactly(effect: float | None) -> str:
    """An effect in percent to the tenth, however small it is."""
    return NOTHING if effect is None else f"{100 * effect:.1f}".replace("-", "−")


def largest(reading: PatchReading) -> float:
    """The largest effect of either sign: where the colours end."""
    sizes = [abs(effect) for row in reading.effects for effect in row if effect is not None and math.isfinite(effect)]
    return max(sizes, default=0.0) or 1.0


def what_is_shown(r: PatchReading) -> str:
    """What the numbers of the map are."""
    if r.direction == "denoising":
        said = "clean values put into the corrupted run; percent recovered: 0 corrupted, 100 clean"
    else:
        said = "corrupted values put into the clean run; percent lost: 0 clean, 100 corrupted"
    return said + ("" if r.pairs == 1 else f"; means over {plural(r.pairs, 'pair')}")


def measured(r: PatchReading) -> str:
    """The metric on the two unpatched runs."""
    return f"{r.metric}: clean {compact(r.clean)}, corrupted {compact(r.corrupted_value)}"


def cells_text(r: PatchReading) -> str:
    """How many cells were run, and how they were checked."""
    skipped = f", {count(r.identical)} where both runs are equal were not" if r.identical else ""
    checked = f"; {count(r.checked)} again by a full forward each: largest difference of a logit {scientific(r.error)}"
    return f"{plural(r.run, 'cell')} run{skipped}{checked if r.checked else ''}"


def stability_text(r: PatchReading) -> str:
    """How far another set of pairs would give the same map."""
    return halves_text(r.stability, "pairs", "cells")


def grid_text(r: PatchReading) -> str:
    """The grid in words."""
    window = f", windows of {r.window}" if r.window > 1 else ""
    what = "" if r.roles is None else " roles"
    return f"{r.grid}{window}: {count(len(r.rows))} × {count(len(r.columns))}{what}"
