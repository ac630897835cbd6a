"""What `Model.basis` is: questions about the basis of the stream, each answered by a module of this package."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mainstem.basis.ablating import ablate_dimensions
from mainstem.basis.outlier_reading import read_outliers
from mainstem.basis.quantising import quantise
from mainstem.basis.reporting import report_basis
from mainstem.basis.rotating import read_rotation, rotate, turning_of
from mainstem.basis.rounding_reading import read_rounding
from mainstem.causal.edited import unedited
from mainstem.causal.rotated import Rotated
from mainstem.model.turning import Turning
from mainstem.results.basis_report import BasisReport

if TYPE_CHECKING:
    from mainstem.session import Model


class Basis:
    """The basis laboratory of one model; the model is never changed, and edits that hold outside reach no answer."""

    def __init__(self, model: "Model") -> None:
        self.model = model

    def report(self, **options: Any) -> BasisReport:
        """The whole report; see `mainstem.basis.reporting.report_basis` for the options."""
        with unedited(self.model.module):
            return report_basis(self.model, **options)

    def outliers(self, **options: Any) -> BasisReport:
        """Outlier features, in several models too; see `mainstem.basis.outlier_reading.read_outliers`."""
        with unedited(self.model.module):
            return read_outliers(self.model, **options)

    def ablations(self, dimensions: Sequence[int] | None = None, **options: Any) -> BasisReport:
        """What dimensions do; see `mainstem.basis.ablating.ablate_dimensions` for the options."""
        with unedited(self.model.module):
            return ablate_dimensions(self.model, dimensions, **options)

    def quantisers(self, quantisers: Sequence[str] = (), **options: Any) -> BasisReport:
        """What quantisers do to products and predictions; see `mainstem.basis.quantising.quantise` for the options."""
        with unedited(self.model.module):
            return quantise(self.model, quantisers, **options)

    def rounding(self, **options: Any) -> BasisReport:
        """How much of each write rounding takes; see `mainstem.basis.rounding_reading.read_rounding`."""
        with unedited(self.model.module):
            return read_rounding(self.model, **options)

    @cached_property
    def turning(self) -> Turning:
        """Which tensors of the model carry the basis of the stream, found once; see `mainstem.model.turning`.

        Raises:
            ParallelStreamsError, RefusedError: the model cannot be rotated; names the place.
        """
        with unedited(self.model.module):
            return turning_of(self.model)

    def rotated(self, kind: str = "hadamard", **options: Any) -> Rotated:
        """A rotated copy, checked in float64; see `mainstem.basis.rotating.rotate` for the options."""
        with unedited(self.model.module):
            return rotate(self.model, kind, **options)

    def rotate(self, kind: str = "hadamard", **options: Any) -> BasisReport:
        """A rotated copy beside the model, or written as a checkpoint; see `mainstem.basis.rotating.read_rotation`."""
        with unedited(self.model.module):
            return read_rotation(self.model, kind, **options)
