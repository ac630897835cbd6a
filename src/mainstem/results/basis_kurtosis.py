"""A section of the basis report as plain data: the kurtosis of the stream and of what sublayers read, with its null."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mainstem.results.reading import numbers


@dataclass(frozen=True)
class PointRow:
    """One place of the stream.

    Attributes:
        name: the unit that wrote last, or `L5.attn.input` for what a sublayer reads after its norm.
        kind: "stream" or "input".
        layer: the block; None for the embedding.
        kurtosis: over coordinates, the mean over tokens (Elhage, Lasenby, Olah 2023).
        without_first: the same without the first positions of windows.
        rotated: the same after a random rotation, the mean over rotations; without first positions.
        rotated_least, rotated_largest: over rotations.
        neuron_kurtosis: of the coordinates' root mean squares over tokens (He et al. 2024).
        neuron_kurtosis_without_first: the same without first positions.
        max_over_median: a token's largest magnitude over its median one, the mean over every eighth token, without
            first positions; None for what is read.
        largest: the largest magnitude of all.
    """

    name: str
    kind: str
    layer: int | None
    kurtosis: float
    without_first: float
    rotated: float
    rotated_least: float
    rotated_largest: float
    neuron_kurtosis: float
    neuron_kurtosis_without_first: float
    max_over_median: float | None
    largest: float


@dataclass(frozen=True)
class KurtosisSection:
    """Kurtosis at every point.

    Attributes:
        tokens: how many tokens were counted, and how many of them at a window's first position.
        expectation: of a vector in a random direction, 3 (d - 1) / (d + 1).
        rotations: how many random rotations, on how many tokens.
        points: the stream's states, then what sublayers read, each in the order of execution.
    """

    tokens: dict[str, int]
    expectation: float
    rotations: dict[str, int]
    points: list[PointRow]

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of the table."""
        for row in self.points:
            yield from numbers(row.name, row)
