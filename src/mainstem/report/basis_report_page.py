"""The basis report as a page: what to do first, then the sections that it stands on."""

from collections.abc import Callable

from mainstem.report import page as p
from mainstem.report.basis_ablations_page import ablations_section
from mainstem.report.basis_kurtosis_page import kurtosis_section
from mainstem.report.basis_outliers_page import emergence_section, outliers_section
from mainstem.report.basis_quantisers_page import quantisers_section
from mainstem.report.basis_recommendation_page import recommendation_section
from mainstem.report.basis_report_text import text_line
from mainstem.report.basis_rotations_page import rotations_section
from mainstem.report.basis_rounding_page import rounding_section
from mainstem.results.basis_report import BasisReport

_SECTIONS: dict[str, Callable] = {
    "recommendation": recommendation_section,
    "kurtosis": kurtosis_section,
    "outliers": outliers_section,
    "emergence": emergence_section,
    "ablations": ablations_section,
    "quantisers": quantisers_section,
    "rotations": rotations_section,
    "rounding": rounding_section,
}


def basis_report_page(report: BasisReport) -> str:
    """The page of a basis report."""
    made = report.sections()
    body = [
        p.model_line(report.command, report.model, report.provenance),
        "<h1>The basis of the stream</h1>",
        f"<p>Measured on {p.esc(text_line(report.text))}.</p>",
        *(render(made[name]) for name, render in _SECTIONS.items() if name in made),
        p.notices(report.warnings, report.notes),
    ]
    return p.page(f"The basis of {report.model['name']}", body, report.provenance, report.as_dict())
