"""A matrix as a product of a tall and a wide one, never multiplied out.

W_QK and W_OV of a head are [d_model, d_model] of rank d_head at most (Elhage et al. 2021). Everything asked of them is
had from small cores: with Q factors of the tall sides, left = A R and right^T = B S, the singular values of left right
are those of the core R S^T [rank, rank]; its nonzero eigenvalues are those of right left [rank, rank], and so is its
trace. The cyclic rule holds for traces and eigenvalues only: ||ABC|| is not ||CAB||, an erratum of the paper's own
figure.

Cost: O(d_model rank^2) for each question. Leading axes are a stack of matrices. Limits: what is small against the
matrix's norm is known to the rounding of its dtype only.
"""

from dataclasses import dataclass
from typing import Union

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.errors import UsageError


@dataclass(frozen=True, eq=False)
class Factored:
    """left @ right.

    Attributes:
        left: [..., d_out, rank].
        right: [..., rank, d_in].
    """

    left: Float[Tensor, "*stack d_out rank"]
    right: Float[Tensor, "*stack rank d_in"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the product."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def rank(self) -> int:
        """The width of the factors: no less than the rank of the product."""
        return self.left.shape[-1]

    @property
    def T(self) -> "Factored":  # noqa: N802 (torch's own name)
        """The transpose."""
        return Factored(self.right.mT, self.left.mT)

    def __getitem__(self, index) -> "Factored":
        """One matrix of a stack, or some."""
        return Factored(self.left[index], self.right[index])

    def __matmul__(self, other: Union["Factored", Tensor]) -> "Factored":
        """The product with a factored matrix, or with a matrix [..., d_in, columns]; it keeps the smaller rank."""
        if isinstance(other, Tensor):
            return Factored(self.left, self.right @ other)
        core = self.right @ other.left
        if self.rank <= other.rank:
            return Factored(self.left, core @ other.right)
        return Factored(self.left @ core, other.right)

    def __rmatmul__(self, other: Tensor) -> "Factored":
        """The product of a matrix [..., rows, d_out] with this."""
        return Factored(other @ self.left, self.right)

    def core(self) -> Float[Tensor, "*stack row column"]:
        """R S^T of the two QR factorisations: a small matrix with the same singular values."""
        return _triangle(self.left) @ _triangle(self.right.mT).mT

    def narrow(self) -> Float[Tensor, "*stack rank d_in"]:
        """rank rows with the Gram matrix of the product's rows: M^T M = N^T N. All that a product M X has to be asked.

        ||M X|| = ||N X|| for any X, and the singular values are the same.
        """
        return _triangle(self.left) @ self.right

    def norm(self) -> Float[Tensor, "*stack"]:
        """The Frobenius norm."""
        return torch.linalg.matrix_norm(self.core())

    def singular_values(self) -> Float[Tensor, "*stack rank"]:
        """Singular values, the largest first; as many as the core has."""
        return torch.linalg.svdvals(self.core())

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """(U [..., d_out, rank], S [..., rank], Vh [..., rank, d_in])."""
        a, r = torch.linalg.qr(self.left)
        b, s = torch.linalg.qr(self.right.mT)
        u, values, vh = torch.linalg.svd(r @ s.mT, full_matrices=False)
        return a @ u, values, vh @ b.mT

    def eigenvalues(self) -> Tensor:
        """The eigenvalues that may differ from 0, complex, of a square matrix: those of right @ left [rank, rank]."""
        self._require_square("eigenvalues")
        return torch.linalg.eigvals(self.right @ self.left)

    def trace(self) -> Float[Tensor, "*stack"]:
        """The sum of the eigenvalues, of a square matrix."""
        self._require_square("trace")
        return (self.left * self.right.mT).sum((-2, -1))

    def dense(self) -> Float[Tensor, "*stack d_out d_in"]:
        """The product, multiplied out: [..., d_out, d_in] numbers."""
        return self.left @ self.right

    def to(self, dtype: torch.dtype) -> "Factored":
        """The same in another dtype."""
        return Factored(self.left.to(dtype), self.right.to(dtype))

    def _require_square(self, what: str) -> None:
        if self.shape[-1] != self.shape[-2]:
            raise UsageError(f"Only square matrices have {what}", f"this one is {list(self.shape[-2:])}")


def _triangle(tall: Tensor) -> Tensor:
    """R of a QR factorisation: R^T R is the Gram matrix."""
    return torch.linalg.qr(tall, mode="r").R
