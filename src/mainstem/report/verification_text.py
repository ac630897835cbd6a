"""A causal verdict in words: what its tables for the terminal and its page both say."""

from typing import TYPE_CHECKING

from mainstem.report.text import plural

if TYPE_CHECKING:
    from mainstem.causal.outcomes import AblationRow, Verification

VERDICTS = {
    "not causal": "not causal: taking the top units out does no more than taking out others does",
    "causal": "causal, not specific: it does more than any random units do, but not more than other tokens' units do",
    "causal and specific": "causal and specific: it does more than random units and than the units of other tokens",
}
"""The verdicts in words."""

METHODS = {"zero": "p, zero", "mean": "p, mean", "resample": "p, resampled"}
"""The target's probability by what is put in a unit's place: zero, its mean or its values on a reference text."""


def caption(v: "Verification", score: str) -> str:
    """What was taken out, and where."""
    where = "at all positions" if v.everywhere else "at the destination"
    return f"the top units by {score}, {plural(len(v.ablated['units']), 'neuron')}, taken out of the run {where}"


def by_name(v: "Verification") -> dict[str, dict[str, "AblationRow"]]:
    """The rows by what was taken out and how."""
    out: dict[str, dict[str, AblationRow]] = {}
    for row in v.rows:
        out.setdefault(row.name, {})[row.method] = row
    return out
