"""Words and numbers as all reports write them: tokens made visible, numbers to the digits that matter, bars.

A token is data from a model: it may hold line breaks, control characters, or marks that turn the direction of
writing. `visible` shows each of these as what it is, so that no token can spoil a table or pass for another.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from mainstem.results.patch import StabilityRow

SPACE = "␣"
NOTHING = "–"
EMPTY = "\\empty"
# Spaces are the commonest and get a sign; that sign itself, and the backslash of escapes, must not be taken for one.
_ESCAPES = {
    "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", " ": SPACE, SPACE: "\\u2423", "◌": "\\u25cc",
}  # fmt: skip
_COMBINING = ("Mn", "Mc", "Me")
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"

KINDS = {
    "sublayer": "sublayer",
    "head": "head",
    "attention_subvalue": "head × source",
    "attention_neuron": "attention neuron",
    "ffn_neuron": "FFN neuron",
    "expert_neuron": "expert neuron",
}
"""Kinds of unit in words."""

WRITERS = {
    "embedding": "embeddings",
    "attn": "attention",
    "mlp": "MLPs",
    "mixer": "mixers",
    "bias": "added biases",
    "rounding": "rounding",
    "readout": "readout biases",
    "unexplained": "unexplained",
    "total": "total",
}
"""Entries of the account in words."""

SCORES = {
    "direct": "direct attribution (share of the logit)",
    "additive": "the additive score (share of log p + log d_vocab)",
    "increase": "log-probability increase (nats)",
    "log-probability": "log p(w | v), the softmax of the unit alone (nats)",
    "probability-increase": "probability increase",
    "norm": "the norm of what the coefficient multiplies",
    "coefficient": "|coefficient|",
    "reciprocal-rank": "1 / the token's rank in the unit's own logits",
    "coefficient-norm": "|coefficient| x norm, the size of what is written",
    "coefficient-rank": "|coefficient| / the token's rank in the unit's own logits",
    "gradient": "gradient x activation in the real model (nats)",
    "integrated-gradients": "integrated gradients, each layer turned on (nats)",
}
"""Scores in words."""

NORMS = {"frozen": "frozen norm", "recompute": "recomputed norm"}
"""Norm conventions in words."""


def visible(token: str) -> str:
    """A token with its spaces, line breaks and unprintable characters made visible."""
    out = []
    for i, character in enumerate(token):
        category = unicodedata.category(character)
        if character in _ESCAPES:
            out.append(_ESCAPES[character])
        elif category in _UNSEEN:
            code = ord(character)
            out.append(f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")
        elif category in _COMBINING and i == 0:
            out.append("◌" + character)  # a mark alone would sit on whatever stands before it
        else:
            out.append(character)
    return "".join(out) or EMPTY


def visible_or(text: str) -> str:
    """A text of Mainstem's own as it is, with what a token in it may have brought along made visible; spaces stay."""
    return " ".join(visible(word) if word else "" for word in text.split(" "))


def shortened(text: str, length: int) -> str:
    """A text cut to a length, with an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


def probability(p: float | None) -> str:
    """0.773, 0.0012, 3.1e-07; – for none."""
    if p is None or math.isnan(p):
        return NOTHING
    if p >= 0.01:
        return f"{p:.3f}"
    return f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def signed(x: float | None, digits: int = 2) -> str:
    """A number with its sign, a true minus, and so many decimals; – for none."""
    if x is None or math.isnan(x):
        return NOTHING
    if math.isinf(x):
        return "+∞" if x > 0 else "−∞"
    text = f"{x:+.{digits}f}"
    if float(text) == 0:
        text = text[1:]  # +0.00 and -0.00 are the same
    return text.replace("-", "−")


def plain(x: float | None, digits: int = 2) -> str:
    """A number with a true minus where it is negative."""
    return signed(x, digits).removeprefix("+")


def sentence(text: str) -> str:
    """A text with its first letter large and a full stop; the rest stays as it is."""
    return f"{text[:1].upper()}{text[1:]}."


def compact(x: float | None) -> str:
    """A number in at most seven characters, for columns of mixed sizes."""
    if x is None or math.isnan(x):
        return NOTHING
    size = abs(x)
    text = f"{x:.2f}" if 0.01 <= size < 1000 or x == 0 else f"{x:.1e}" if size < 0.01 or size >= 1e5 else f"{x:.0f}"
    return text.replace("-", "−", 1) if x < 0 else text


def scientific(x: float | None) -> str:
    """2.2e-07, for errors and tolerances; 0 stays 0."""
    if x is None or math.isnan(x):
        return NOTHING
    return "0" if x == 0 else f"{x:.1e}"


def count(n: int) -> str:
    """47,491."""
    return f"{n:,}"


def plural(n: int, word: str) -> str:
    """1 unit, 12 units."""
    return f"{count(n)} {word}" if n == 1 else f"{count(n)} {word}s"


def sized(model: Mapping[str, Any]) -> list[str]:
    """A model's size in words; nothing where a result is of no one model."""
    return [plural(model["n_layers"], "layer"), f"d_model {model['d_model']}"] if "n_layers" in model else []


def halves_text(stability: StabilityRow | None, of: str, over: str) -> str:
    """How far others of what is averaged, such as `pairs`, would give the same numbers; nothing if it is not known."""
    if stability is None:
        return ""
    return (
        f"halves of the {of} correlate with {plain(stability.half)} over {over}, all with as many others with "
        f"{plain(stability.whole)} (Spearman-Brown, {plural(stability.splits, 'split')})"
    )


def sizes(shape: Sequence[int]) -> str:
    """[1, 5, 576]."""
    return f"[{', '.join(count(n) for n in shape)}]"


def span(values: Sequence[float]) -> str:
    """The least and the largest of something: 0.42 … 1.58; one number where they are equal."""
    least, largest = compact(values[0]), compact(values[-1])
    return least if least == largest else f"{least} … {largest}"


def gaps(items: Sequence[int], keep: Sequence[int], most: int) -> list[int | None]:
    """Which of many positions to show: all if they are few, else the ends and the neighbours of `keep`; None: a gap."""
    if len(items) <= most:
        return list(items)
    near = {items[0], *items[: most // 3], *items[-most // 3 :]}
    for place in keep:
        near |= set(range(max(place - most // 6, 0), min(place + most // 6 + 1, len(items))))
    out: list[int | None] = []
    for item in items:
        if item in near:
            out.append(item)
        elif out and out[-1] is not None:
            out.append(None)
    return out


def bar(value: float, full: float, width: int) -> str:
    """A bar of eighths of a character, `width` characters for `full`; the sign does not matter."""
    if not full > 0 or not math.isfinite(value):
        return ""
    eighths = round(min(abs(value) / full, 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float], logarithmic: bool = False, width: int = 24) -> str:
    """A curve in one line, from the least value to the largest: equal stretches of it, each at its mean."""
    drawn = [math.log(max(value, 1e-12)) for value in values] if logarithmic else list(values)
    cells = min(width, len(drawn))
    edges = [len(drawn) * i // max(cells, 1) for i in range(cells + 1)]
    means = [sum(drawn[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(_HEIGHTS[round(7 * (mean - low) / span) if span > 0 else 0] for mean in means)


def diverging(value: float, full: float, half: int) -> tuple[str, str]:
    """The left and the right half of a bar around a middle: negative values grow to the left, by half characters."""
    if value >= 0:
        return " " * half, bar(value, full, half).ljust(half)
    halves = 0 if not full > 0 or not math.isfinite(value) else round(min(-value / full, 1.0) * half * 2)
    left = ("▐" if halves % 2 else "") + "█" * (halves // 2)
    return left.rjust(half), " " * half


def finite(value: Any) -> Any:
    """A document with what JSON has no words for (NaN and infinities) as null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
