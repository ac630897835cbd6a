"""Neurons of routed experts, changed: what they wrote is taken off their sublayer's write, what they shall is added.

An expert's neuron has no place of its own in a run, because routing differs from token to token. So the module that
sums over experts is recorded while it runs, and the sum is corrected where it enters the stream. Tokens that were not
routed to the expert stay as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import New, Pass, Places, copied_by_token
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy
from mainstem.model.experts import ExpertParts, expert_parts, find_sum
from mainstem.model.hooks import Site, Tap
from mainstem.model.recorder import recorded_call


@dataclass(frozen=True, eq=False)
class ExpertChange:
    """What becomes of a neuron's activation: `new` of [pos, 1]."""

    write: int
    expert: int
    neuron: int
    new: New
    positions: Places = None
    row: int | None = None


@contextmanager
def expert_taps(
    model: torch.nn.Module, anatomy: Anatomy, changes: Iterable[ExpertChange], now: Pass
) -> Iterator[list[tuple[Site, Tap]]]:
    """Records the sums over experts that are changed, and gives the taps that make the changes."""
    by_write: dict[int, list[ExpertChange]] = {}
    for change in changes:
        by_write.setdefault(change.write, []).append(change)
    with ExitStack() as stack:
        taps = []
        for index, own in by_write.items():
            write, made = anatomy.writes[index], list[Tensor]()
            site = write.experts
            assert site is not None

            def done(recording, frame, site=site, own=own, made=made) -> None:
                made.append(_correction(expert_parts(find_sum(recording, frame, site)), own, now))

            stack.enter_context(recorded_call(model, site.path, site.call, done))
            taps.append((write.site, _correcting(write.site, str(write.unit), made, now)))
        yield taps


def _correcting(site: Site, name: str, made: list[Tensor], now: Pass) -> Tap:
    def tap(leaves):
        if not made:
            raise LevelRefusedError("Experts' neurons cannot be edited", name, "their sum is seen in its module only")
        out, tokens = copied_by_token(leaves[site.slot], site, now)
        tokens += made.pop().view(tokens.shape).to(tokens)
        new = list(leaves)
        new[site.slot] = out
        return new

    return tap


def _correction(parts: ExpertParts, changes: Sequence[ExpertChange], now: Pass) -> Float[Tensor, "token d_model"]:
    """What is added to the sum, float64; tokens are batch and positions made flat."""
    total = torch.zeros_like(parts.constant, dtype=torch.float64)
    by_neuron: dict[tuple[int, int], list[ExpertChange]] = {}
    for change in changes:
        by_neuron.setdefault((change.expert, change.neuron), []).append(change)
    for (expert, neuron), own in by_neuron.items():
        for rows in parts.rows:
            for row in torch.nonzero(rows.expert == expert).flatten().tolist():
                weight = rows.weight[:, row].double()
                if weight.any():
                    old = rows.hidden[row, neuron].double().expand(len(weight), 1)
                    column = rows.of(row)[:, neuron].double()
                    total += weight[:, None] * (_changed(old, own, now) - old) * column
    return total


def _changed(old: Float[Tensor, "token 1"], changes: Sequence[ExpertChange], now: Pass) -> Float[Tensor, "token 1"]:
    """A neuron's activation after all its changes, in their order."""
    new = old.clone()
    for change in changes:
        for row in now.rows(change.row):
            places, indices = now.find(row, change.positions)
            if len(places):
                tokens = (row * now.positions + indices).to(new.device)
                new[tokens] = change.new(new[tokens], places)
    return new
