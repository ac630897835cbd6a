"""Charts of experiments as SVG: bars with their intervals."""

from collections.abc import Sequence

from mainstem.report.drawing import CHARACTER, WIDTH
from mainstem.report.page import esc
from mainstem.report.text import compact, shortened

NUMBERS = 190
ROW = 26.0
LONGEST = 60
"""Characters of a name that are shown."""


def interval_bars(rows: Sequence[tuple[str, float, float, float]], label: str) -> str:
    """A bar for each (name, mean, low, high) from zero to the mean, and a line from low to high."""
    drawable = [row for row in rows if all(abs(value) < 1e9 for value in row[1:])]
    if not drawable:
        return ""
    most, least = max(0.0, *(row[3] for row in drawable)), min(0.0, *(row[2] for row in drawable))
    span = (most - least) or 1.0
    names = [shortened(row[0], LONGEST) for row in drawable]
    start = 24 + CHARACTER * max(map(len, names))

    def x(value: float) -> float:
        return start + (WIDTH - start - NUMBERS) * (value - least) / span

    height = ROW * len(drawable) + 12
    parts = [f'<line class="axis" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="0" y2="{height:.0f}"/>']
    for i, (name, (_, mean, low, high)) in enumerate(zip(names, drawable, strict=True)):
        y = ROW * i + 6
        left, right = sorted((x(0), x(mean)))
        middle = y + ROW / 2 - 3
        parts += [
            f'<text x="{start - 12:.1f}" y="{middle + 4:.1f}" text-anchor="end">{esc(name)}</text>',
            f'<rect class="bar-for" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="{ROW - 8:.1f}"/>',
            f'<line class="whisker" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>',
            f'<text class="small" x="{x(max(0.0, mean, high)) + 10:.1f}" y="{middle + 4:.1f}">{esc(compact(mean))} '
            f"[{esc(compact(low))}, {esc(compact(high))}]</text>",
        ]
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{esc(label)}">'
        f"<title>{esc(label)}</title>{''.join(parts)}</svg></figure>"
    )
