"""Tables token x token of low rank, kept as two factors: their largest entries without the table.

A head's QK and OV circuits are tables of d_vocab^2 numbers and rank d_head (Elhage et al. 2021): for 50,000 tokens
2.5e9 numbers, and the strongest dozen is wanted. An entry is the inner product of a row of each factor, and
|<a, b>| <= |a| |b| (Cauchy-Schwarz): with both factors' rows sorted by their norm, a chunk of rows only needs those
columns whose norms can still beat the k-th best entry found so far, and the search ends at the first chunk that needs
none. The bound is tightened by balancing: both factors are first turned into the singular bases of the table.

Exactness: no entry that is left out is above the k-th listed by more than `slack`, the rounding of the products
(float32 during the search; listed values are computed again in float64).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.errors import UsageError

CHUNK = 256


@dataclass(frozen=True, eq=False)
class TopEntries:
    """The largest entries of a table, the largest first.

    Attributes:
        rows, columns, values: of each entry; the values in float64.
        slack: no other entry is above the last listed by more than this.
        computed: the part of the table that was computed; the rest was excluded by its norms.
    """

    rows: Int[Tensor, " top"]
    columns: Int[Tensor, " top"]
    values: Float[Tensor, " top"]
    slack: float
    computed: float


@dataclass(frozen=True, eq=False)
class VocabularyTable:
    """rows @ columns^T.

    Attributes:
        rows: [row, d_head], float64.
        columns: [column, d_head], float64.
    """

    rows: Float[Tensor, "row d_head"]
    columns: Float[Tensor, "column d_head"]

    @cached_property
    def balanced(self) -> "VocabularyTable":
        """The same table with both factors in its singular bases, each with half of every singular value."""
        u, s, vh = Factored(self.rows, self.columns.mT).svd()
        return VocabularyTable(u * s.sqrt(), vh.mT * s.sqrt())

    @cached_property
    def size(self) -> float:
        """The root mean square of all entries, from the factors."""
        square = ((self.rows.mT @ self.rows) * (self.columns.mT @ self.columns)).sum()
        return float((square.clamp_min(0) / (len(self.rows) * len(self.columns))).sqrt())

    def row(self, index: int) -> Float[Tensor, " column"]:
        """One row of the table."""
        return self.columns @ self.rows[index]

    def column(self, index: int) -> Float[Tensor, " row"]:
        """One column of the table."""
        return self.rows @ self.columns[index]

    def require_some(self, what: str) -> None:
        """Raises UsageError if every entry is zero."""
        if self.size == 0:
            raise UsageError(
                f"{what} is zero everywhere", None, "The head's weights are zero; there is nothing to list."
            )

    def top(self, count: int) -> TopEntries:
        """The largest `count` entries."""
        table = self.balanced
        a, order_a, norms_a = _sorted(table.rows)
        b, order_b, norms_b = _sorted(table.columns)
        count = min(count, len(a) * len(b))
        best = torch.full((0,), -torch.inf)
        places = torch.zeros(0, dtype=torch.long)
        computed = 0
        for start in range(0, len(a), CHUNK):
            least = float(best[-1]) if len(best) == count else -torch.inf
            used = int((norms_b * norms_a[start] >= least).sum())
            if used == 0:
                break
            values = a[start : start + CHUNK] @ b[:used].mT
            computed += values.numel()
            better = (values.amax(1) >= least).nonzero()[:, 0]  # few rows, after the first chunk
            values = values[better].flatten()
            chunk = values.topk(min(count, len(values)))
            where = (better[chunk.indices // used] + start) * len(b) + chunk.indices % used
            both = torch.cat([best.to(values), chunk.values])
            kept = both.topk(min(count, len(both)))
            best, places = kept.values, torch.cat([places.to(where), where])[kept.indices]
        rows, columns = order_a[places // len(b)], order_b[places % len(b)]
        exact = (self.rows[rows] * self.columns[columns]).sum(-1)
        order = exact.argsort(descending=True, stable=True)
        slack = 4 * a.shape[1] * torch.finfo(a.dtype).eps * float(norms_a[0] * norms_b[0])
        return TopEntries(rows[order], columns[order], exact[order], slack, computed / (len(a) * len(b)))

    def rotated(self, generator: torch.Generator) -> "VocabularyTable":
        """A table of the same factors with a random rotation between them: a draw of `turned_tables`' null.

        Rows and columns keep their norms, and lose what they have to do with each other.
        """
        normal = torch.randn(self.rows.shape[1], self.rows.shape[1], generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(normal)
        return VocabularyTable(self.rows @ (q * r.diagonal().sign()).to(self.rows), self.columns)


def _sorted(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in float32 by falling norm, their numbers, and their norms."""
    norms, order = factor.norm(dim=-1).sort(descending=True, stable=True)
    return factor[order].float(), order, norms
