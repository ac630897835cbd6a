"""Each token's vector of the stream at its two ends, without a copy of either table.

At the beginning a row of the embedding times a number, at the end the direction that a token's logit reads: a row of
the unembedding behind the final norm. Both tables are the model's own, in its dtype. Products with a few columns go
over them `VOCABULARY_CHUNK` rows at a time, in the columns' dtype; so do Gram matrices, float32 sums of a chunk added
in float64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.readout import VOCABULARY_CHUNK, normed
from mainstem.model.anatomy import Readout


@dataclass(frozen=True, eq=False)
class Embedded:
    """What the embedding writes for each token.

    Attributes:
        table: the embedding's own.
        factor: what each row is multiplied with.
    """

    table: Float[Tensor, "token d_model"]
    factor: Float[Tensor, " token"]

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.table)

    def __matmul__(self, columns: Float[Tensor, "d_model column"]) -> Float[Tensor, "token column"]:
        """Every token's vector times some columns."""
        made = product(self.table, columns)
        return made * self.factor[:, None].to(made)

    def vector(self, token: int) -> Float[Tensor, " d_model"]:
        """That of one token, float64."""
        return self.table[token].double() * self.factor[token]

    @cached_property
    def mean(self) -> Float[Tensor, " d_model"]:
        """The mean of all, float64."""
        return torch.stack([(rows.double() * own).sum(0) for rows, own in self._chunks()]).sum(0) / len(self)

    @cached_property
    def gram(self) -> Float[Tensor, "d_model d_model"]:
        """The mean of their squares x x^T, float64."""
        scaled = (rows.float() * own.float() for rows, own in self._chunks())
        return torch.stack([(rows.mT @ rows).double() for rows in scaled]).sum(0) / len(self)

    def scaled(self, scale: Callable[[Tensor], Tensor]) -> "Embedded":
        """Each vector x times a number, scale(x) [..., 1]."""
        factors = [own * scale(rows.double() * own) for rows, own in self._chunks()]
        return replace(self, factor=torch.cat(factors)[:, 0])

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = (self.table.split(VOCABULARY_CHUNK), self.factor[:, None].split(VOCABULARY_CHUNK))
        return zip(*chunks, strict=True)


@dataclass(frozen=True, eq=False)
class Read:
    """The directions of the stream that tokens' logits read, less that of the mean token; scales of norms left out."""

    readout: Readout
    d_model: int

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.readout.unembedding)

    def __matmul__(self, columns: Float[Tensor, "d_model column"]) -> Float[Tensor, "token column"]:
        """Every token's direction times some columns."""
        made = unembedded(self.readout, columns)
        return made - made.mean(0)

    def vector(self, token: int) -> Float[Tensor, " d_model"]:
        """That of one token, float64."""
        return self._behind_norm @ (self._table[token].double() - self._mean)

    @cached_property
    def gram(self) -> Float[Tensor, "d_model d_model"]:
        """The mean of their squares x x^T, float64."""
        whole = Embedded(self._table, torch.ones(len(self), dtype=torch.float64, device=self._table.device)).gram
        return self._behind_norm @ (whole - torch.outer(self._mean, self._mean)) @ self._behind_norm.mT

    @property
    def _table(self) -> Tensor:
        return self.readout.unembedding.detach()

    @cached_property
    def _mean(self) -> Tensor:
        return Embedded(self._table, torch.ones(len(self), dtype=torch.float64, device=self._table.device)).mean

    @cached_property
    def _behind_norm(self) -> Float[Tensor, "d_model d_in"]:
        axes = torch.eye(self.d_model, dtype=torch.float64, device=self._table.device)
        return _normed(self.readout, axes) * self.readout.scale


def unembedded(readout: Readout, columns: Float[Tensor, "d_model column"]) -> Float[Tensor, "token column"]:
    """Columns of the stream as logits of all tokens, without the final norm's scale and any bias."""
    x = _normed(readout, columns.mT)
    return product(readout.unembedding.detach(), x.mT.to(columns.dtype)) * readout.scale


def product(table: Float[Tensor, "token _"], columns: Float[Tensor, "_ column"]) -> Float[Tensor, "token column"]:
    """A table of the model times some columns, in the dtype of the columns."""
    return torch.cat([rows.detach().to(columns.dtype) @ columns for rows in table.split(VOCABULARY_CHUNK)])


def _normed(readout: Readout, vectors: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_in"]:
    return normed(readout, vectors, torch.ones(1, dtype=torch.float64, device=vectors.device), vectors=True)
