"""Linear maps of the stream from the weights alone: every norm's scale is one, and factors of a run are refused."""

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Write
from mainstem.model.graph import Evaluated, Gate, LinearMap, StreamGraph

GATED = "the run itself computes a factor of it"


class RunGates(dict[Gate, Tensor]):
    """Factors that only a run has: not a number, so that they are seen in the map."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __missing__(self, gate: Gate) -> Tensor:
        return torch.full((1, 1), torch.nan, dtype=torch.float64, device=self.device)


def scaleless(graph: StreamGraph, d_model: int, device: torch.device) -> Evaluated:
    """A run in which every norm's scale is one."""
    zero = torch.zeros(1, d_model, dtype=torch.float64, device=device)
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    count = len(graph.nodes)
    return Evaluated([zero] * count, [None] * count, [one] * count)


def known(found: LinearMap, where: str) -> LinearMap:
    """The map, if no factor of a run is in it.

    Raises:
        LevelRefusedError: if one is; `where` names the unit.
    """
    parts = [part for part in (found.diag, found.left, found.right) if part is not None]
    if any(bool(part.isnan().any()) for part in parts):
        raise LevelRefusedError("No weights", where, f"{GATED} on its way between the stream and its matrix")
    return found


def chosen_columns(write: Write, chosen: Tensor | slice) -> Float[Tensor, "d_model column"]:
    """Columns of a projection in float64: only those that were chosen are ever widened."""
    assert write.projection is not None
    first, *rest = write.projection.factors
    index = chosen.to(first.device) if isinstance(chosen, Tensor) else chosen
    columns = first.detach()[:, index].double()
    for factor in rest:
        wide = factor.detach().double()
        columns = wide @ columns if wide.dim() == 2 else columns * wide[:, None]
    return columns
