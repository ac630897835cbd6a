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
from mainstem.analysis.parts import Directions, Group, Scores, carry, pull_back, summed
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

    def squares(self, group: Group, centred: bool) -> Float[Tensor, " part"]:
        """Squared norms of the parts as they enter, of their centred form where the norm centres; in chunks."""
        out = []
        for start in range(0, len(group), CHUNK):
            index = torch.arange(start, min(start + CHUNK, len(group)), device=self.base.device)
            vectors = self.vectors(group, index)
            if centred:
                vectors = vectors - vectors.mean(-1, keepdim=True)
            out.append(vectors.pow(2).sum(-1))
        return torch.cat(out)


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
        maps = maps_to(graph, node, run, decomposition.moment.gates)
        nodes = [anatomy.write_nodes[i] for i in indices]
        identity = LinearMap(torch.ones_like(base)[None])
        found[unit] = Entry(base, before, {node: maps[node] or identity for node in nodes})
    return found
