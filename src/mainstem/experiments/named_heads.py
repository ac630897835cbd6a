"""Which sides of heads read a subspace, by their weights alone: their queries, keys and values.

The share of a side in a subspace is that of `mainstem.experiments.named_readers`, with sums over the d_head rows by
which the side reads the stream. What a side receives in a run is these rows times the normed stream, so that its change
can be had from the stream that enters its block. Limits: attention that reads anything else than what enters its block
is left out; heads that share keys or values are one side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.subspace import Span
from mainstem.errors import LevelRefusedError
from mainstem.experiments.named_readers import BYSTANDERS, readers_table, shares
from mainstem.experiments.outcome import ExperimentTable
from mainstem.model.norms import Norm
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model

SIDES = 5
"""How many sides of heads read each subspace."""


@dataclass(frozen=True, eq=False)
class HeadSide:
    """One side of one head."""

    head: Unit
    role: str
    rows: Float[Tensor, "d_head d_model"]
    norm: Norm | None

    def __str__(self) -> str:
        return f"{self.head} {self.role}"

    def received(self, stream: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch d_head"]:
        """What the side gets of the stream that enters its block, biases left out."""
        scale = 1.0 if self.norm is None else self.norm.scale(stream)
        return (stream * scale) @ self.rows.T

    def change(self, plain: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> float:
        """The root mean square of what another run adds, given both runs' streams that enter the blocks."""
        layer = self.head.layer or 0
        return float((self.received(other[layer]) - self.received(plain[layer])).square().mean().sqrt())


def chosen_heads(
    model: "Model", layers: range, subspaces: dict[str, Span]
) -> tuple[dict[str, list[HeadSide]], list[ExperimentTable]]:
    """The readers of two subspaces among the sides of some blocks' heads, as many others at random, and their shares.

    There are none where the blocks have too few sides.
    """
    sides = [side for layer in layers for side in _sides(model, layer)]
    if len(sides) < 3 * SIDES:
        return {}, []
    found = {
        name: torch.cat([shares(list(side.rows[:, None]), one) for side in sides]) for name, one in subspaces.items()
    }
    first, second = found
    order = (found[first] - found[second]).argsort(descending=True)
    between = order[SIDES:-SIDES]
    generator = torch.Generator().manual_seed(model.seed)
    chosen = {
        first: order[:SIDES],
        second: order[-SIDES:].flip(0),
        BYSTANDERS: between[torch.randperm(len(between), generator=generator)[:SIDES]],
    }
    table = readers_table(model, subspaces, "heads", found, chosen, [str(side) for side in sides])
    return {name: [sides[i] for i in places.tolist()] for name, places in chosen.items()}, [table]


def _sides(model: "Model", layer: int) -> list[HeadSide]:
    """Those of the heads of a block that read what enters it."""
    weights, anatomy, found = model.weights, model.anatomy, []
    for head in (head for head in weights.heads if head.layer == layer):
        for role in ("query", "key", "value"):
            read = next((r for r in anatomy.reads if r.unit == head.sublayer and role in r.roles), None)
            if read is None or read.stream_node != anatomy.blocks[layer].input_node:
                continue
            try:
                rows = getattr(weights, role)(head).cpu()
            except LevelRefusedError:
                continue
            if not any(side.role == role and torch.equal(side.rows, rows) for side in found):
                found.append(HeadSide(head, role, rows, read.norm))
    return found
