"""An explanation in words: what both its tables and its page say of the values."""

from collections.abc import Callable, Sequence

from mainstem.report.text import NORMS, SCORES, compact, count, signed, visible
from mainstem.results.explanation import Explanation, ValueRow

ORDER = ("increase", "additive", "direct")
"""The columns of scores."""

SIZES = ("norm", "coefficient", "reciprocal-rank", "coefficient-norm", "coefficient-rank")
"""Scores without a sign, of which a reading says nothing for or against."""


def columns(score: str, wide: bool = True) -> tuple[str, ...]:
    """The columns of scores: the chosen one first, if it is none of those always shown; it takes another's place."""
    return ORDER if score in ORDER else (score, *ORDER) if wide else (score, "increase", "direct")


def number(value: float | None, column: str) -> str:
    """A score as text: nats with two decimals, other sizes with the digits that they need."""
    return signed(value) if column in ORDER else compact(value)


def score_of(row: ValueRow, name: str, chosen: str) -> float | None:
    """A row's value in one of the columns."""
    return row.score if name == chosen and name not in ORDER else getattr(row, name)


READINGS = {
    "attention_subvalue": "is a head reading one source position, coef. its attention weight",
    "ffn_neuron": "is an FFN neuron, coef. its activation",
    "expert_neuron": "is an expert's neuron, coef. its weighted activation",
    "head": "is a head",
    "attention_neuron": "is one entry of a head's value, coef. that entry",
    "sublayer": "is a whole sublayer",
}
"""How to read an address and its coefficient."""


def explained(e: Explanation, shown: Callable[[str], str] = visible) -> str:
    """What the account is of; `shown` writes a token."""
    target = shown(e.target.token)
    if e.target_kind == "direction":
        return f"the stream along {target}"
    what = f"the {'summed logits' if e.target_kind == 'continuation' else 'logit'} of {target}"
    if not e.against:
        return what
    rivals = ", ".join(shown(rival.token) for rival in e.against)
    return f"{what} minus {'that of ' if len(e.against) == 1 else 'the mean of those of '}{rivals}"


def additions(e: Explanation) -> list[float]:
    """What each sublayer after the first adds: to the target's log-probability or, without one, along a direction."""
    added = [row.direct if row.log_probability_increase is None else row.log_probability_increase for row in e.layers]
    return [value for value in added[1:] if value is not None]


def _score_name(e: Explanation) -> str:
    name = SCORES.get(e.score, e.score)
    if e.target_kind == "direction" and e.score == "direct":
        return "inner product with it"
    if e.against and e.score == "increase":
        return "log-odds increase (nats)"
    return f"{name}, summed over {len(e.steps)} tokens" if e.steps else name


def values_caption(e: Explanation) -> str:
    """What the table of values shows, by which score and under which norm."""
    against = bool(e.values) and (score_of(e.values[0], e.score, e.score) or 0.0) < 0 and e.score != "log-probability"
    rival = f" over {', '.join(visible(r.token) for r in e.against)}" if e.against else ""
    units, scored = e.search["units"], e.search["scored"]
    what = "largest for" if e.score in SIZES else f"that write most {'against' if against else 'for'}"
    which = f"the {len(e.values)} of {count(units)} units {what}"
    search = f" (exact: {count(scored)} of them scored, the others bounded)" if scored < units else ""
    return (
        f"{which} {visible(e.target.token)}{rival}, by {_score_name(e)}{search}; "
        f"{NORMS.get(e.norm, e.norm)}; promoted tokens centred, under the frozen norm"
    )


def legend(values: Sequence[ValueRow]) -> str:
    """How to read the addresses and coefficients that occur: one example of each kind."""
    first = {row.kind: row.unit for row in reversed(values)}
    return "; ".join(f"{first[kind]} {text}" for kind, text in READINGS.items() if kind in first)
