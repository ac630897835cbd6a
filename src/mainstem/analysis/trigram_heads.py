"""Which heads make a skip trigram `[source] ... [destination] -> [out]`: all heads at once, from their weights.

Entries are those of `mainstem.analysis.head_circuits`: QK above the mean source, OV above the mean output, in units of
their table's root mean square, and their product. Of every table one row and one column is needed, and its size from
Gram matrices of the tokens: d_vocab x d_model for each head, no table.

The null: each of the three tokens in turn is replaced by every token of the vocabulary, the other two kept. A skip
trigram needs all three of its tokens, so its p is the largest of the three parts that score no less. It comes out large
for a head that promotes the output whatever it looks at, or looks at the source from everywhere. Products are float32.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.head_circuits import unembedded
from mainstem.analysis.readout import require_linear
from mainstem.model.anatomy import Readout

ROLES = ("source", "destination", "out")


@dataclass(frozen=True, eq=False)
class TrigramTokens:
    """The tokens at both ends of the stream, float32.

    Attributes:
        embedding: each token's stream vector.
        outs: the direction of the stream that each token's logit reads, less that of the mean token.
    """

    embedding: Float[Tensor, "token d_model"]
    outs: Float[Tensor, "out d_model"]

    @cached_property
    def mean(self) -> Float[Tensor, " d_model"]:
        """Of the embeddings."""
        return self.embedding.mean(0)

    @cached_property
    def grams(self) -> tuple[Float[Tensor, "d_model d_model"], ...]:
        """Mean squares of the embeddings, of the embeddings less their mean, and of the outputs; float64."""
        squares = [(rows.mT @ rows).double() / len(rows) for rows in (self.embedding, self.outs)]
        mean = self.mean.double()
        return squares[0], squares[0] - torch.outer(mean, mean), squares[1]


@dataclass(frozen=True, eq=False)
class HeadTrigrams:
    """A skip trigram in each of some heads.

    Attributes:
        qk, ov: its entries in units of the tables' root mean square.
        score: their product, below 0 unless both are above.
        source_rank: of the source among all sources of the destination, from 1; out_rank: of the output among all
            outputs of the source.
        reached: for each of `ROLES` the part of the vocabulary that scores no less in its place, itself counted.
    """

    qk: Float[Tensor, " head"]
    ov: Float[Tensor, " head"]
    score: Float[Tensor, " head"]
    source_rank: Int[Tensor, " head"]
    out_rank: Int[Tensor, " head"]
    reached: Float[Tensor, "head role"]


def trigram_tokens(embedding: Float[Tensor, "token d_model"], readout: Readout) -> TrigramTokens:
    """Both ends of the stream.

    Raises:
        LevelRefusedError: if the readout is no norm and unembedding.
    """
    require_linear(readout)
    outs = unembedded(readout, torch.eye(embedding.shape[1], dtype=embedding.dtype, device=embedding.device))
    return TrigramTokens(embedding.float(), (outs - outs.mean(0)).float())


def head_trigrams(qk: Factored, ov: Factored, tokens: TrigramTokens, trigram: tuple[int, int, int]) -> HeadTrigrams:
    """A skip trigram in all heads of a stack.

    Args:
        qk: W_QK of the heads, as the stream sees them.
        ov: W_OV, likewise.
        tokens: both ends of the stream.
        trigram: source, destination and output.
    """
    source, destination, out = trigram
    e, mean = tokens.embedding, tokens.mean
    size_qk, size_ov = _sizes(qk, ov, tokens)
    asks = qk.T @ e[destination].double()[:, None]
    asked = qk @ (e[source] - mean).double()[:, None]
    written = ov @ e[source].double()[:, None]
    read = ov.T @ tokens.outs[out].double()[:, None]
    sources = _entries(e, asks, size_qk) - _entries(mean[None], asks, size_qk)
    destinations = _entries(e, asked, size_qk)
    outs = _entries(tokens.outs, written, size_ov)
    sayers = _entries(e, read, size_ov)
    looks, says = sources[source], outs[out]
    count = min(len(sources), len(sayers))
    products = (
        (_product(sources[:count], sayers[:count]), source),
        (_product(destinations, says), destination),
        (_product(looks, outs), out),
    )
    return HeadTrigrams(
        qk=looks.double(),
        ov=says.double(),
        score=_product(looks, says).double(),
        source_rank=(sources > looks).sum(0) + 1,
        out_rank=(outs > says).sum(0) + 1,
        reached=torch.stack([(values >= values[own]).double().mean(0) for values, own in products], -1),
    )


def _sizes(qk: Factored, ov: Factored, tokens: TrigramTokens) -> tuple[Tensor, Tensor]:
    """The root mean squares of both tables of each head."""
    embedded, centred, outs = tokens.grams

    def size(factored: Factored, rows: Tensor, columns: Tensor) -> Tensor:
        square = (factored.left.mT @ rows @ factored.left) * (factored.right @ columns @ factored.right.mT)
        return square.sum((-2, -1)).clamp_min(0).sqrt()

    return size(qk, embedded, centred), size(ov, outs, embedded)


def _entries(tokens: Tensor, made: Factored, size: Tensor) -> Float[Tensor, "token head"]:
    """What each head's vector gives with each token; all 0 for a table of zeros."""
    vectors = made.dense()[..., 0] / size.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return tokens @ vectors.to(tokens).mT


def _product(reads: Tensor, says: Tensor) -> Tensor:
    product = reads * says
    return torch.where((reads > 0) & (says > 0), product, -product.abs())
