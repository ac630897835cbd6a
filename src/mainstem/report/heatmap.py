"""A heat map as SVG: rows and columns with their names, a colour around zero, the number where there is room."""

import math
from collections.abc import Callable, Sequence

from mainstem.report.page import esc
from mainstem.report.text import shortened

WIDTH = 1120
CHARACTER = 7.4
TALLEST, WIDEST = 26.0, 58.0
NUMBERS_FROM = 30.0
"""How wide a cell has to be for its number."""

Effects = Sequence[Sequence[float | None]]


def heatmap(
    rows: Sequence[str],
    columns: Sequence[str],
    effects: Effects,
    full: float,
    text: Callable[[float | None], str],
    title: Callable[[int, int], str],
    label: str,
    full_width: int = WIDTH,
    least: str | None = None,
) -> str:
    """A figure.

    Args:
        rows: their names.
        columns: their names.
        effects: a number for each cell; None where there is nothing.
        full: the size whose colour is the strongest.
        text: a cell's number as it is written into it.
        title: what is said when a cell is pointed at.
        label: what the drawing is, for those who do not see it.
        full_width: of the drawing.
        least: what nothing is, where no effect is negative; None where there are both signs.
    """
    names = CHARACTER * max(len(row) for row in rows) + 14
    width = min((full_width - names - 60) / max(len(columns), 1), WIDEST)
    height = min(TALLEST, max(width, 14.0))
    heads = [shortened(column, 18) for column in columns]
    slanted = any(CHARACTER * len(head) > width - 4 for head in heads)
    top = 0.72 * CHARACTER * max(len(head) for head in heads) + 22 if slanted else 24.0
    parts = [_head(head, names + width * (j + 0.5), top - 8, slanted) for j, head in enumerate(heads)]
    for i, row in enumerate(rows):
        y = top + height * i
        parts.append(
            f'<text class="small mono" x="{names - 8:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="end">'
            f"{esc(row)}</text>"
        )
        for j, effect in enumerate(effects[i]):
            if effect is not None:
                number = text(effect) if width >= NUMBERS_FROM else ""
                parts.append(_cell(effect, full, names + width * j, y, width, height, number, title(i, j)))
    bottom = top + height * len(rows)
    parts.append(_scale(full, text, names, bottom + 22, least))
    return (
        f'<figure><svg class="heat" viewBox="0 0 {full_width} {bottom + 62:.0f}" role="img" aria-label="{esc(label)}">'
        f"<title>{esc(label)}</title>{''.join(parts)}</svg></figure>"
    )


def _head(head: str, x: float, y: float, slanted: bool) -> str:
    turn = f' transform="rotate(-45 {x:.1f} {y:.1f})"' if slanted else ""
    anchor = "start" if slanted else "middle"
    return f'<text class="small mono" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{esc(head)}</text>'


def _cell(effect: float, full: float, x: float, y: float, width: float, height: float, number: str, title: str) -> str:
    """A rectangle as strong as the effect, with its number and its title."""
    share = min(abs(effect) / full, 1.0) if math.isfinite(effect) else 0.0
    css = "band-for" if effect > 0 else "band-against"
    inside = ""
    if number:
        strong = " on" if share > 0.7 else ""
        inside = (
            f'<text class="cell{strong}" x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle">'
            f"{esc(number)}</text>"
        )
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return (
        f'<g><title>{esc(title)}</title><rect class="ground" {size}/>'
        f'<rect class="{css}" {size} fill-opacity="{share:.3f}"/>{inside}</g>'
    )


def _scale(full: float, text: Callable[[float | None], str], x: float, y: float, least: str | None) -> str:
    """The colours from the largest against to the largest for, with their numbers."""
    steps, width = 20, 12.0
    parts = []
    first = -steps if least is None else 0
    for i in range(first, steps + 1):
        css = "band-for" if i > 0 else "band-against"
        place = x + width * (i - first)
        parts.append(
            f'<rect class="{css}" x="{place:.1f}" y="{y:.1f}" width="{width:.1f}" height="10" '
            f'fill-opacity="{abs(i) / steps:.3f}"/>'
        )
    ends = [(-steps, text(-full)), (0, "0")] if least is None else [(0, least)]
    for i, word in [*ends, (steps, text(full))]:
        parts.append(
            f'<text class="small" x="{x + width * (i - first + 0.5):.1f}" y="{y + 26:.1f}" text-anchor="middle">'
            f"{esc(word)}</text>"
        )
    return "".join(parts)
