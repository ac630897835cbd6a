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

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.readout import require_linear
from mainstem.analysis.token_vectors import Embedded, unembedded
from mainstem.analysis.vocabulary_table import VocabularyTable
from mainstem.model.anatomy import Readout

CHUNK = 256
RANKED = 512


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

    def require_some(self) -> None:
        """Raises UsageError if either table is zero everywhere."""
        self.qk.require_some("The QK circuit")
        self.ov.require_some("The OV circuit")

    def score(self, source: int, destination: int, out: int) -> float:
        """qk x ov of one skip trigram, in units of both tables; below 0 if either speaks against it."""
        self.require_some()
        reads = float(self.qk.rows[destination] @ self.qk.columns[source]) / self.qk.size
        says = float(self.ov.rows[out] @ self.ov.columns[source]) / self.ov.size
        return reads * says if reads > 0 and says > 0 else -abs(reads * says)

    def skip_trigrams(self, count: int, breadth: int = 3) -> list[SkipTrigrams]:
        """The `count` sources with the strongest skip trigrams; others are excluded by their norms.

        A source's score is at most |k| max |q| |v| max |u|; sources are tried in the order of that bound until it falls
        below the last of the best, and of each only the rows q, then u, that are long enough to reach the last of the
        best. Exact but for the rounding of float32 products.
        """
        self.require_some()
        sources = min(len(self.qk.columns), len(self.ov.columns))
        looks, promotes = (_longest(table.balanced, sources) for table in (self.qk, self.ov))
        bound = looks.bound * promotes.bound
        order = bound.argsort(descending=True, stable=True)
        best, chosen = bound[:0], order[:0]
        for index in order.split(CHUNK):
            least = float(best[-1]) if len(best) == min(count, sources) else 0.0
            if float(bound[index[0]]) < least:
                break
            reads = looks.largest(index, least / promotes.bound[index])
            index, reads = index[reads > 0], reads[reads > 0]
            scores = torch.cat([best, reads * promotes.largest(index, least / reads).clamp_min(0)])
            kept = scores.topk(min(count, len(scores)))
            best, chosen = kept.values, torch.cat([chosen, index])[kept.indices]
        return [self.of_source(int(source), breadth) for source in chosen]

    def of_source(self, source: int, breadth: int = 3) -> SkipTrigrams:
        """The skip trigrams of one source."""
        reads, says = self.qk.column(source) / self.qk.size, self.ov.column(source) / self.ov.size
        score = float(reads.max().clamp_min(0) * says.max().clamp_min(0))
        return SkipTrigrams(source, score, _largest(reads, breadth), _largest(says, breadth))


@dataclass(frozen=True, eq=False)
class _Longest:
    """A table to be asked for the largest entry of each column: rows by falling norm, all in float32.

    Attributes:
        bound: what no entry of a column exceeds.
    """

    rows: Float[Tensor, "row d_head"]
    norms: Float[Tensor, " row"]
    columns: Float[Tensor, "column d_head"]
    bound: Float[Tensor, " column"]

    def largest(self, index: Int[Tensor, " chosen"], least: Float[Tensor, " chosen"]) -> Float[Tensor, " chosen"]:
        """The largest entry of some columns; where it is below `least`, anything below `least`, or 0."""
        possible = self.bound[index] >= least
        found = torch.zeros_like(least)
        if possible.any():
            index, least = index[possible], least[possible]
            needed = (least / self.bound[index]).min() * self.norms[0]
            used = max(int((self.norms >= needed).sum()), 1)
            found[possible] = (self.columns[index] @ self.rows[:used].mT).amax(1)
        return found


def _longest(table: VocabularyTable, columns: int) -> _Longest:
    norms, order = table.rows.norm(dim=-1).float().sort(descending=True, stable=True)
    chosen = table.columns[:columns].float()
    return _Longest(table.rows[order].float(), norms, chosen, chosen.norm(dim=-1) * norms[0])


def forced(first: tuple[int, int, int], second: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """The skip trigrams (source, destination, out) that two of one head force; none if nothing can be exchanged.

    The product of both scores is that of the two forced: they cannot all be large and those small.
    """
    (source, destination, out), (other, elsewhere, also) = first, second
    if source != other or destination == elsewhere or out == also:
        return ()
    return (source, destination, also), (source, elsewhere, out)


def head_circuits(qk: Factored, ov: Factored, embedding: Embedded, readout: Readout) -> HeadCircuits:
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


def eigenvalue_score(eigenvalues: Tensor) -> float:
    """sum lambda / sum |lambda|, 0 where all are 0."""
    size = float(eigenvalues.abs().sum())
    return float(eigenvalues.real.sum()) / size if size else 0.0


def _largest(values: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    found = values.topk(min(count, len(values)))
    return tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))
