"""The stream as SVG: the main stem with its tributaries, over the axis of states that courses share (see `curves`).

The main stem runs from the embedding to the logits. Its width at any place is the sum, so far, of the target's logit;
each sublayer joins it as a tributary as wide as its contribution: from above what speaks for the target, from below
what speaks against. All numbers come from the result; a drawing only scales them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.report.page import esc
from mainstem.report.text import plain, shortened, signed, visible

WIDTH = 1120
LEFT, RIGHT = 64, 206
LARGEST = 86.0  # the widest band, in the drawing's units
REACH = 34.0  # how far before its mouth a tributary begins
LABELS = 8
LEVEL = 19.0
CHARACTER = 7.2


@dataclass(frozen=True)
class Tributary:
    """A writer and its contribution."""

    name: str
    value: float


def place(index: int, length: int) -> float:
    """Where state number `index` of `length` stands on the horizontal axis."""
    return LEFT + (WIDTH - LEFT - RIGHT) * index / max(length - 1, 1)


def axis(names: Sequence[str], y: float) -> str:
    """Ticks under the drawing where a block or an embedding begins, with as many names as there is room for."""
    starts = [i for i, name in enumerate(names) if i == 0 or _block(name) != _block(names[i - 1])]
    least = len(starts) * 46 / (WIDTH - LEFT - RIGHT)
    step = next((n for n in (1, 2, 5, 10, 20, 50, 100) if n >= least), 1000)
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>']
    blocks = [i for i in starts if _block(names[i]) != names[i]]
    shown = {*blocks[::step], *[i for i in starts if i not in blocks][:1]}
    for i in starts:
        x, long = place(i, len(names)), 6 if i in shown else 3
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + long:.1f}"/>')
        if i in shown:
            name, anchor, shift = esc(_block(names[i])), *(("middle", 0) if i in blocks else ("end", -4))
            parts.append(
                f'<text class="small" x="{x + shift:.1f}" y="{y + 19:.1f}" text-anchor="{anchor}">{name}</text>'
            )
    return "".join(parts)


def _block(name: str) -> str:
    """L5 of L5.attn; the name itself outside blocks."""
    head, dot, _ = name.partition(".")
    return head if dot and head[1:].isdigit() else name


# --- the stem and its tributaries -------------------------------------------------------------------------


def stream(tributaries: Sequence[Tributary], target: str, total: float, what: str = "logit") -> str:
    """The main stem from the embedding to the target's logit, or to whatever number `what` is."""
    sums: list[float] = []
    for one in tributaries:
        sums.append((sums[-1] if sums else 0.0) + one.value)
    largest = max([abs(s) for s in sums] + [abs(one.value) for one in tributaries], default=0.0)
    scale = LARGEST / largest if largest > 1e-9 else 0.0
    labelled = _labelled(tributaries)
    levels = _levels(labelled, tributaries, up=True), _levels(labelled, tributaries, up=False)
    half = max((_half(value, scale) for value in sums), default=0.0)
    middle = 26 + LEVEL * (1 + max(levels[0].values(), default=0)) + REACH + half
    height = middle + half + REACH + LEVEL * (1 + max(levels[1].values(), default=-1)) + 58
    bands, words = [], []
    for i, one in enumerate(tributaries):
        x = place(i, len(tributaries))
        level = {**levels[0], **levels[1]}.get(i)
        bands.append(_tributary(one, x, middle, half, _half(sums[i], scale), scale, level is not None))
        if level is not None:
            words.append(_words(one, x, middle, half, level, left=_extent(i, tributaries)[0] < x - REACH))
    stem = _stem(sums, scale, middle)
    parts = [*bands, stem, *words, _mouth(target, f"{what} {plain(total)}", sums, scale, middle)]
    text = f"The stream from the embedding to {visible(target)}, {what} {plain(total)}"
    return svg(height, text, [*parts, axis([one.name for one in tributaries], height - 30)])


def _labelled(tributaries: Sequence[Tributary]) -> list[int]:
    """The largest contributions, in the order of the stream."""
    order = sorted(range(len(tributaries)), key=lambda i: -abs(tributaries[i].value))
    return sorted(i for i in order[:LABELS] if tributaries[i].value)


def _levels(labelled: Sequence[int], tributaries: Sequence[Tributary], up: bool) -> dict[int, int]:
    """For each label on one side its row: above every row that it would cover and whose line it would cross."""
    out: dict[int, int] = {}
    for i in labelled:
        if (tributaries[i].value >= 0) == up:
            left, _ = _extent(i, tributaries)
            lower = [level + 1 for j, level in out.items() if _extent(j, tributaries)[1] > left - 8]
            out[i] = max(lower, default=0)
    return out


def _extent(i: int, tributaries: Sequence[Tributary]) -> tuple[float, float]:
    """From where to where a label reaches: left of its line, or right of it where there is no room."""
    line, length = place(i, len(tributaries)) - REACH, CHARACTER * len(_label(tributaries[i])) + 6
    return (line - length, line) if line > length else (line, line + length)


def _label(one: Tributary) -> str:
    return f"{one.name} {signed(one.value)}"


def _half(value: float, scale: float) -> float:
    """Half of the stem's width for a sum."""
    return max(abs(value) * scale, 2.0) / 2


def _tributary(one: Tributary, x: float, middle: float, half: float, after: float, scale: float, strong: bool) -> str:
    """A band that leaves the vertical and joins the stem at x; at its mouth no wider than the stem is there."""
    up = 1 if one.value >= 0 else -1
    width = max(abs(one.value) * scale, 0.8)
    begin, start = x - REACH, middle - up * (half + REACH)
    outer = middle - up * after
    inner = outer + up * min(width, 2 * after)
    bend = (start + outer) / 2
    path = (
        f"M{begin - width / 2:.1f} {start:.1f} C{begin - width / 2:.1f} {bend:.1f} {x - REACH * 0.62:.1f} {inner:.1f} "
        f"{x + 3:.1f} {inner:.1f} L{x + 3:.1f} {outer:.1f} C{x - REACH * 0.5:.1f} {outer:.1f} "
        f"{begin + width / 2:.1f} {bend:.1f} {begin + width / 2:.1f} {start:.1f} Z"
    )
    css = "band-for" if up > 0 else "band-against"
    weak = "" if strong else ' opacity="0.55"'
    return f'<path class="{css}" d="{path}"{weak}><title>{esc(_label(one))}</title></path>'


def _words(one: Tributary, x: float, middle: float, half: float, level: int, left: bool) -> str:
    """A tributary's name and number, with a line to where it begins."""
    anchor, gap = ("end", -5) if left else ("start", 5)
    up = 1 if one.value >= 0 else -1
    start = middle - up * (half + REACH)
    end = start - up * (5 + LEVEL * level)
    y = end - 4 if up > 0 else end + 14
    return (
        f'<line class="lead" x1="{x - REACH:.1f}" x2="{x - REACH:.1f}" y1="{start:.1f}" y2="{end - up * 12:.1f}"/>'
        f'<text x="{x - REACH + gap:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f'<tspan class="mono">{esc(one.name)}</tspan> {esc(signed(one.value))}</text>'
    )


def _stem(sums: Sequence[float], scale: float, middle: float) -> str:
    """The stem as filled bands, one for each run of sums with the same sign; a run that is used up ends in a point."""
    length = len(sums)
    runs: list[list[int]] = []
    for i, value in enumerate(sums):
        if runs and (sums[runs[-1][-1]] >= 0) == (value >= 0):
            runs[-1].append(i)
        else:
            runs.append([i])
    parts = []
    for run in runs:
        first = place(run[0], length)
        edges = [(first - (22 if run[0] == 0 else 8), 1.0)]
        ends = [(place(i, length) + 3, _half(sums[i], scale)) for i in run]
        ends.append(
            (place(run[-1] + 1, length) + 3, 0.0) if run[-1] + 1 < length else (WIDTH - RIGHT + 40, ends[-1][1])
        )
        for x, half in ends:
            if x - edges[-1][0] > REACH:  # the width changes where a tributary joins, not half the way before
                edges.append((x - REACH * 0.8, edges[-1][1]))
            edges.append((x, half))
        css = "stem-for" if sums[run[0]] >= 0 else "stem-against"
        parts.append(f'<path class="{css}" d="{_outline(edges, middle)}"/>')
    return "".join(parts)


def _outline(edges: Sequence[tuple[float, float]], middle: float) -> str:
    """Upper edge forward, lower edge back, each step smoothed over the way to the next."""
    upper, lower = [f"M{edges[0][0]:.1f} {middle - edges[0][1]:.1f}"], []
    for (x0, h0), (x1, h1) in zip(edges, edges[1:], strict=False):
        m = (x0 + x1) / 2
        upper.append(f"C{m:.1f} {middle - h0:.1f} {m:.1f} {middle - h1:.1f} {x1:.1f} {middle - h1:.1f}")
        lower.append(f"C{m:.1f} {middle + h1:.1f} {m:.1f} {middle + h0:.1f} {x0:.1f} {middle + h0:.1f}")
    last = edges[-1]
    return " ".join([*upper, f"L{last[0]:.1f} {middle + last[1]:.1f}", *reversed(lower), "Z"])


def _mouth(target: str, number: str, sums: Sequence[float], scale: float, middle: float) -> str:
    """The stem's end: an arrow head, the target and the number that it reaches."""
    x, half = WIDTH - RIGHT + 40, _half(sums[-1] if sums else 0.0, scale)
    css = "stem-for" if not sums or sums[-1] >= 0 else "stem-against"
    tip = x + min(14.0, half + 4)
    head = (
        f'<path class="{css}" d="M{x - 0.5:.1f} {middle - half:.1f} L{tip:.1f} {middle:.1f} '
        f'L{x - 0.5:.1f} {middle + half:.1f} Z"/>'
    )
    name = esc(shortened(visible(target), 14))
    return (
        f'{head}<text class="strong mono" x="{x + 24}" y="{middle - 3:.1f}">{name}</text>'
        f'<text class="small" x="{x + 24}" y="{middle + 15:.1f}">{esc(number)}</text>'
    )


def svg(height: float, label: str, parts: Sequence[str]) -> str:
    """A figure of a page."""
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{esc(label)}">'
        f"<title>{esc(label)}</title>{''.join(parts)}</svg></figure>"
    )
