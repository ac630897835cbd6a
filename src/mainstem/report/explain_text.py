"""An explanation in words: what both its tables and its page say of the values."""

from collections.abc import Sequence

from mainstem.explanation import Explanation, ValueRow
from mainstem.report.text import NORMS, SCORES, count, visible

ORDER = ("increase", "additive", "direct")
"""The columns of scores."""

READINGS = {
    "attention_subvalue": "is a head reading one source position, coef. its attention weight",
    "ffn_neuron": "is an FFN neuron, coef. its activation",
    "expert_neuron": "is an expert's neuron, coef. its weighted activation",
    "head": "is a head",
    "attention_neuron": "is one entry of a head's value, coef. that entry",
    "sublayer": "is a whole sublayer",
}
"""How to read an address and its coefficient."""


def values_caption(e: Explanation) -> str:
    """What the table of values shows, by which score and under which norm."""
    against = bool(e.values) and _score_of(e.values[0], e.score) < 0
    rival = f" over {', '.join(visible(r.token) for r in e.against)}" if e.against else ""
    units, scored = e.search["units"], e.search["scored"]
    which = f"the {len(e.values)} of {count(units)} units that write most {'against' if against else 'for'}"
    search = f" (exact: {count(scored)} of them scored, the others bounded)" if scored < units else ""
    return (
        f"{which} {visible(e.target.token)}{rival}, by {SCORES.get(e.score, e.score)}{search}; "
        f"{NORMS.get(e.norm, e.norm)}; promoted tokens centred, under the frozen norm"
    )


def _score_of(row: ValueRow, score: str) -> float:
    value = getattr(row, score, row.direct)
    return 0.0 if value is None else value


def legend(values: Sequence[ValueRow]) -> str:
    """How to read the addresses and coefficients that occur: one example of each kind."""
    first = {row.kind: row.unit for row in reversed(values)}
    return "; ".join(f"{first[kind]} {text}" for kind, text in READINGS.items() if kind in first)
