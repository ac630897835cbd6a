"""Curves as SVG: chosen tokens along the states of the stream, and a token's probability as one unit grows.

A curve is drawn in a page, whose style it shares, or alone in a file that holds the style itself (`standalone`). All
numbers come from the result; a drawing only scales them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from mainstem.report.drawing import LEFT, RIGHT, WIDTH, axis, place, svg
from mainstem.report.page import esc
from mainstem.report.text import plain, probability, shortened, signed, visible
from mainstem.results.unit import Sigmoid

DRAWABLE = 1e9
TOP, BELOW = 18.0, 34.0
SQUASHED = 3.0
"""How many times as high as all later states a drawing may become by the first two before these are cut off."""
PLOT = 540.0
"""The width of a sigmoid's plot."""


@dataclass(frozen=True)
class Course:
    """A number after each state, such as a token's log-probability.

    Attributes:
        name: as it is to be shown.
        values: after each state.
        end: what to write at its last point.
    """

    name: str
    values: Sequence[float]
    end: str


@dataclass(frozen=True)
class Panel:
    """A drawing's elements and height, and what is to be said below it (HTML)."""

    parts: list[str]
    height: float
    note: str = ""


def courses(names: Sequence[str], lines: Sequence[Course], label: str, height: float = 250.0) -> str:
    """Lines over the states of the stream; first states far below all others are cut off, and said so."""
    panel = course_panel(names, lines, height)
    return svg(panel.height, label, panel.parts) + panel.note


def course_panel(names: Sequence[str], lines: Sequence[Course], height: float = 250.0) -> Panel:
    """The same as elements."""
    top, bottom = TOP, height - BELOW
    values = [v for line in lines for v in line.values if drawable(v)]
    settled = [v for line in lines for v in list(line.values)[2:] if drawable(v)] or values or [0.0]
    high, low = max([0.0, *values]), min(settled)
    if high - min(values, default=low) <= SQUASHED * (high - low):
        low = min(values, default=low)
    low = min(low, high - 1e-3)

    def y(value: float) -> float:
        return top + (bottom - top) * (high - max(min(value, high), low)) / (high - low)

    parts = []
    for tick, text in ticks(low, high):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 10}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    ends = spread([y(next((v for v in reversed(line.values) if drawable(v)), 0.0)) for line in lines], 17.0)
    for n, line in enumerate(lines):
        css = f"s{min(n, 4)}"
        points = " ".join(f"{place(i, len(names)):.1f},{y(v):.1f}" for i, v in enumerate(line.values) if drawable(v))
        parts.append(f'<polyline class="line {css}" points="{points}"><title>{esc(line.name)}</title></polyline>')
        name = esc(shortened(line.name, 12))
        parts.append(
            f'<text class="{css}" x="{WIDTH - RIGHT + 12}" y="{ends[n] + 4:.1f}"><tspan class="mono">{name}</tspan> '
            f"{esc(line.end)}</text>"
        )
    parts.append(axis(names, bottom + 8))
    least = min(values, default=0.0)
    note = f'<p class="key">The first states lie lower than the drawing: down to {esc(plain(least, 0))}.</p>'
    return Panel(parts, height, note if least < low else "")


# --- the sigmoid of one token -----------------------------------------------------------------------------


def sigmoids(curves: Sequence[Sigmoid], unit: str) -> str:
    """One unit's sigmoids for several tokens, over the axis of its before-softmax value on each."""
    panel = sigmoid_panel(curves)
    return svg(panel.height, f"probability of each token as {unit} grows", panel.parts)


def sigmoid_panel(curves: Sequence[Sigmoid], height: float = 250.0) -> Panel:
    """For each token the curve, where the unit is alone on that token, and where the whole vector takes it."""
    top, bottom = TOP, height - BELOW - 14
    low = min((c.values[0] for c in curves), default=0.0)
    high = max((c.values[-1] for c in curves), default=1.0)
    high = max(high, low + 1e-6)

    def x(value: float) -> float:
        return LEFT + PLOT * (max(min(value, high), low) - low) / (high - low)

    def y(p: float) -> float:
        return bottom - (bottom - top) * p

    parts = _sigmoid_axes(x, y, ticks(low, high), bottom)
    lines = spread([top + 14 + 60 * n for n in range(len(curves))], 60.0)
    for n, curve in enumerate(curves):
        css = f"s{min(n, 4)}"
        points = " ".join(f"{x(v):.1f},{y(p):.1f}" for v, p in zip(curve.values, curve.probabilities, strict=True))
        parts.append(
            f'<polyline class="line {css}" points="{points}"><title>{esc(visible(curve.token))}</title></polyline>'
        )
        at, there = (x(curve.value), y(curve.alone)), (x(curve.value), y(curve.probability))
        parts.append(f'<line class="lead" x1="{at[0]:.1f}" x2="{there[0]:.1f}" y1="{at[1]:.1f}" y2="{there[1]:.1f}"/>')
        parts.append(f'<circle class="ring {css}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4.5"/>')
        parts.append(f'<circle class="dot {css}" cx="{there[0]:.1f}" cy="{there[1]:.1f}" r="5"/>')
        parts += _sigmoid_words(curve, css, lines[n])
    height = max(height, (lines[-1] if lines else 0) + 54)
    return Panel(parts, height)


def _sigmoid_axes(
    x: Callable[[float], float], y: Callable[[float], float], ticks: Sequence[tuple[float, str]], bottom: float
) -> list[str]:
    """Lines of equal probability, and the marks and the name of the axis below."""
    parts = []
    for p in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + PLOT:.0f}" y1="{y(p):.1f}" y2="{y(p):.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 10}" y="{y(p) + 4:.1f}" text-anchor="end">{p:g}</text>')
    for tick, text in ticks:
        parts.append(
            f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{bottom:.1f}" y2="{bottom + 5:.1f}"/>'
        )
        parts.append(f'<text class="small" x="{x(tick):.1f}" y="{bottom + 19:.1f}" text-anchor="middle">{text}</text>')
    what = "the unit’s before-softmax value on the token"
    parts.append(
        f'<text class="small" x="{LEFT + PLOT / 2:.0f}" y="{bottom + 38:.1f}" text-anchor="middle">{what}</text>'
    )
    return parts


def _sigmoid_words(curve: Sigmoid, css: str, y: float) -> list[str]:
    """A curve's name and its numbers, right of the plot."""
    x, name = LEFT + PLOT + 28, esc(shortened(visible(curve.token), 24))
    before, alone, whole = map(probability, (curve.before, curve.alone, curve.probability))
    lines = (f"p {before} without the unit", f"○ {alone} by this token alone; ● {whole} with the whole vector")
    return [
        f'<text class="{css}" x="{x:.0f}" y="{y:.1f}"><tspan class="mono">{name}</tspan> '
        f"{esc(signed(curve.value))}</text>",
        *(
            f'<text class="small" x="{x:.0f}" y="{y + 17 * (n + 1):.1f}">{esc(line)}</text>'
            for n, line in enumerate(lines)
        ),
    ]


# --- files ------------------------------------------------------------------------------------------------


def standalone(title: str, panels: Sequence[tuple[str, Panel]]) -> str:
    """An SVG file with its own style: panels below each other, each under its heading."""
    parts, y = [f'<text class="strong" x="{LEFT}" y="28">{esc(title)}</text>'], 48.0
    for heading, panel in panels:
        parts.append(f'<text class="small" x="{LEFT}" y="{y + 12:.0f}">{esc(heading)}</text>')
        parts.append(f'<g transform="translate(0 {y + 18:.0f})">{"".join(panel.parts)}</g>')
        y += panel.height + 34
    style = files("mainstem.report").joinpath("figure.css").read_text(encoding="utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="{esc(title)}">\n<title>{esc(title)}</title>\n<style>\n{style}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{y:.0f}"/>\n{"".join(parts)}\n</svg>\n'
    )


def drawable(value: float) -> bool:
    """Whether a number has a place in a drawing; NaN, infinities and absurd sizes have none."""
    return abs(value) < DRAWABLE


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """A few round numbers between the ends, each with as many decimals as tell it from the next."""
    raw = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((size * m for m in (1, 2, 5, 10) if size * m >= raw), size)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    digits = max(0, -math.floor(math.log10(step)))
    return [(n * step, plain(n * step, digits)) for n in range(first, last + 1)][:12]


def spread(places: Sequence[float], least: float) -> list[float]:
    """Places moved down where they would stand on each other."""
    out = list(places)
    order = sorted(range(len(out)), key=lambda i: out[i])
    for before, here in zip(order, order[1:], strict=False):
        out[here] = max(out[here], out[before] + least)
    return out
