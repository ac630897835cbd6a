"""What a basis report recommends: rules on the numbers of its sections, each of which can come out either way.

A quantiser is called harmless if neither its change of the loss nor its KL to full precision reaches 0.01 nats a token
(1 % in perplexity) anywhere in its bootstrap interval, and harmful if the whole interval of either is beyond that; in
between the tokens do not decide. The loss alone would not do: a model that predicts at random anyway loses nothing by
other predictions. Of two quantisers one is better if the interval of their difference, token by token, leaves out zero;
otherwise nothing is said for either. Everything holds for the texts measured, and says nothing of others.
"""

import math
from collections.abc import Iterable

from mainstem.results.basis_ablations import AblationRow, AblationSection
from mainstem.results.basis_kurtosis import KurtosisSection
from mainstem.results.basis_outliers import OutlierSection
from mainstem.results.basis_quantisers import AS_IT_IS, FULL, CloserRow, QuantiserRow, QuantiserSection, named
from mainstem.results.basis_recommendation import Advice, RecommendationSection
from mainstem.results.basis_rounding import RoundingSection

HARMLESS = 0.01
"""The change of the loss, and the KL to full precision, nats a token, below which a quantiser is harmless."""

FAR = 2.0
"""How many times the largest kurtosis after a rotation is far from it: states share their large directions, so that
counting those that are above it at all would make a verdict of one chance."""

PLAIN, MIXED = "vector-wise", "llm.int8"
FOUR_BITS = ("w4", "w4a4")
NARROW = ("bfloat16", "float16")


def recommend(
    kurtosis: KurtosisSection | None = None,
    outliers: OutlierSection | None = None,
    ablations: AblationSection | None = None,
    quantisers: QuantiserSection | None = None,
    rounding: RoundingSection | None = None,
) -> RecommendationSection:
    """The recommendations that the sections at hand allow."""
    made: list[Advice] = []
    if kurtosis is not None:
        made.append(on_basis(kurtosis))
    if outliers is not None:
        made.append(on_outliers(outliers, ablations))
    if quantisers is not None:
        made += [on_int8(quantisers), *on_rotation(quantisers), *on_four_bits(quantisers)]
    if rounding is not None:
        made.append(on_dtype(rounding))
    return RecommendationSection(made)


def on_basis(section: KurtosisSection) -> Advice:
    """Whether the basis is special, so that what follows is worth a look."""
    states = [row for row in section.points if row.kind == "stream"]
    above = [row for row in states if row.without_first > FAR * row.rotated_largest]
    top = max(states, key=lambda row: row.without_first)
    reason = (
        f"Kurtosis over coordinates is {FAR:g} times that of every random rotation or more at {len(above)} of "
        f"{len(states)} states of the stream; the largest is {top.without_first:.1f} after {top.name}, "
        f"{top.rotated:.2f} rotated."
    )
    if len(above) > len(states) / 2:
        return Advice("basis", "The basis is privileged: expect trouble with formats of few bits.", [reason])
    return Advice("basis", "The basis is hardly privileged: it is no obstacle to formats of few bits.", [reason])


def on_outliers(section: OutlierSection, ablations: AblationSection | None) -> Advice:
    """Which dimensions to leave alone."""
    table = section.table("input")
    found = [str(row.dimension) for row in table.rows if row.qualifies]
    if not found:
        return Advice(
            "outliers",
            "No dimension is an outlier feature by the published criterion.",
            [f"The largest share of positions of any is {table.rows[0].positions:.1%}." if table.rows else
             "No dimension reaches the magnitude at all."],
        )  # fmt: skip
    reasons = [
        f"Dimension {row.dimension} is large in {row.layers:.0%} of the layers and at {row.positions:.1%} of all "
        "positions."
        for row in table.rows
        if row.qualifies
    ]
    what, it = ("dimensions", "them") if len(found) > 1 else ("dimension", "it")
    zero, mean = _taken_out(ablations)
    prune = f", and do not prune {it}" if zero is not None and zero.low > HARMLESS else ""
    return Advice(
        "outliers", f"Keep {what} {', '.join(found)} out of coarse scales{prune}.", reasons + _ablated(zero, mean)
    )


def _taken_out(section: AblationSection | None) -> tuple[AblationRow | None, AblationRow | None]:
    """The dimensions zeroed at attention's inputs, and at their means, on as many tokens as there are."""
    rows = [row for row in section.runs if row.where == "attention"] if section is not None else []
    longest = max((row.tokens for row in rows), default=0)
    runs = {row.what: row for row in rows if row.tokens == longest}
    return runs.get("zero"), runs.get("mean_by_place")


def _ablated(zero: AblationRow | None, mean: AblationRow | None) -> list[str]:
    if zero is None or mean is None:
        return []
    return [
        f"Without them at attention's inputs the perplexity is {zero.ratio:.3g} times as large ({_change(zero)} nats a "
        f"token); with constants in their place {mean.ratio:.3g} times."
    ]


def on_int8(section: QuantiserSection) -> Advice:
    """The simplest of the int8 quantisers, in the model's own basis, that does no harm."""
    plain, mixed = (_row(section, AS_IT_IS, name) for name in (PLAIN, MIXED))
    reasons = [_reason(row) for row in (plain, mixed) if row is not None]
    for row, text in (
        (plain, "Quantise to int8 with a scale for each row and column (vector-wise): nothing more is needed."),
        (mixed, "Quantise to int8 with outliers in floating point (LLM.int8()): that alone is shown to be harmless."),
    ):
        if row is not None and _is_harmless(row):
            return Advice("int8", text, reasons)
    pair = _pair(section, MIXED, PLAIN)
    if pair is not None and pair.closer == MIXED:
        return Advice(
            "int8", "Prefer LLM.int8() to plain scales; neither is shown to be harmless.", [*reasons, _apart(pair)]
        )
    if all(row is not None and _is_harmful(row) for row in (plain, mixed)):
        return Advice("int8", f"{PLAIN} and {MIXED} both do harm in this basis.", reasons)
    return Advice("int8", "These tokens do not show whether int8 is harmless in this basis: measure on more.", reasons)


def on_rotation(section: QuantiserSection) -> Iterable[Advice]:
    """Whether a rotation before int8 helps."""
    basis = next((row.basis for row in section.rows if row.basis != AS_IT_IS), None)
    pair = None if basis is None else _pair(section, named(PLAIN, basis), PLAIN)
    if basis is None or pair is None:
        return
    turned = _row(section, basis, PLAIN)
    reasons = [_apart(pair), *([_reason(turned)] if turned is not None else [])]
    if pair.closer == pair.first:
        text = "Rotate the stream before quantising (`mainstem basis rotate`): plain int8 comes closer."
    elif pair.closer == pair.second:
        text = "Do not rotate the stream before quantising: plain int8 is farther off then."
    else:
        text = "A rotation before quantising makes no difference that these tokens show."
    yield Advice("rotation", text, reasons)


def on_four_bits(section: QuantiserSection) -> Iterable[Advice]:
    """Whether 4 bits will do, for weights alone and for both."""
    rows = [row for row in section.rows if row.quantiser in FOUR_BITS and row.text == section.rows[0].text]
    if not rows:
        return
    harmless = [named(row.quantiser, row.basis) for row in rows if _is_harmless(row)]
    if harmless:
        text = f"4 bits do no harm: {'; '.join(harmless)}."
    elif all(map(_is_harmful, rows)):
        text = "4 bits by rounding to nearest do harm: take 8."
    else:
        text = "These tokens do not show 4 bits to be harmless: take 8, or measure on more."
    yield Advice("4 bits", text, [_reason(row) for row in rows])


def on_dtype(section: RoundingSection) -> Advice:
    """Which narrow float dtype holds the stream."""
    rows = {row.dtype: row for row in section.dtypes if row.dtype in NARROW}
    over = [row for row in rows.values() if row.overflow]
    lost = "; ".join(f"{row.dtype} {100 * row.lost:.2g} %" for row in rows.values() if row.lost is not None)
    reasons = [f"Rounding takes of each write, on average: {lost}."] if lost else []
    reasons += [f"{row.dtype} overflows at {row.overflow}." for row in over]
    if over:
        return Advice("dtype", f"Do not keep the stream in {', '.join(row.dtype for row in over)}.", reasons)
    return Advice("dtype", f"The stream fits {' and '.join(rows)}: nothing overflows.", reasons)


def _row(section: QuantiserSection, basis: str, quantiser: str) -> QuantiserRow | None:
    """The run on the first text."""
    return next((row for row in section.rows if (row.basis, row.quantiser) == (basis, quantiser)), None)


def _pair(section: QuantiserSection, first: str, second: str) -> CloserRow | None:
    return next((pair for pair in section.closer if (pair.first, pair.second) == (first, second)), None)


def _is_harmless(row: QuantiserRow) -> bool:
    """Undefined ends, as of a single token, are below nothing."""
    return row.high < HARMLESS and row.kl_high < HARMLESS


def _is_harmful(row: QuantiserRow) -> bool:
    return row.low >= HARMLESS or row.kl_low >= HARMLESS


def _reason(row: QuantiserRow) -> str:
    assert row.quantiser != FULL
    return (
        f"{named(row.quantiser, row.basis)}: the loss on {row.text} changes by {_change(row)}, its KL to full "
        f"precision is {_with_ends(row.kl, row.kl_low, row.kl_high)} nats a token; "
        f"{row.flips:.1%} of the likeliest tokens are others."
    )


def _apart(pair: CloserRow) -> str:
    return (
        f"KL to full precision on {pair.text}, {pair.first} less {pair.second}: "
        f"{_with_ends(pair.difference, pair.low, pair.high, '+')} nats a token."
    )


def _change(row: QuantiserRow | AblationRow) -> str:
    return _with_ends(row.change, row.low, row.high, "+")


def _with_ends(mean: float, low: float, high: float, sign: str = "") -> str:
    """A mean with its interval, or without where one has none."""
    texts = [f"{x:{sign}.4f}".replace("-", "−") for x in (mean, low, high)]
    return texts[0] if math.isnan(low) or math.isnan(high) else f"{texts[0]} [{texts[1]}, {texts[2]}]"
