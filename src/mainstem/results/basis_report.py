"""The result of `basis report` as plain data: one section for each question that was asked of the basis.

A section is a dataclass of a module of its own (`mainstem.results.basis_*`) with `as_dict` and `cells`, and is None
where it was not made; the document has each under its name. The keys are a contract (schema `mainstem/basis-report/1`):
keys may be added, never renamed. Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from mainstem.results.basis_ablations import AblationSection
from mainstem.results.basis_kurtosis import KurtosisSection
from mainstem.results.basis_outliers import EmergenceSection, OutlierSection
from mainstem.results.basis_quantisers import QuantiserSection
from mainstem.results.basis_recommendation import RecommendationSection
from mainstem.results.basis_rotations import RotationSection
from mainstem.results.basis_rounding import RoundingSection
from mainstem.results.reading import Provenance

SECTIONS = ("kurtosis", "outliers", "emergence", "ablations", "quantisers", "rotations", "rounding", "recommendation")
"""The sections, in the order in which they are shown; each is a field of `BasisReport`."""


class Section(Protocol):
    """One question and its answer."""

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        ...

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of its tables."""
        ...


@dataclass(frozen=True)
class BasisReport:
    """What was found about the basis of a model's stream.

    Attributes:
        text: what it was measured on: `name`, `source`, `tokens`, `window`, `stride`, `windows`.
        kurtosis: the section of this name, and so on.
        command: the command that asked.
    """

    provenance: Provenance
    warnings: list[dict[str, Any]]
    model: dict[str, Any]
    text: dict[str, Any]
    kurtosis: KurtosisSection | None = None
    outliers: OutlierSection | None = None
    emergence: EmergenceSection | None = None
    ablations: AblationSection | None = None
    quantisers: QuantiserSection | None = None
    rotations: RotationSection | None = None
    rounding: RoundingSection | None = None
    recommendation: RecommendationSection | None = None
    notes: list[str] = field(default_factory=list)
    command: str = "basis report"

    def sections(self) -> dict[str, Section]:
        """The sections that were made, by name."""
        made = {name: getattr(self, name) for name in SECTIONS}
        return {name: section for name, section in made.items() if section is not None}

    def about(self) -> dict[str, Any]:
        """The document without its sections."""
        return {
            "schema": "mainstem/basis-report/1",
            "command": self.command,
            "provenance": asdict(self.provenance),
            "warnings": self.warnings,
            "model": self.model,
            "text": self.text,
            "notes": self.notes,
        }

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        return {**self.about(), **{name: section.as_dict() for name, section in self.sections().items()}}

    def cells(self) -> list[dict[str, Any]]:
        """Every number of the sections' tables as a row: section, place, quantity, value."""
        return [
            {"section": name, "place": place, "quantity": quantity, "value": value}
            for name, section in self.sections().items()
            for place, quantity, value in section.cells()
        ]
