"""Which heads make a skip trigram `[source] ... [destination] -> [out]`: all heads at once, from their weights.

Entries are those of `mainstem.analysis.head_circuits`: QK above the mean source, OV above the mean output, in units of
their table's root mean square, and their product. Of every table one row and one column is needed, and its size from
Gram matrices of the tokens: d_vocab x d_model multiplications for each head, no table, and neither end of the stream is
copied (`mainstem.analysis.token_vectors`).

The null: each of the three tokens in turn is replaced by every token of the vocabulary, the other two kept. A skip
trigram needs all three of its tokens, so its p is the largest of the three parts that score no less. It comes out large
for a head that promotes the output whatever it looks at, or looks at the source from everywhere. Products are float32.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.token_vectors import Embedded, Read

ROLES = ("source", "destination", "out")


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


def head_trigrams(qk: Factored, ov: Factored, e: Embedded, reads: Read, trigram: tuple[int, int, int]) -> HeadTrigrams:
    """A skip trigram in all heads of a stack.

    Args:
        qk: W_QK of the heads, as the stream sees them.
        ov: W_OV, likewise.
        e: the tokens' vectors at the beginning of the stream.
        reads: their directions at its end.
        trigram: source, destination and output.
    """
    source, destination, out = trigram
    size_qk, size_ov = _sizes(qk, ov, e, reads)
    asks = qk.T @ e.vector(destination)[:, None]
    asked = qk @ (e.vector(source) - e.mean)[:, None]
    written = ov @ e.vector(source)[:, None]
    read = ov.T @ reads.vector(out)[:, None]
    sources = _entries(e, asks, size_qk)
    sources = sources - sources.mean(0)
    destinations = _entries(e, asked, size_qk)
    outs = _entries(reads, written, size_ov)
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


def _sizes(qk: Factored, ov: Factored, e: Embedded, reads: Read) -> tuple[Tensor, Tensor]:
    """The root mean squares of both tables of each head."""
    centred = e.gram - torch.outer(e.mean, e.mean)

    def size(factored: Factored, rows: Tensor, columns: Tensor) -> Tensor:
        square = (factored.left.mT @ rows @ factored.left) * (factored.right @ columns @ factored.right.mT)
        return square.sum((-2, -1)).clamp_min(0).sqrt()

    return size(qk, e.gram, centred), size(ov, reads.gram, e.gram)


def _entries(tokens: Embedded | Read, made: Factored, size: Tensor) -> Float[Tensor, "token head"]:
    """What each head's vector gives with each token, float32; all 0 for a table of zeros."""
    vectors = made.dense()[..., 0] / size.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return tokens @ vectors.mT.float()


def _product(reads: Tensor, says: Tensor) -> Tensor:
    product = reads * says
    return torch.where((reads > 0) & (says > 0), product, -product.abs())
