"""What a rotation of the basis does to one vector, in two dimensions: a drawing that explains a privileged basis."""

import math

from mainstem.report.drawing import svg
from mainstem.report.page import esc

LENGTH, HEIGHT = 110.0, 300.0
AXES = ("gender", "royalty")
VECTOR = (1.0, 0.0)
"""“man”: all gender and no royalty."""


def rotation_figure() -> str:
    """The vector in the basis of its meanings, and in one turned by 45 degrees."""
    parts = [*_panel(250.0, 0.0, AXES, "along the basis"), *_panel(790.0, 45.0, ("axis 1", "axis 2"), "rotated by 45°")]
    return svg(HEIGHT, "one vector in two bases: coordinates 1 and 0, and 0.71 and 0.71", parts)


def coordinates(degrees: float) -> tuple[float, float]:
    """The vector's coordinates in a basis that is turned to the right by so much."""
    angle = math.radians(degrees)
    x, y = VECTOR
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


def _panel(centre: float, degrees: float, names: tuple[str, str], title: str) -> list[str]:
    """Axes, the vector, and its two coordinates as broken lines."""
    middle, angle = 160.0, math.radians(degrees)
    first = (math.cos(angle), math.sin(angle))  # the drawing's y grows downwards
    second = (math.sin(angle), -math.cos(angle))
    along = coordinates(degrees)
    parts = [f'<text class="strong" x="{centre:.0f}" y="22" text-anchor="middle">{esc(title)}</text>']
    for axis, name, value in zip((first, second), names, along, strict=True):
        ends = [(centre + sign * 1.25 * LENGTH * axis[0], middle + sign * LENGTH * axis[1]) for sign in (-1, 1)]
        (x1, y1), (x2, y2) = ends
        parts.append(f'<line class="lead" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')
        anchor = "start" if axis[0] > 0.1 else "middle"
        shift = 8 if axis[0] > 0.1 else 0
        label = f"{name} {value:.2f}"
        parts.append(
            f'<text x="{x2 + shift:.1f}" y="{y2 + (4 if shift else -8):.1f}" text-anchor="{anchor}">{esc(label)}</text>'
        )
    return [*parts, *_vector(centre, middle, (first, second), along)]


def _vector(centre: float, middle: float, axes: tuple, along: tuple[float, float]) -> list[str]:
    tip = (centre + LENGTH * VECTOR[0], middle - LENGTH * VECTOR[1])
    parts = []
    for axis, value in zip(axes, along, strict=True):
        foot = (centre + LENGTH * value * axis[0], middle + LENGTH * value * axis[1])
        parts.append(f'<line class="lead" x1="{tip[0]:.1f}" x2="{foot[0]:.1f}" y1="{tip[1]:.1f}" y2="{foot[1]:.1f}"/>')
        parts.append(f'<line class="line s1" x1="{centre:.1f}" x2="{foot[0]:.1f}" y1="{middle}" y2="{foot[1]:.1f}"/>')
    parts.append(f'<line class="line" x1="{centre:.1f}" x2="{tip[0]:.1f}" y1="{middle}" y2="{tip[1]:.1f}"/>')
    parts.append(f'<circle class="dot" cx="{tip[0]:.1f}" cy="{tip[1]:.1f}" r="6"/>')
    parts.append(f'<text class="s0" x="{tip[0] - 8:.1f}" y="{tip[1] - 12:.1f}" text-anchor="middle">man</text>')
    return parts
