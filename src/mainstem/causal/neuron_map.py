"""Where the neurons of a model are, and what is taken out of a run: attention neurons, FFN neurons, experts' neurons.

A neuron is an entry of what its sublayer's output matrix reads (for attention, a coordinate of a head's value summed
over sources). Whole heads and sublayers are the sets of their neurons. An expert's neuron has no such place, because
routing differs from token to token, and is named by its expert.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import LevelRefusedError, UnitError
from mainstem.model.anatomy import Anatomy, Write
from mainstem.model.hooks import Site
from mainstem.units import Unit

Values = Mapping[Site, Float[Tensor, " d_in"]]
ExpertNeuron = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Ablation:
    """What is taken out of one run.

    Attributes:
        entries: for each site the entries that are set.
        values: what they are set to, for all entries of each site; zero where a site is not named.
        experts: experts' neurons to take out, (expert, neuron), for each write that is a sum over experts.
        everywhere: at all positions, instead of at the destination alone.
    """

    entries: Mapping[Site, Int[Tensor, " neuron"]] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    experts: Mapping[int, tuple[ExpertNeuron, ...]] = field(default_factory=dict)
    everywhere: bool = False


class NeuronMap:
    """Where each neuron of a model is read: sites and entries by address."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._writes: dict[tuple[int | None, int, str], list[int]] = {}
        for i, write in enumerate(anatomy.writes):
            self._writes.setdefault((write.unit.layer, write.unit.nth, write.unit.place), []).append(i)

    def ablation(self, units: Iterable[Unit], values: Values | None = None, everywhere: bool = False) -> Ablation:
        """The ablation of these units.

        Raises:
            UnitError: if the model has no such unit, or it is neither a neuron nor made of neurons.
            LevelRefusedError: if its sublayer's neurons cannot be had.
        """
        entries: dict[Site, list[int]] = {}
        experts: dict[int, list[ExpertNeuron]] = {}
        for unit in units:
            for index, found in self.places(unit):
                write = self.anatomy.writes[index]
                if write.experts is not None:
                    assert unit.expert is not None and unit.neuron is not None
                    experts.setdefault(index, []).append((unit.expert, unit.neuron))
                else:
                    assert write.source is not None
                    entries.setdefault(write.source, []).extend(found)
        return Ablation(
            {site: torch.tensor(sorted(set(own))) for site, own in entries.items()},
            values or {},
            {index: tuple(dict.fromkeys(own)) for index, own in experts.items()},
            everywhere,
        )

    def all_but(self, kept: Ablation, values: Values | None = None) -> Ablation:
        """The ablation of every attention and FFN neuron that `kept` leaves out (not experts' neurons)."""
        out: dict[Site, Tensor] = {}
        for write in self.anatomy.writes:
            if write.source is None or write.source in out or not (write.attention or write.neurons):
                continue
            assert write.projection is not None
            mask = torch.ones(write.projection.n_in, dtype=torch.bool)
            if write.source in kept.entries:
                mask[kept.entries[write.source]] = False
            out[write.source] = mask.nonzero().flatten()
        return Ablation(out, values or {}, {}, kept.everywhere)

    def places(self, unit: Unit) -> list[tuple[int, list[int]]]:
        """For each write that a unit is read by, its number and the entries of what its matrix reads.

        Raises:
            UnitError, LevelRefusedError: as `ablation`.
        """
        indices = self._writes.get((unit.layer, unit.nth, unit.place), [])
        found = [(i, own) for i in indices if (own := _entries(self.anatomy.writes[i], unit)) is not None]
        if unit.kind == "sublayer" and any(self.anatomy.writes[i].experts is not None for i in indices):
            raise LevelRefusedError(
                "A whole sublayer of experts cannot be taken out", str(unit), "experts are chosen token by token"
            )
        if found:
            return found
        if not indices:
            layers = [block.layer for block in self.anatomy.blocks]
            raise UnitError(
                f"The model has no unit {unit}", None, f"Its layers go from {min(layers)} to {max(layers)}."
            )
        refusals = self.anatomy.writes[indices[0]].refusals
        level = "attention_neurons" if unit.place == "attn" else "neurons"
        if level in refusals:
            raise LevelRefusedError(f"No {level.replace('_', ' ')} at {unit.sublayer}", reason=refusals[level])
        kind = "head" if unit.kind == "head" else "neuron"
        raise UnitError(f"The model has no {kind} {unit}", None, "`mainstem anatomy` says how many each sublayer has.")


def _entries(write: Write, unit: Unit) -> list[int] | None:
    """The entries of what a write's matrix reads that a unit is; None if it is no part of this write."""
    whole = unit.kind == "sublayer"
    if write.experts is not None:
        own = unit.kind == "expert_neuron" and not unit.shared
        return [] if own and (unit.expert or 0) < write.n_experts and (unit.neuron or 0) < write.expert_width else None
    if write.source is None:
        return None
    if write.attention is not None:
        channels = write.attention.channels
        if whole:
            return channels.reshape(-1).tolist()
        if unit.source is not None or unit.head_index is None or unit.head_index >= len(channels):
            return None
        own = channels[unit.head_index]
        if unit.neuron is None:
            return own.tolist()
        return [int(own[unit.neuron])] if unit.neuron < len(own) else None
    if not write.neurons or write.projection is None:
        return None
    width = write.projection.n_in
    if whole:
        return list(range(width))
    if unit.neuron is None or (write.shared_expert, unit.shared) != (unit.expert, unit.expert is not None):
        return None
    place = unit.neuron - write.first_neuron
    return [place] if 0 <= place < width else None
