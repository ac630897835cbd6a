"""The rules of the training experiment on the privileged basis: where arms are compared, and what is heavy and near.

What the words mean stands in `privileged_basis_training`; here is their arithmetic, on what each model recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TARGET = 4.1
"""The held-out loss, in nats a token, at which arms are compared."""

HEAVY, NEAR = 1.0, 0.6
"""Excess kurtosis that is heavy-tailed; and how far from none one fixed rotation may be."""

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

    def at_target(self, name: str, where: str, width: int | None = None) -> list[Excess]:
        """The excess at the target, of each seed that passes it."""
        records = self.found[name, width or self.width]
        rows = [passing(record["rows"], TARGET) for record in records]
        return [excess(row, where) for row in rows if row is not None]

    def losses(self, *names: str) -> tuple[int, dict[str, list[float]]]:
        """The steps that all of some arms took, and each arm's loss after them, of each seed."""
        records = {name: self.found[name, self.width] for name in names}
        steps = int(min(record["rows"][-1]["step"] for made in records.values() for record in made))
        return steps, {
            name: [next(row["loss"] for row in record["rows"] if row["step"] == steps) for record in made]
            for name, made in records.items()
        }


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


def mean(found: Sequence[Excess]) -> float:
    """Over seeds."""
    return sum(each.value for each in found) / len(found)


def spread(found: Sequence[Excess]) -> str:
    """Mean, and the least and the largest of the seeds, in words."""
    if not found:
        return "did not reach the loss"
    values = [each.value for each in found]
    ends = f" ({min(values):+.2f} to {max(values):+.2f})" if len(values) > 1 else ""
    return f"{mean(found):+.2f}{ends}"


def heavy(found: Sequence[Excess]) -> bool:
    """Whether every seed is."""
    return bool(found) and all(each.heavy for each in found)


def near(found: Sequence[Excess]) -> bool:
    """Whether the mean over seeds is."""
    return bool(found) and abs(mean(found)) <= NEAR


def above(high: Sequence[Excess], low: Sequence[Excess]) -> bool:
    """Whether every seed of one is above every seed of the other."""
    return bool(high) and bool(low) and min(each.value for each in high) > max(each.value for each in low)


def rotations_of(found: Sequence[Excess]) -> str:
    """The null in words."""
    return f"at most {max((each.largest for each in found), default=0):+.2f} after any of ten rotations"
