"""The result of an experiment: claims beside what was measured and what chance does, tables, figures, provenance."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mainstem.analysis.intervals import Interval
from mainstem.results.reading import Provenance
from mainstem.results.rebuilt import rebuilt

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
    caption: str = "mean and bootstrap interval of 95 % over prompts"


@dataclass(frozen=True)
class Curves:
    """Lines over a common axis, such as losses over steps: drawn by the page, and small by the terminal.

    Attributes:
        title: what is shown.
        caption: how to read it.
        x_label: what the horizontal axis counts.
        y_label: what the vertical axis measures, with its unit.
        lines: the points (x, y) of each line, by name. Lines of one arm, named `arm, seed 0`, `arm, seed 1` ..., share
            their colour and their label.
        logarithmic: whether the vertical axis is; what is not above 1e-12 is then left out.
    """

    title: str
    caption: str
    x_label: str
    y_label: str
    lines: dict[str, list[tuple[float, float]]]
    logarithmic: bool = False


@dataclass(frozen=True)
class ExperimentTable:
    """Rows of cells under heads; numbers stay numbers until they are shown."""

    title: str
    caption: str
    heads: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class ExperimentProvenance(Provenance):
    """Where the result of an experiment comes from, with what a number depends on besides the model and the settings.

    Of one that trains its own models `seed` is the first of `seeds`, `dtype` that of the trained weights, and `model`
    says that there was none before.

    Attributes:
        code: the digest of Mainstem's sources, as far as they can change a number (`mainstem.experiments.provenance`).
        python: its version.
        numpy: its version.
        machine: processors, cores and system; several with semicolons, where kept results of others are used.
        threads: how many of torch.
        seeds: of the trained models, or of the random choices.
    """

    code: str
    python: str
    numpy: str
    machine: str
    threads: int
    seeds: list[int]


@dataclass(frozen=True)
class Experiment:
    """One experiment, run on one model or with models of its own.

    Attributes:
        name: the word after `mainstem reproduce`.
        title: what it is about, as a heading.
        question: what it asks.
        provenance: versions, model, device, seeds, date; of an experiment that trains its own models from
            `Settings.provenance`, with code and machine.
        model: name, size and dtype of the model; of an experiment that trains its own models the name alone, which
            says what they are: "plain and residual networks, images of digits".
        claims: what was published, beside what was measured.
        tables: rows of numbers.
        figures: bars and curves, in the order in which they are shown.
        warnings: what to keep in mind, each a code, a sentence and a number.
        notes: sentences that explain.
    """

    name: str
    title: str
    question: str
    provenance: Provenance
    model: dict[str, Any]
    claims: list[Claim]
    tables: list[ExperimentTable]
    figures: list[Figure | Curves] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        return {"schema": f"mainstem/reproduce/{self.name}/1", "command": f"reproduce {self.name}", **asdict(self)}


def rebuilt_experiment(values: Mapping[str, Any]) -> Experiment:
    """An experiment from what `asdict` and JSON made of it; what types leave open is told by the keys."""
    found = values["provenance"]
    figures = [rebuilt(Curves if "lines" in one else Figure, one) for one in values["figures"]]
    return Experiment(
        **{
            **values,
            "provenance": rebuilt(ExperimentProvenance if "code" in found else Provenance, found),
            "claims": [Claim(**one) for one in values["claims"]],
            "tables": [ExperimentTable(**{**one, "rows": _rows(one["rows"])}) for one in values["tables"]],
            "figures": figures,
        }
    )


def _rows(rows: list[list[Any]]) -> list[list[Any]]:
    return [[Interval(**cell) if isinstance(cell, dict) else cell for cell in row] for row in rows]
