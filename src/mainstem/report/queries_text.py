"""Queries in words: what both their tables and their section of a page say."""

from typing import Any

from mainstem.report.text import plain, scientific, signed

CAPTION = (
    "the earlier units that activate each value: their shares in what its key reads, largest first; the norm's scale "
    "frozen; shares cancel, and the sums of both signs are given"
)

QUANTITIES = {
    "activation": "activation",
    "pre-activation": "pre-activation",
    "direct effect": "direct effect of its value on the target's logit",
    "pattern x value": "pattern × value",
    "score": "score",
    "score before scale": "score before its scale",
}
"""What shares add up to, in words."""


def account(sums: dict[str, Any]) -> str:
    """How the shares of one value unit add up."""
    what = QUANTITIES.get(sums["quantity"], sums["quantity"])
    constant = f", biases {signed(sums['constant'])}" if sums["constant"] else ""
    return (
        f"{what} {plain(sums['observed'], 2)} = {signed(sums['positives'])} and {signed(sums['negatives'])}{constant}; "
        f"read at position {sums['reads']}; error {scientific(sums['relative_error'])}, "
        f"tolerance {scientific(sums['tolerance'])}"
    )
