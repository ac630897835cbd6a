"""Where a sublayer's parts enter the stream, and what the stream was before: the base of scores that are not linear.

The log-probability increase of a part is measured by adding it, as it enters, to the stream value that its sublayer
reads: resid_pre for attention and the stream between attention and FFN for FFN in sequential blocks (Yu et al. 2023,
the two Imp definitions), resid_pre for both in parallel blocks. A part enters at the addition, through whatever stands
between its sublayer and that addition (a norm after the sublayer, a multiplier, a gate).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Directions, Group, Rows, Scores, carry, pull_back, scalar_of, summed
from mainstem.model.graph import LinearMap, maps_to
from mainstem.model.spine import latest_writes
from mainstem.units import Unit

CHUNK = 8192


@dataclass(frozen=True, eq=False)
class Entry:
    """`base` [d_model] float64: the stream that the sublayer read; `tails`: from each of its writes to the addition."""

    base: Float[Tensor, " d_model"]
    base_node: int
    tails: Mapping[int, LinearMap]

    def vectors(self, group: Group, index: Tensor) -> Float[Tensor, "top d_model"]:
        """The chosen parts as they enter the stream."""
        return summed([carry(self.tails[piece.node], piece.raw(index)) for piece in group.pieces])

    def directions(self, group: Group, index: Tensor) -> Float[Tensor, "top d_model"]:
        """What the coefficients of the chosen parts multiply, as it enters the stream."""
        return summed([carry(self.tails[piece.node], piece.directions(index)) for piece in group.pieces])

    def dot(self, group: Group, direction: Directions) -> Scores:
        """Inner products of the parts, as they enter, with a direction or several."""
        return summed([piece.raw_dot(pull_back(self.tails[piece.node], direction)) for piece in group.pieces])

    def squares(self, group: Group, rows: Rows | None, dtype: torch.dtype) -> Float[Tensor, " part"]:
        """Squared lengths, float64, of the parts as they enter, behind a linear map of rows (None: as they are)."""
        if len(group.pieces) > 1:
            return self._squares_of_vectors(group, rows)
        tail = self.tails[group.node]
        factor = scalar_of(tail)
        if factor is not None:
            return group.raw_squares(rows, dtype) * factor**2
        return group.raw_squares(lambda vectors: _mapped(rows, _carried(tail, vectors)), dtype)

    def _squares_of_vectors(self, group: Group, rows: Rows | None) -> Float[Tensor, " part"]:
        """The same for parts in several pieces, from their vectors, in chunks."""
        places = torch.arange(len(group), device=self.base.device).split(CHUNK)
        return torch.cat([_mapped(rows, self.vectors(group, index)).pow(2).sum(-1) for index in places])


def _mapped(rows: Rows | None, vectors: Tensor) -> Tensor:
    return vectors if rows is None else rows(vectors)


def _carried(tail: LinearMap, vectors: Float[Tensor, "part d_model"]) -> Float[Tensor, "part d_model"]:
    """As `carry`, in the dtype of the vectors."""
    out = torch.zeros_like(vectors) if tail.diag is None else vectors * tail.diag[0].to(vectors)
    if tail.left is not None and tail.right is not None:
        out = out + (vectors @ tail.right[0].to(vectors)) @ tail.left[0].to(vectors).T
    return out


def entries(decomposition: Decomposition) -> dict[Unit, Entry]:
    """The entry of every sublayer and embedding."""
    anatomy, run = decomposition.moment.anatomy, decomposition.evaluated
    graph = anatomy.graph
    latest = latest_writes(graph)
    reads: dict[Unit, int] = {}
    for read in anatomy.reads:
        reads.setdefault(read.unit, read.stream_node)
    found: dict[Unit, Entry] = {}
    for unit in anatomy.sublayers():
        indices = anatomy.writes_of(unit)
        place = next(i for i, node in enumerate(anatomy.spine) if latest[node] >= max(indices))
        node = anatomy.spine[place]
        before = reads.get(unit, anatomy.spine[max(place - 1, 0)])
        base = run.values[before][0].double()
        if unit.kind == "embedding" and place == 0:
            base = torch.zeros_like(base)
        nodes = [anatomy.write_nodes[i] for i in indices]
        maps = maps_to(graph, node, run, decomposition.moment.gates, start=min(nodes))
        identity = LinearMap(torch.ones_like(base)[None])
        found[unit] = Entry(base, before, {node: maps[node] or identity for node in nodes})
    return found
