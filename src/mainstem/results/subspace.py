"""What `mainstem subspace` finds, as plain rows: an overlap, the units that erase, or the use of the stream's room."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from mainstem.results.reading import TabularReading


@dataclass(frozen=True)
class Bar:
    """One bar of the figure: a mean and the interval around it."""

    name: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Map:
    """A table of numbers, drawn as a heat map."""

    title: str
    caption: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]


@dataclass(frozen=True)
class SubspaceReading(TabularReading):
    """One answer of `mainstem subspace`.

    Attributes:
        subject: "overlap", "erasers" or "bandwidth": what `facts` and `rows` hold is documented for each.
        title, verdict: in words.
        facts: the numbers by name.
        rows: a table; all rows have the same keys.
        bars: the figure, in units of `bars_unit`.
        maps: further figures.
    """

    IN_CELLS: ClassVar = ("rows",)

    subject: str
    title: str
    verdict: str
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    caption: str
    bars: list[Bar] = field(default_factory=list)
    bars_unit: str = ""
    maps: list[Map] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        return {
            "schema": f"mainstem/subspace/{self.subject}/1",
            "command": "subspace",
            "provenance": asdict(self.provenance),
            "warnings": self.warnings,
            "model": self.model,
            "subject": self.subject,
            "verdict": self.verdict,
            **self.facts,
            "rows": self.rows,
            "maps": [asdict(one) for one in self.maps],
            "notes": self.notes,
        }

    def cells(self) -> Iterator[dict[str, Any]]:
        """The rows of a Parquet file."""
        yield from self.rows
