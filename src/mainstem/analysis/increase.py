"""The log-probability increase of single units, by definition (Yu et al. 2023; Yu and Ananiadou, EMNLP 2024).

Imp(v) = log p(w | x + v) - log p(w | x), x the stream that the unit's sublayer read (see `bases`). Under the frozen
norm both sides use the final stream's scale, as in the method's published code; under `recompute` each has its own.
"""

import torch

from mainstem.analysis.attribution import Scored
from mainstem.analysis.bases import Entry, entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.readout import NormConvention, frozen_scale, log_probability, logits_of
from mainstem.targets import Target
from mainstem.units import Unit


def increases(
    decomposition: Decomposition, values: list[Scored], target: Target, norm: NormConvention = "frozen"
) -> list[float]:
    """The log-probability increase of each of a few units, in nats."""
    if not values:
        return []
    readout = decomposition.moment.anatomy.readout
    scale = frozen_scale(readout, decomposition.moment.stream) if norm == "frozen" else None
    places: dict[Unit, Entry] = entries(decomposition)
    used = [places[value.group.sublayer or value.unit] for value in values]
    nodes = list(dict.fromkeys(entry.base_node for entry in used))
    bases = torch.stack([next(e.base for e in used if e.base_node == node) for node in nodes])
    before = dict(zip(nodes, log_probability(logits_of(readout, bases, scale), target).tolist(), strict=True))
    device = bases.device
    added = torch.stack(
        [
            entry.base + entry.vectors(value.group, torch.tensor([value.index], device=device))[0]
            for entry, value in zip(used, values, strict=True)
        ]
    )
    after = log_probability(logits_of(readout, added, scale), target).tolist()
    return [a - before[entry.base_node] for a, entry in zip(after, used, strict=True)]
