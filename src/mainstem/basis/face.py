"""What `Model.basis` is: questions about the basis of the stream, each answered by a module of this package."""

from typing import TYPE_CHECKING, Any

from mainstem.basis.reporting import report_basis
from mainstem.results.basis_report import BasisReport

if TYPE_CHECKING:
    from mainstem.session import Model


class Basis:
    """The basis laboratory of one model; the model is never changed."""

    def __init__(self, model: "Model") -> None:
        self.model = model

    def report(self, **options: Any) -> BasisReport:
        """The whole report; see `mainstem.basis.reporting.report_basis` for the options."""
        return report_basis(self.model, **options)
