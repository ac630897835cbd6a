"""Results as tables, JSON and HTML. A report renders the plain data of a result and computes nothing.

    explain   Explanation         ->  explain_terminal    explain_page
    anatomy   AnatomyDescription  ->  anatomy_terminal    anatomy_page
    lens      LensReading         ->  lens_terminal       lens_page
    reproduce Experiment          ->  experiment_terminal experiment_page
    steer     Compared            ->  steer_terminal      steer_page
    patch     PatchReading        ->  patch_terminal      patch_page        parquet
    any       PromptSetReading    ->  set_terminal        set_page          (many prompts)
    circuits  CompositionReading  ->  composition_terminal composition_page parquet
    heads     HeadsReading        ->  heads_terminal      heads_page        parquet
              CircuitReading      ->  circuits_terminal   circuits_page     parquet
    subspace  SubspaceReading     ->  subspace_terminal   subspace_page     parquet

No report imports torch: a result that was saved can be rendered without a model.
"""

import json
from collections.abc import Iterable
from io import StringIO
from typing import Any, Protocol, runtime_checkable

from rich.console import Console

from mainstem.circuit_description import CircuitReading
from mainstem.composition_description import CompositionReading
from mainstem.description import AnatomyDescription, LensReading
from mainstem.experiments.outcome import Experiment
from mainstem.explanation import Explanation
from mainstem.generation import Compared
from mainstem.head_description import HeadsReading
from mainstem.patch_description import PatchReading
from mainstem.prompt_set_description import PromptSetReading
from mainstem.report.text import finite
from mainstem.subspace_description import SubspaceReading


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
    """Prints a result as tables."""
    # Imported when needed: rich's tables take a tenth of a second.
    if isinstance(result, Explanation):
        from mainstem.report.explain_terminal import print_explanation

        print_explanation(console, result)
    elif isinstance(result, LensReading):
        from mainstem.report.lens_terminal import print_lens

        print_lens(console, result)
    elif isinstance(result, AnatomyDescription):
        from mainstem.report.anatomy_terminal import print_anatomy

        print_anatomy(console, result)
    elif isinstance(result, Experiment):
        from mainstem.report.experiment_terminal import print_experiment

        print_experiment(console, result)
    elif isinstance(result, Compared):
        from mainstem.report.steer_terminal import print_comparison

        print_comparison(console, result)
    elif isinstance(result, PatchReading):
        from mainstem.report.patch_terminal import print_patch

        print_patch(console, result)
    elif isinstance(result, PromptSetReading):
        from mainstem.report.set_terminal import print_prompt_set

        print_prompt_set(console, result)
    elif isinstance(result, CompositionReading):
        from mainstem.report.composition_terminal import print_composition

        print_composition(console, result)
    elif isinstance(result, HeadsReading):
        from mainstem.report.heads_terminal import print_heads

        print_heads(console, result)
    elif isinstance(result, CircuitReading):
        from mainstem.report.circuits_terminal import print_circuits

        print_circuits(console, result)
    elif isinstance(result, SubspaceReading):
        from mainstem.report.subspace_terminal import print_subspace

        print_subspace(console, result)
    else:
        raise TypeError(f"there is no table for {type(result).__name__}")


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
    if isinstance(result, Explanation):
        from mainstem.report.explain_page import explanation_page

        return explanation_page(result)
    if isinstance(result, LensReading):
        from mainstem.report.lens_page import lens_page

        return lens_page(result)
    if isinstance(result, AnatomyDescription):
        from mainstem.report.anatomy_page import anatomy_page

        return anatomy_page(result)
    if isinstance(result, Experiment):
        from mainstem.report.experiment_page import experiment_page

        return experiment_page(result)
    if isinstance(result, Compared):
        from mainstem.report.steer_page import comparison_page

        return comparison_page(result)
    if isinstance(result, PatchReading):
        from mainstem.report.patch_page import patch_page

        return patch_page(result)
    if isinstance(result, PromptSetReading):
        from mainstem.report.set_page import prompt_set_page

        return prompt_set_page(result)
    if isinstance(result, CompositionReading):
        from mainstem.report.composition_page import composition_page

        return composition_page(result)
    if isinstance(result, HeadsReading):
        from mainstem.report.heads_page import heads_page

        return heads_page(result)
    if isinstance(result, CircuitReading):
        from mainstem.report.circuits_page import circuits_page

        return circuits_page(result)
    if isinstance(result, SubspaceReading):
        from mainstem.report.subspace_page import subspace_page

        return subspace_page(result)
    raise TypeError(f"there is no page for {type(result).__name__}")
