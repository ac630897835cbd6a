"""Which neurons read a subspace, by their weights alone.

The share of a neuron in a subspace with orthonormal rows V is sum |V r|^2 / sum |r|^2 over the rows r by which it reads
(gate and up). Readers of one of two subspaces are those with the largest share in it less that in the other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.subspace import expected_overlap
from mainstem.errors import LevelRefusedError
from mainstem.experiments.outcome import ExperimentTable
from mainstem.units import Unit
from mainstem.weights.neuron_rows import all_neuron_rows

if TYPE_CHECKING:
    from mainstem.session import Model

READERS = 20
"""How many neurons read each subspace."""

BYSTANDERS = "random neurons"


def shares(
    reading: Sequence[Float[Tensor, "neuron d_model"]], directions: Float[Tensor, "direction d_model"]
) -> Float[Tensor, " neuron"]:
    """The share of each neuron's rows that lies in a subspace; 0 where they are zero."""
    inside = sum((rows.double() @ directions.double().T).square().sum(1) for rows in reading)
    whole = sum(rows.double().square().sum(1) for rows in reading)
    assert isinstance(inside, Tensor) and isinstance(whole, Tensor)
    return torch.where(whole > 0, inside / whole.clamp_min(1e-300), 0.0)


def chosen_neurons(
    model: "Model", layers: range, subspaces: dict[str, Float[Tensor, "direction d_model"]]
) -> tuple[dict[str, list[Unit]], ExperimentTable]:
    """The readers of two subspaces among some blocks' neurons, and as many others at random; with a table of shares.

    Raises:
        LevelRefusedError: if these blocks have too few neurons whose rows are to be had.
    """
    rows, notes = all_neuron_rows(model)
    own = [layer for unit, layer in rows.items() if unit.layer in layers]
    units = [layer.address(place) for layer in own for place in range(len(layer.writing))]
    if len(units) < 4 * READERS:
        raise LevelRefusedError("No neurons that could read", f"blocks {layers.start} to {layers.stop - 1}",
                                "; ".join(notes) or f"they have {len(units)}")  # fmt: skip
    found = {
        name: torch.cat([shares(list(layer.reading.values()), directions.to(layer.writing)) for layer in own]).cpu()
        for name, directions in subspaces.items()
    }
    first, second = found
    order = (found[first] - found[second]).argsort(descending=True)
    generator = torch.Generator().manual_seed(model.seed)
    between = order[READERS:-READERS]
    chosen = {
        first: order[:READERS],
        second: order[-READERS:].flip(0),
        BYSTANDERS: between[torch.randperm(len(between), generator=generator)[:READERS]],
    }
    return {name: [units[i] for i in places.tolist()] for name, places in chosen.items()}, _table(
        model, subspaces, found, chosen, units
    )


def _table(
    model: "Model",
    subspaces: dict[str, Tensor],
    found: dict[str, Tensor],
    chosen: dict[str, Tensor],
    units: Sequence[Unit],
) -> ExperimentTable:
    cells = []
    for name, places in chosen.items():
        named = ", ".join(str(units[i]) for i in places[:3].tolist())
        cells.append([name, named, *(float(share[places].mean()) for share in found.values())])
    width, size = model.anatomy.sizes.d_model, len(next(iter(subspaces.values())))
    mean, spread = expected_overlap(1, size, width)
    caption = f"mean share of their rows in each subspace; {mean:.3f} ± {spread:.3f} for a row and a random subspace"
    return ExperimentTable("Readers by weights", caption, ["of", "the first", *(f"in {name}" for name in found)], cells)
