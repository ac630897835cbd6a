"""Attention patterns of each layer under changes of what that layer alone reads: all layers independently.

"Independently" as in LLM.int8() (Dettmers et al. 2022, section 4): each layer reads what it reads in the plain run, so
that a change at one layer is not seen by the next. For each layer the model is run again from that layer's block on,
with what the blocks before it returned (see `mainstem.causal.recorded`, which proves that this is the same), and the
run ends where attention has its queries and keys. Patterns are computed in float32 at least, one head at a time.

Cost: the recording's proof, about four runs of the prompt; then, for each variant and layer, the matrices before
attention and its patterns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.top_mass import pattern_measures
from mainstem.causal.changes import Change, Pass, change_taps
from mainstem.causal.head_changes import received
from mainstem.causal.recorded import RecordedBlocks
from mainstem.causal.zeroed_dimensions import ATTENTION
from mainstem.errors import LevelRefusedError, RunError
from mainstem.model.anatomy import Anatomy, AttentionCore
from mainstem.model.hooks import Site, tapped
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class _Layer:
    """One attention: its sublayer, its block's number (None: in none), and where its matrices read the stream."""

    unit: Unit
    core: AttentionCore
    block: int | None
    sites: frozenset[Site]


class _Seen(Exception):  # noqa: N818 (no error: the run has shown what was wanted)
    """The run is over."""


@torch.no_grad()
def top_attention(
    model: torch.nn.Module,
    anatomy: Anatomy,
    ids: Int[Tensor, "1 pos"],
    variants: Mapping[str, Sequence[Change]],
    **forward: Any,
) -> Iterator[tuple[list[Unit], dict[str, Float[Tensor, "n_heads measure"]]]]:
    """Layer by layer its heads, and for each variant their measures (see `mainstem.analysis.top_mass`).

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        ids: a prompt.
        variants: changes by name; of these each layer gets those at its own query, key and value matrices.
        forward: further arguments of the forward call.

    Raises:
        LevelRefusedError: if no attention can be taken apart.
    """
    layers = list(_layers(anatomy))
    if not layers:
        raise LevelRefusedError("No attention patterns", reason="the model has no attention that can be taken apart")
    later = {site for layer in layers for site in (layer.core.site, *layer.sites) if site.call}
    blocks = RecordedBlocks(model, anatomy, ids, ids.shape[1] - 1, later, **forward)
    for layer in layers:
        regular = _patterns(blocks, layer, ())
        heads = [Unit.head(layer.unit.layer or 0, head, layer.unit.nth) for head in range(layer.core.n_heads)]
        found = {}
        for name, changes in variants.items():
            own = [change for change in changes if change.site in layer.sites]
            patterns = _patterns(blocks, layer, own) if own else regular
            found[name] = torch.stack([pattern_measures(p, r) for p, r in zip(patterns, regular, strict=True)])
        yield heads, found


def _layers(anatomy: Anatomy) -> Iterator[_Layer]:
    seen: set[Site] = set()
    for index, write in enumerate(anatomy.writes):
        core = write.attention
        if core is None or core.site in seen:
            continue
        seen.add(core.site)
        block = next((block.layer for block in anatomy.blocks if index in block.writes), None)
        reads = [r for r in anatomy.reads if r.unit == write.unit and not ATTENTION.isdisjoint(r.roles)]
        yield _Layer(write.unit, core, block, frozenset(read.input_site for read in reads))


def _patterns(blocks: RecordedBlocks, layer: _Layer, changes: Sequence[Change]) -> list[Float[Tensor, "pos source"]]:
    """The patterns of one layer's heads in a run in which only that layer's block is computed, and to attention."""
    core, now = layer.core, Pass(1, blocks.ids.shape[1])
    skipped = layer.block if layer.block is not None and blocks.fault is None else 0
    kept: list[Tensor] = []

    def seen(leaves: list[Any]) -> None:
        operands = received(core, leaves, now.batch, now.positions)
        kept.extend(operands.of("pattern", 0, head, core.n_heads) for head in range(core.n_heads))
        raise _Seen

    moved = [replace(change, site=blocks.site(change.site, skipped)) for change in changes]
    taps = [*change_taps(moved, now), (blocks.site(core.site, skipped), seen)]
    computed = [int(i >= skipped) for i in range(len(blocks.calls))]
    try:
        with blocks.skipping(computed), tapped(blocks.model, taps):
            blocks.model(input_ids=blocks.ids, **blocks.forward)
    except _Seen:
        return kept
    raise RunError("Attention was not reached", str(layer.unit))
