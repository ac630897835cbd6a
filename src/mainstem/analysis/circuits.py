"""Circuits as sets of edges between writers and readers: the best of a size, and what of them is connected.

An edge is connected if information can get through it from an embedding to the logits along edges of the circuit. The
circuit of at most k edges is the connected part of the longest beginning of the edges' ranking, by absolute score, of
which no more than k are connected: it grows with k, and holds no edge that does nothing.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Edges = Bool[Tensor, "writer reader"]


@dataclass(frozen=True, eq=False)
class Wiring:
    """What edges there can be, and how readers feed writers.

    Attributes:
        exists: between which writers and readers there can be an edge.
        feeds: which writers a reader is an input of.
        begins: the embeddings.
        ends: the logits.
    """

    exists: Edges
    feeds: Bool[Tensor, "reader writer"]
    begins: Bool[Tensor, " writer"]
    ends: Bool[Tensor, " reader"]

    def connected(self, edges: Edges) -> Edges:
        """The edges on a path from an embedding to the logits."""
        reached, used = self.begins, self.ends
        while True:
            more = self.begins | (self.feeds & (edges & reached[:, None]).any(0)[:, None]).any(0)
            if torch.equal(more, reached):
                break
            reached = more
        while True:
            more = self.ends | (self.feeds & (edges & used).any(1)).any(1)
            if torch.equal(more, used):
                break
            used = more
        return edges & reached[:, None] & used


def best_edges(wiring: Wiring, scores: Float[Tensor, "writer reader"], size: int) -> Edges:
    """The circuit of at most `size` edges."""
    order = scores.abs().masked_fill(~wiring.exists, 0).flatten().sort(descending=True, stable=True)
    least, most = 0, int((order.values > 0).sum())

    def beginning(count: int) -> Edges:
        chosen = torch.zeros(scores.numel(), dtype=torch.bool)
        chosen[order.indices[:count]] = True
        return wiring.connected(chosen.view(scores.shape))

    while least < most:
        middle = (least + most + 1) // 2
        if int(beginning(middle).sum()) <= size:
            least = middle
        else:
            most = middle - 1
    return beginning(least)


def best_nodes(wiring: Wiring, scores: Float[Tensor, " writer"], size: int) -> Edges:
    """All edges among the embeddings' and other writers' `size` best by absolute score, and to the logits."""
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    ranked = scores.abs().sort(descending=True, stable=True)
    chosen[ranked.indices[:size]] = True
    chosen &= scores != 0
    return among(wiring, chosen)


def among(wiring: Wiring, writers: Bool[Tensor, " writer"]) -> Edges:
    """All edges between some writers, and from them to the logits."""
    readers = wiring.ends | (wiring.feeds & writers).any(1)
    return wiring.exists & writers[:, None] & readers


def members(wiring: Wiring, edges: Edges) -> Bool[Tensor, " writer"]:
    """The writers that some edge begins or ends at."""
    return edges.any(1) | (wiring.feeds & edges.any(0)[:, None]).any(0)
