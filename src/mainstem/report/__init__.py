"""Results as tables, JSON and HTML. A report renders the plain data of a result and computes nothing.

Which result is rendered by what is in `_RENDERERS`: for each a table for the terminal and a page; results that are
tables, too (`TabularDocument`), can be written as Parquet.

No report imports torch: a result that was saved can be rendered without a model.
"""

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from io import StringIO
from typing import Any, Protocol, runtime_checkable

from rich.console import Console

from mainstem.experiments.everything import Reproduction
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.registry import ExperimentList
from mainstem.report.text import finite
from mainstem.results.basis_report import BasisReport
from mainstem.results.circuits import CircuitReading
from mainstem.results.composition import CompositionReading
from mainstem.results.description import AnatomyDescription, LensReading
from mainstem.results.explanation import Explanation
from mainstem.results.generation import Compared
from mainstem.results.heads import HeadsReading
from mainstem.results.patch import PatchReading
from mainstem.results.prompt_set import PromptSetReading
from mainstem.results.subspace import SubspaceReading
from mainstem.results.trigram import TrigramReading

_RENDERERS = {
    Explanation: ("explain_terminal:print_explanation", "explain_page:explanation_page"),
    AnatomyDescription: ("anatomy_terminal:print_anatomy", "anatomy_page:anatomy_page"),
    LensReading: ("lens_terminal:print_lens", "lens_page:lens_page"),
    Reproduction: ("reproduction_terminal:print_reproduction", "reproduction_page:reproduction_page"),
    ExperimentList: ("reproduction_terminal:print_list", ""),
    Experiment: ("experiment_terminal:print_experiment", "experiment_page:experiment_page"),
    Compared: ("steer_terminal:print_comparison", "steer_page:comparison_page"),
    PatchReading: ("patch_terminal:print_patch", "patch_page:patch_page"),
    PromptSetReading: ("set_terminal:print_prompt_set", "set_page:prompt_set_page"),
    CompositionReading: ("composition_terminal:print_composition", "composition_page:composition_page"),
    CircuitReading: ("circuits_terminal:print_circuits", "circuits_page:circuits_page"),
    TrigramReading: ("trigram_terminal:print_trigram", "trigram_page:trigram_page"),
    HeadsReading: ("heads_terminal:print_heads", "heads_page:heads_page"),
    BasisReport: ("basis_report_terminal:print_basis_report", "basis_report_page:basis_report_page"),
    SubspaceReading: ("subspace_terminal:print_subspace", "subspace_page:subspace_page"),
}


class Document(Protocol):
    """A result that knows its JSON document."""

    def as_dict(self) -> dict:
        """The document."""
        ...


@runtime_checkable
class TabularDocument(Document, Protocol):
    """A result that is a table, too."""

    def cells(self) -> Iterable[dict[str, Any]]:
        """Its rows, all with the same names."""
        ...

    def about(self) -> dict[str, Any]:
        """The document without what stands in the rows."""
        ...


def as_json(result: Document) -> str:
    """One JSON document, with a line break at its end; NaN and infinities are null."""
    return json.dumps(finite(result.as_dict()), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def print_tables(console: Console, result: Document) -> None:
    """Prints a result as tables.

    Raises:
        TypeError: there is no table for results of this class.
    """
    _renderer(result, 0)(console, result)


def as_text(result: Document, width: int | None = None) -> str:
    """A result's tables as text without colours, for files and pipes; no line ends in spaces."""
    from mainstem.report.terminal import terminal

    held = StringIO()
    print_tables(terminal(held, width, colour=False), result)
    return "\n".join(line.rstrip() for line in held.getvalue().splitlines()) + "\n"


def as_html(result: Document) -> str:
    """A result as one page that needs no network.

    Raises:
        TypeError: there is no page for results of this class.
    """
    return _renderer(result, 1)(result)


def _renderer(result: Document, which: int) -> Callable:
    """A function of a report, imported when it is needed: rich's tables take a tenth of a second."""
    found = _RENDERERS.get(type(result))
    if found is None or not found[which]:
        raise TypeError(f"there is no report for {type(result).__name__}")
    module, _, name = found[which].partition(":")
    return getattr(import_module(f"mainstem.report.{module}"), name)
