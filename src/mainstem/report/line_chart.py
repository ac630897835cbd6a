"""Lines over a common axis as SVG: what `Curves` of an experiment holds, such as losses of several arms over steps.

Lines of one arm share colour and label, so that what its seeds have in common is seen at once. A sixth arm and those
after it are dotted in the colours of the first five.
"""

import math
from collections.abc import Sequence

from mainstem.experiments.outcome import Curves
from mainstem.report.curves import drawable, spread, ticks
from mainstem.report.drawing import WIDTH, svg
from mainstem.report.experiment_text import arms
from mainstem.report.page import esc
from mainstem.report.text import compact, shortened, visible, visible_or

LEFT, RIGHT, TOP, BOTTOM = 72, 280, 30.0, 300.0
HEIGHT = 348.0
COLOURS = 5
LEAST = 1e-12
"""Numbers and, relatively, ranges below this are taken for none."""
MOST_POINTS = 500
"""Of a line; of more, equally many are left out between those that are drawn."""

Point = tuple[float, float]


class Scale:
    """A range of numbers on a stretch of the drawing."""

    def __init__(self, values: Sequence[float], start: float, end: float, logarithmic: bool = False) -> None:
        self.start, self.end, self.logarithmic = start, end, logarithmic
        low, high = self._number(min(values)), self._number(max(values))
        size = max(abs(low), abs(high))
        margin = 0.0 if high - low > LEAST * max(size, LEAST) else size if size > LEAST else 1.0
        self.low, self.high = low - margin / 2, high + margin / 2

    def __call__(self, value: float) -> float:
        """Where a number stands."""
        return self.start + (self.end - self.start) * (self._number(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers, and how they are written."""
        if not self.logarithmic:
            return ticks(self.low, self.high)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        factors = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        return [(tick, f"{tick:g}") for tick in found if self.low <= math.log10(tick) <= self.high]

    def _number(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def line_chart(curves: Curves) -> str:
    """The drawing; nothing if no line has a point that can be drawn."""
    lines = {name: _thinned(_points(points, curves.logarithmic)) for name, points in curves.lines.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return ""
    every = [point for points in lines.values() for point in points]
    x = Scale([point[0] for point in every], LEFT, WIDTH - RIGHT)
    y = Scale([point[1] for point in every], BOTTOM, TOP, curves.logarithmic)
    parts = _axes(x, y, curves)
    ends = {}
    for n, (arm, names) in enumerate(arms(lines).items()):
        css = f"s{n % COLOURS}"
        ends[arm] = (css, [lines[name][-1][1] for name in names])
        for name in names:
            points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in lines[name])
            dotted = " dashed" if n >= COLOURS else ""
            title = f"<title>{esc(visible(name))}</title>"
            parts.append(f'<polyline class="line {css}{dotted}" points="{points}">{title}</polyline>')
    return svg(HEIGHT, curves.title, parts + _labels(ends, y))


def _points(points: Sequence[Point], logarithmic: bool) -> list[Point]:
    return [(a, b) for a, b in points if drawable(a) and drawable(b) and (b > LEAST or not logarithmic)]


def _thinned(points: list[Point]) -> list[Point]:
    """At most so many points, the last among them."""
    step = math.ceil(len(points) / MOST_POINTS) or 1
    return points[::-1][::step][::-1]


def _axes(x: Scale, y: Scale, curves: Curves) -> list[str]:
    parts = [f'<text class="small" x="{LEFT - 10}" y="{TOP - 16:.0f}">{esc(curves.y_label)}</text>']
    for tick, text in y.ticks():
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 10}" y="{y(tick) + 4:.1f}" text-anchor="end">{esc(text)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{BOTTOM:.0f}" y2="{BOTTOM:.0f}"/>')
    for tick, text in x.ticks():
        parts.append(
            f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{BOTTOM:.0f}" y2="{BOTTOM + 5:.0f}"/>'
        )
        parts.append(
            f'<text class="small" x="{x(tick):.1f}" y="{BOTTOM + 20:.0f}" text-anchor="middle">{esc(text)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="small" x="{middle:.0f}" y="{BOTTOM + 40:.0f}" text-anchor="middle">{esc(curves.x_label)}</text>'
    )
    return parts


def _labels(ends: dict[str, tuple[str, list[float]]], y: Scale) -> list[str]:
    """Each arm's name and its last value, a mean over its seeds, right of its lines."""
    parts = []
    means = [sum(values) / len(values) for _, values in ends.values()]
    for (arm, (css, _)), mean, place in zip(
        ends.items(), means, spread([y(mean) for mean in means], 17.0), strict=True
    ):
        words = f"{esc(shortened(visible_or(arm), 34))} {esc(compact(mean))}"
        parts.append(f'<text class="{css}" x="{WIDTH - RIGHT + 12}" y="{place + 4:.1f}">{words}</text>')
    return parts
