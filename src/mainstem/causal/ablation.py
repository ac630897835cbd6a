"""Units taken out of a run: attention neurons, FFN neurons and experts' neurons, many runs as rows of one batch.

A neuron is an entry of what its sublayer's output matrix reads (for attention, a coordinate of a head's value summed
over sources), so the entry is set there, in the run itself: what later layers compute changes with it. An expert's
neuron has no such place, because routing differs from token to token; what it writes in that very run is taken off its
sublayer's write. Whole heads and sublayers are the sets of their neurons.

Each batch begins with an unchanged row, which must be the run that the prompt gets alone; for a model that mixes rows
every run is made by itself. Where many runs will be asked for, those that change nothing before the destination begin
there: the positions before it are computed once (`mainstem.causal.replay`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.changes import Change, Pass, Places, change_taps, set_to
from mainstem.causal.expert_changes import ExpertChange, expert_taps
from mainstem.causal.replay import Replay
from mainstem.causal.row_batches import BATCH_ENTRIES, alike
from mainstem.errors import LevelRefusedError, UnitError, UsageError
from mainstem.model.anatomy import Anatomy, Write
from mainstem.model.hooks import Site, tapped
from mainstem.model.outputs import logits_of
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
        raise UnitError(f"The model has no neuron {unit}", None, "`mainstem anatomy` says how many each sublayer has.")


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


class AblatedRuns:
    """Runs of one prompt, each with some units taken out.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        input_ids: [1, pos] the prompt.
        position: the destination whose logits are wanted, from 0.
        many: whether so many runs will be asked for that recording the prompt pays, which costs about five of them.
        forward: further arguments of the forward call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        anatomy: Anatomy,
        input_ids: Tensor,
        position: int,
        many: bool = False,
        **forward: Any,
    ) -> None:
        self.model, self.anatomy, self.ids, self.position, self.forward = model, anatomy, input_ids, position, forward
        self.many = many
        self.clean = self._run([Ablation()])[0]
        self.mixes_rows = False

    def logits(self, ablations: Sequence[Ablation]) -> Float[Tensor, "run d_vocab"]:
        """The logits at the destination, one row for each ablation."""
        late = [i for i, made in enumerate(ablations) if made.entries and not made.experts and not made.everywhere]
        if not (late and self.many and self._replay):
            return self._whole(ablations)
        rest = [i for i in range(len(ablations)) if i not in set(late)]
        rows = dict(zip(rest, self._whole([ablations[i] for i in rest]), strict=True))
        for batch, found in self._replay.logits({i: self._changes(ablations[i]) for i in late}):
            rows |= dict(zip(batch, found, strict=True))
        return torch.stack([rows[i] for i in range(len(ablations))])

    @cached_property
    def _replay(self) -> Replay | None:
        """What runs are made by that change nothing before the destination; None where that takes too much memory."""
        sites = [write.source for write in self.anatomy.writes if write.source and (write.attention or write.neurons)]
        try:
            return Replay(self.model, self.anatomy, self.ids, self.position, dict.fromkeys(sites), **self.forward)
        except UsageError:
            return None

    def _whole(self, ablations: Sequence[Ablation]) -> Float[Tensor, "run d_vocab"]:
        """The same by forwards of the whole prompt."""
        size = max(1, BATCH_ENTRIES // (self.ids.shape[1] * self.clean.numel()) - 2)
        out = []
        for start in range(0, len(ablations), size):
            chunk = list(ablations[start : start + size])
            if not self.mixes_rows:
                rows = self._run([Ablation(), *chunk, Ablation()])
                self.mixes_rows = not (alike(rows[0], self.clean) and alike(rows[-1], self.clean))
                found = rows[1:-1]
            if self.mixes_rows:
                found = torch.cat([self._run([ablation]) for ablation in chunk])
            out.append(found)
        return torch.cat(out) if out else self.clean[:0]

    @torch.no_grad()
    def _run(self, ablations: list[Ablation]) -> Tensor:
        now = Pass(len(ablations), self.ids.shape[1])
        changes: list[Change] = []
        experts: list[ExpertChange] = []
        for row, ablation in enumerate(ablations):
            changes += self._changes(ablation, row)
            for write, neurons in ablation.experts.items():
                where = self._where(ablation)
                experts += [ExpertChange(write, *neuron, set_to(0.0), where, row) for neuron in neurons]
        ids = self.ids.expand(now.batch, -1).contiguous()
        with (
            expert_taps(self.model, self.anatomy, experts, now) as taps,
            tapped(self.model, [*change_taps(changes, now), *taps]),
        ):
            return logits_of(self.model(input_ids=ids, **self.forward))[:, self.position].clone()

    def _changes(self, ablation: Ablation, row: int | None = None) -> list[Change]:
        """What an ablation sets, experts' neurons left out."""
        changes = []
        for site, entries in ablation.entries.items():
            value = ablation.values.get(site)
            new = set_to(0.0 if value is None else value[entries.to(value.device)])
            changes.append(Change(site, new, self._where(ablation), entries, row))
        return changes

    def _where(self, ablation: Ablation) -> Places:
        return None if ablation.everywhere else (self.position,)
