"""Which neurons read a subspace, by their weights alone.

The share of a neuron in a subspace with orthonormal directions v_i, along which what it holds varies by s_i, is

    sum_i s_i^2 (v_i . r)^2 / (sum_i s_i^2 |r|^2)

with sums over the rows r by which it reads (gate and up): the weighted overlap of `mainstem.analysis.subspace`. Of a
random row it is 1 / d_model on average, with variance 2 (d sum w^2 - 1) / (d^2 (d + 2)) for weights w that sum to 1.
Readers of one of two subspaces are the neurons with the largest share in it less that in the other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.subspace import Span
from mainstem.errors import LevelRefusedError
from mainstem.experiments.outcome import ExperimentTable
from mainstem.units import Unit
from mainstem.weights.neuron_rows import all_neuron_rows

if TYPE_CHECKING:
    from mainstem.session import Model

READERS = 20
"""How many neurons read each subspace."""

BYSTANDERS = "random"


def shares(reading: Sequence[Float[Tensor, "neuron d_model"]], found: Span) -> Float[Tensor, " neuron"]:
    """The share of each neuron's rows in a subspace; 0 where they are zero."""
    weights = _weights(found)
    rows = torch.stack([one.double() for one in reading])
    inside = ((rows @ found.directions.to(rows).T).square() @ weights.to(rows)).sum(0)
    whole = rows.square().sum((0, 2))
    return torch.where(whole > 0, inside / whole.clamp_min(1e-300), 0.0)


def _weights(found: Span) -> Float[Tensor, " direction"]:
    return found.sizes.square() / found.sizes.square().sum()


def chosen_neurons(
    model: "Model", layers: range, subspaces: dict[str, Span]
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
        name: torch.cat([shares(list(layer.reading.values()), one) for layer in own]).cpu()
        for name, one in subspaces.items()
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
    table = readers_table(model, subspaces, "neurons", found, chosen, [str(unit) for unit in units])
    return {name: [units[i] for i in places.tolist()] for name, places in chosen.items()}, table


def readers_table(
    model: "Model",
    subspaces: dict[str, Span],
    kind: str,
    found: dict[str, Tensor],
    chosen: dict[str, Tensor],
    readers: Sequence[str],
) -> ExperimentTable:
    """The mean share of each chosen group of readers in each subspace."""
    width = model.anatomy.sizes.d_model
    cells = []
    for name, places in chosen.items():
        named = ", ".join(readers[int(i)] for i in places[:3])
        cells.append([name, named, *(float(share[places].mean()) * width for share in found.values())])
    spreads = [
        (2 * (width * float(_weights(one).square().sum()) - 1) / (width + 2)) ** 0.5 for one in subspaces.values()
    ]
    chance = " and ".join(f"{spread:.1f}" for spread in spreads)
    caption = f"mean share of their rows in each subspace, in units of a random row's (whose spread is {chance})"
    return ExperimentTable(
        f"{kind.capitalize()} that read, by weights",
        caption,
        ["of", "the first", *(f"in {name}" for name in found)],
        cells,
    )
