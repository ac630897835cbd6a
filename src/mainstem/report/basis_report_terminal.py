"""The basis report for the terminal: its sections, one after the other."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_ablations_terminal import print_ablations
from mainstem.report.basis_kurtosis_terminal import print_kurtosis
from mainstem.report.basis_outliers_terminal import print_emergence, print_outliers
from mainstem.report.basis_quantisers_terminal import print_quantisers
from mainstem.report.basis_recommendation_terminal import print_recommendation
from mainstem.report.basis_report_text import text_line
from mainstem.report.basis_rotations_terminal import print_rotations
from mainstem.report.basis_rounding_terminal import print_rounding
from mainstem.results.basis_report import BasisReport

_PRINTERS: dict[str, Callable] = {
    "kurtosis": print_kurtosis,
    "outliers": print_outliers,
    "emergence": print_emergence,
    "ablations": print_ablations,
    "quantisers": print_quantisers,
    "rotations": print_rotations,
    "rounding": print_rounding,
    "recommendation": print_recommendation,
}


def print_basis_report(console: Console, report: BasisReport) -> None:
    """Prints the sections that were made, as wide as the console is."""
    console.print(*t.title_rows(report.command, report.model, report.provenance), sep="\n")
    console.print(t.labelled("text", Text(text_line(report.text))))
    for name, section in report.sections().items():
        _PRINTERS[name](console, section)
    for part in t.notices(report.warnings, report.notes):
        console.print(part)
    console.print(t.provenance_line(report.provenance))
