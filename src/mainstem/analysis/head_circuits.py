"""A head's circuits between tokens: QK says which source a destination looks at, OV what is then predicted.

Elhage et al. 2021: W_E^T W_QK W_E is a table destination x source, W_U W_OV W_E a table of outputs x sources, and
`[source] ... [destination] -> [out]` is a skip trigram if both entries are large. Embeddings are as they come out of
the embedding (or each at its own scale of the head's norm), the unembedding has the final norm's gain; scales of norms
of a run are left out. The softmax over sources sees no term that all sources share, nor the softmax over outputs one
that all outputs share: QK entries are taken above the mean source, OV entries above the mean output.

A head factors: f(source, destination) g(source, out). Two skip trigrams of one source so force two more, with the
destinations exchanged: keep ... in -> mind and keep ... at -> bay also make keep ... in -> bay.

Limits: only the direct path from the embedding to the head and from the head to the logits. Beyond the first layer a
head reads what others wrote, too, and the tables say nothing of that.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.readout import VOCABULARY_CHUNK, normed, require_linear
from mainstem.analysis.vocabulary_table import VocabularyTable
from mainstem.model.anatomy import Readout

CHUNK = 256
RANKED = 2048


@dataclass(frozen=True, eq=False)
class SkipTrigrams:
    """What a source does: the destinations that look at it most, the outputs it then promotes most.

    Attributes:
        source: a token.
        score: the largest of qk x ov over destinations and outputs, each in units of its table's root mean square.
        destinations, outs: tokens with their entries in the same units, the largest first.
    """

    source: int
    score: float
    destinations: tuple[tuple[int, float], ...]
    outs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class HeadCircuits:
    """The tables of one head.

    Attributes:
        qk: destination x source, above the mean source.
        ov: out x source, above the mean out.
        eigenvalues: of W_U W_OV W_E, those that may differ from 0.
    """

    qk: VocabularyTable
    ov: VocabularyTable
    eigenvalues: Complex[Tensor, " d_head"]

    @property
    def copying(self) -> float:
        """sum lambda / sum |lambda|: 1 for a head that only copies, -1 for one that only erases, about 0 by chance."""
        return eigenvalue_score(self.eigenvalues)

    @cached_property
    def normal(self) -> tuple[VocabularyTable, VocabularyTable]:
        """Both tables in units of their root mean square."""
        self.qk.require_some("The QK circuit")
        self.ov.require_some("The OV circuit")
        qk, ov = self.qk, self.ov
        return VocabularyTable(qk.rows / qk.size, qk.columns), VocabularyTable(ov.rows / ov.size, ov.columns)

    def own_ranks(self) -> Float[Tensor, " token"]:
        """The rank, from 1, of tokens among the outputs that they promote; equals share their mean rank.

        Of all tokens, or of `RANKED` evenly spaced over a larger vocabulary.
        """
        count = min(len(self.ov.rows), len(self.ov.columns))
        tokens = torch.arange(min(count, RANKED), device=self.ov.rows.device) * count // min(count, RANKED)
        rows, columns = self.ov.rows.float(), self.ov.columns[tokens].float()
        ranks = []
        for chosen, chunk in zip(tokens.split(CHUNK), columns.split(CHUNK), strict=True):
            values = chunk @ rows.mT
            own = values.gather(1, chosen[:, None])
            above, level = (values > own).sum(1), (values == own).sum(1)
            ranks.append(above + (level + 1) / 2)
        return torch.cat(ranks)

    def score(self, source: int, destination: int, out: int) -> float:
        """qk x ov of one skip trigram, in units of both tables; below 0 if either speaks against it."""
        qk, ov = self.normal
        reads = float(qk.rows[destination] @ qk.columns[source])
        says = float(ov.rows[out] @ ov.columns[source])
        return reads * says if reads > 0 and says > 0 else -abs(reads * says)

    def skip_trigrams(self, count: int, breadth: int = 3) -> list[SkipTrigrams]:
        """The `count` sources with the strongest skip trigrams, exactly: others are excluded by their norms.

        A source's score is at most |k| max |q| |v| max |u|; sources are tried in the order of that bound until it
        falls below the last of the best.
        """
        qk, ov = (table.balanced for table in self.normal)
        sources = min(len(qk.columns), len(ov.columns))
        bound = qk.columns[:sources].norm(dim=-1) * ov.columns[:sources].norm(dim=-1)
        bound = bound * qk.rows.norm(dim=-1).max() * ov.rows.norm(dim=-1).max()
        order = bound.argsort(descending=True, stable=True)
        best, chosen = torch.zeros(0, dtype=torch.float64), order[:0]
        for start in range(0, sources, CHUNK):
            if len(best) == min(count, sources) and float(bound[order[start]]) < float(best[-1]):
                break
            index = order[start : start + CHUNK]
            reads = (qk.columns[index].float() @ qk.rows.float().mT).amax(1)
            says = (ov.columns[index].float() @ ov.rows.float().mT).amax(1)
            scores = torch.cat([best.to(bound), (reads.clamp_min(0) * says.clamp_min(0)).double()])
            kept = scores.topk(min(count, len(scores)))
            best, chosen = kept.values, torch.cat([chosen, index])[kept.indices]
        return [self.of_source(int(source), breadth) for source in chosen]

    def of_source(self, source: int, breadth: int = 3) -> SkipTrigrams:
        """The skip trigrams of one source."""
        qk, ov = self.normal
        reads, says = qk.column(source), ov.column(source)
        score = float(reads.max().clamp_min(0) * says.max().clamp_min(0))
        return SkipTrigrams(source, score, _largest(reads, breadth), _largest(says, breadth))


def forced(first: tuple[int, int, int], second: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """The skip trigrams (source, destination, out) that two of one head force; none if nothing can be exchanged.

    The product of both scores is that of the two forced: they cannot all be large and those small.
    """
    (source, destination, out), (other, elsewhere, also) = first, second
    if source != other or destination == elsewhere or out == also:
        return ()
    return (source, destination, also), (source, elsewhere, out)


def head_circuits(
    qk: Factored, ov: Factored, embedding: Float[Tensor, "token d_model"], readout: Readout
) -> HeadCircuits:
    """The tables of a head.

    Args:
        qk: W_QK of the head [d_model, d_model], as the stream sees it.
        ov: W_OV, likewise.
        embedding: each token's stream vector.
        readout: of the model.

    Raises:
        LevelRefusedError: if the readout is no norm and unembedding.
    """
    require_linear(readout)
    keys = embedding @ qk.right.mT
    values = embedding @ ov.right.mT
    outs = unembedded(readout, ov.left)
    count = min(len(outs), len(values))
    return HeadCircuits(
        qk=VocabularyTable(embedding @ qk.left, keys - keys.mean(0)),
        ov=VocabularyTable(outs - outs.mean(0), values),
        eigenvalues=torch.linalg.eigvals(values[:count].mT @ outs[:count]),
    )


def unembedded(readout: Readout, columns: Float[Tensor, "d_model column"]) -> Float[Tensor, "token column"]:
    """Columns of the stream as logits of all tokens, float64, without the final norm's scale and any bias."""
    one = torch.ones(1, dtype=torch.float64, device=columns.device)
    x = normed(readout, columns.mT, one, vectors=True)
    pieces = [rows.double() @ x.mT for rows in readout.unembedding.detach().split(VOCABULARY_CHUNK)]
    return torch.cat(pieces) * readout.scale


def eigenvalue_score(eigenvalues: Tensor) -> float:
    """sum lambda / sum |lambda|, 0 where all are 0."""
    size = float(eigenvalues.abs().sum())
    return float(eigenvalues.real.sum()) / size if size else 0.0


def _largest(values: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    found = values.topk(min(count, len(values)))
    return tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))
