"""The result of an experiment: claims beside what was measured and what chance does, tables, figures, provenance."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mainstem.analysis.statistics import Interval
from mainstem.results.reading import Provenance

Finding = Literal["reproduced", "not reproduced", "in part", "measured"]
"""`measured`: a number without a published one to hold it against."""


def finding(holds: bool, partly: bool = False) -> Finding:
    """The finding for a claim that holds, that holds in part, or that does not."""
    return "reproduced" if holds else "in part" if partly else "not reproduced"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        claim: what was published, in one sentence.
        source: where.
        published: the published number, in words.
        measured: the number measured here, in words.
        null: what the control gives, in words.
        finding: whether it holds here.
        values: the numbers behind the words.
    """

    claim: str
    source: str
    published: str
    measured: str
    null: str
    finding: Finding
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """Bars with intervals, one for each label: drawn by the page."""

    title: str
    labels: list[str]
    bars: list[Interval]
    unit: str = ""


@dataclass(frozen=True)
class ExperimentTable:
    """Rows of cells under heads; numbers stay numbers until they are shown."""

    title: str
    caption: str
    heads: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Experiment:
    """One experiment run on one model."""

    name: str
    title: str
    question: str
    provenance: Provenance
    model: dict[str, Any]
    claims: list[Claim]
    tables: list[ExperimentTable]
    figures: list[Figure] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        return {"schema": f"mainstem/reproduce/{self.name}/1", "command": f"reproduce {self.name}", **asdict(self)}
