"""Units taken out of a run: attention neurons, FFN neurons and experts' neurons, many runs as rows of one batch.

A neuron is an entry of what its sublayer's output matrix reads (for attention, a coordinate of a head's value summed
over sources), so the entry is set there, in the run itself: what later layers compute changes with it. An expert's
neuron has no such place, because routing differs from token to token; what it writes in that very run is taken off its
sublayer's write. Whole heads and sublayers are the sets of their neurons.

Each batch begins with an unchanged row, which must be the run that the prompt gets alone; for a model that mixes rows
every run is made by itself. Where many runs will be asked for, those that change nothing before the destination begin
there: the positions before it are computed once (`mainstem.causal.replay`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import Change, Pass, Places, change_taps, set_to
from mainstem.causal.expert_changes import ExpertChange, expert_taps
from mainstem.causal.neuron_map import Ablation
from mainstem.causal.replay import Replay
from mainstem.causal.row_batches import BATCH_ENTRIES, alike
from mainstem.errors import UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import tapped
from mainstem.model.outputs import logits_of


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
