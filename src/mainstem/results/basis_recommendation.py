"""A section of the basis report as plain data: what to do about the basis, in words, each with its reasons."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Advice:
    """One recommendation.

    Attributes:
        about: "basis", "outliers", "int8", "rotation", "4 bits" or "dtype".
        text: what to do, a sentence.
        reasons: the numbers that it stands on, a sentence each.
    """

    about: str
    text: str
    reasons: list[str]


@dataclass(frozen=True)
class RecommendationSection:
    """All of them, in the order of the sections that they stand on."""

    advice: list[Advice]

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """No numbers of its own."""
        return iter(())
