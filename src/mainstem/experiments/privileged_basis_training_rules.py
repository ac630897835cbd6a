"""The rules of the training experiment on the privileged basis: where arms are compared, and what is heavy and near.

What the words mean stands in `privileged_basis_training`; here is their arithmetic, on what each model recorded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

TARGET = 3.9
"""The held-out loss, in nats a token, at which arms are compared."""

HEAVY, NEAR = 1.0, 0.6
"""Excess kurtosis that is heavy-tailed; and how far from none one fixed rotation may be."""

SAME = 0.1
"""Nats a token: a loss is no more above another than that if they are the same."""

PLACES = {
    "stream": ("L0.mlp", "L1.attn", "L1.mlp", "L2.attn", "L2.mlp"),
    "computation": ("L1.mlp reads", "L2.mlp reads"),
}
"""The points that each number is a mean over."""


@dataclass(frozen=True)
class Excess:
    """Kurtosis above the mean of rotations, and the largest of these above it, over some points."""

    value: float
    largest: float

    @property
    def heavy(self) -> bool:
        """Whether it is, by the rule."""
        return self.value > max(HEAVY, self.largest)


@dataclass(frozen=True)
class Runs:
    """What was recorded.

    Attributes:
        found: of each arm and width the records of all seeds.
        width: of most arms.
    """

    found: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
    width: int

    def has(self, *names: str) -> bool:
        """Whether these arms were run."""
        return all((name, self.width) in self.found for name in names)

    def at_target(self, name: str, where: str, width: int | None = None) -> "Excesses":
        """The excess at the target, of each seed; None for one that does not pass it."""
        rows = [passing(record["rows"], TARGET) for record in self.found[name, width or self.width]]
        return [None if row is None else excess(row, where) for row in rows]

    def ends(self, name: str) -> list[float]:
        """The loss at the end of each seed; NaN of one that diverged."""
        return [
            math.nan if record["diverged"] else record["rows"][-1]["loss"] for record in self.found[name, self.width]
        ]


Excesses = Sequence[Excess | None]
"""Of each seed; None for one that did not reach the loss."""


def passing(rows: Sequence[Mapping[str, float]], target: float) -> dict[str, float] | None:
    """The measurement where the loss first passes the target, between the two around it; None if it does not."""
    for before, after in zip(rows, rows[1:], strict=False):
        if after["loss"] <= target < before["loss"]:
            share = (before["loss"] - target) / (before["loss"] - after["loss"])
            return {key: before[key] + share * (after[key] - before[key]) for key in before}
    return None


def excess(row: Mapping[str, float], where: str) -> Excess:
    """The mean over the points of the stream, or of the computation."""
    names = PLACES[where]

    def mean(kind: str) -> float:
        return sum(row[f"{name}{kind}"] - row[f"{name} rotated"] for name in names) / len(names)

    return Excess(mean(""), mean(" largest"))


def values(found: Excesses) -> list[float]:
    """Of the seeds that reached the loss."""
    return [each.value for each in found if each is not None]


def reached(found: Excesses) -> bool:
    """Whether every seed reached the loss."""
    return bool(found) and None not in found


def spread(found: Excesses) -> str:
    """Mean, and the least and the largest of the seeds, in words; and how many these are, if not all."""
    known = values(found)
    if not known:
        return "did not reach the loss"
    ends = f" ({min(known):+.2f} to {max(known):+.2f})" if len(known) > 1 else ""
    of = "" if reached(found) else f" in {len(known)} of {len(found)} seeds, the others did not reach the loss"
    return f"{fmean(known):+.2f}{ends}{of}"


def heavy(found: Excesses) -> bool:
    """Whether every seed is; none that did not reach the loss."""
    return bool(found) and all(each is not None and each.heavy for each in found)


def near(found: Excesses) -> bool:
    """Whether the mean over seeds is, and all reached the loss."""
    return reached(found) and abs(fmean(values(found))) <= NEAR


def above(high: Excesses, low: Excesses) -> bool:
    """Whether every seed of one is above every seed of the other, and all reached the loss."""
    return reached(high) and reached(low) and min(values(high)) > max(values(low))


def rotations_of(found: Excesses) -> str:
    """The null in words."""
    largest = max((each.largest for each in found if each is not None), default=0)
    return f"at most {largest:+.2f} after any of ten rotations"
