"""Every experiment of the project: what it is about, what it needs, and how long it takes.

To add one, write its module and add it here, with the times that you measured. A module of an experiment on a model
has `run(model, quick, report=...) -> Experiment`; one of the laboratory, which trains its own models,
`run(settings) -> Experiment` (see `mainstem.experiments.settings`). Modules are imported when they are run.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

from mainstem.experiments.outcome import Experiment

PACKAGE = "mainstem.experiments"


@dataclass(frozen=True)
class Entry:
    """One experiment.

    Attributes:
        name: the word after `mainstem reproduce`.
        about: what it asks, in a line.
        module: where it is.
        needs: a model, or nothing, because it trains its own.
        quick_seconds: processor time of its quick form with one thread, on the default model or as it trains by itself:
            what it takes on an idle core of a slow machine; None: not measured.
        full_seconds: of its full form.
    """

    name: str
    about: str
    module: str
    needs: Literal["a model", "trains its own"]
    quick_seconds: int | None = None
    full_seconds: int | None = None

    @property
    def trains(self) -> bool:
        """Whether it trains its own models."""
        return self.needs == "trains its own"

    def function(self) -> Callable[..., Experiment]:
        """Its `run`, imported now."""
        return import_module(self.module).run


def _on_a_model(name: str, about: str, module: str, quick: int | None = None, full: int | None = None) -> Entry:
    return Entry(name, about, f"{PACKAGE}.{module}", "a model", quick, full)


def _of_the_laboratory(name: str, about: str, module: str, quick: int | None = None, full: int | None = None) -> Entry:
    return Entry(name, about, f"{PACKAGE}.{module}", "trains its own", quick, full)


_ENTRIES = (
    _of_the_laboratory("degradation", "do deeper networks train worse, and not with shortcuts", "degradation", 55, 355),
    _on_a_model("indirect-object", "which heads move the name in a sentence with two", "indirect_object", 90),
    _of_the_laboratory("induction", "when induction heads form, and in which models", "induction_training", 140, 800),
    _on_a_model("induction-in-the-wild", "which heads continue what was there before", "induction", 120, 250),
    _on_a_model("knowledge", "which score finds the units that hold a fact, over six relations", "knowledge", 330),
    _on_a_model("named-subspaces", "do subspaces hold the previous token and the subject", "named_subspaces", 40, 65),
    _on_a_model("outliers", "outlier features, and what int8 makes of them", "outliers", 330),
    _on_a_model("paris", "who says that Paris is a capital, and who that it is France's", "paris", 40),
    _on_a_model("privileged-basis", "is the basis of the stream special, and needs it to be", "privileged_basis", 110),
    _of_the_laboratory(
        "skip-trigrams", "are planted skip trigrams read off circuits, and what else is", "skip_trigrams", 25, 70
    ),
    _of_the_laboratory(
        "privileged-basis-training",
        "which part of training makes the basis special: norm, rotations, optimiser",
        "privileged_basis_training",
        quick=230,
        full=3330,
    ),
    _of_the_laboratory("subspaces", "have two tasks of one model subspaces of their own", "subspaces", 28, 85),
)

EXPERIMENTS: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
"""All experiments by name, in the order of the list."""


@dataclass(frozen=True)
class ExperimentList:
    """The experiments, as `mainstem reproduce` lists them."""

    entries: list[Entry]

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        rows = [{name: value for name, value in asdict(entry).items() if name != "module"} for entry in self.entries]
        return {"schema": "mainstem/reproduce/1", "command": "reproduce", "experiments": rows}
