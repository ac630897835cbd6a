"""One run of a model with everything kept that its anatomy names.

Large writes are kept by reference, and so are keys and values where nothing else lies in their memory; small writes
are copied, and of keys and values that are repeated for several heads the distinct ones. What is needed at the asked
destinations alone (query rows, pattern rows, what W_O reads, neurons' activations, results of reads) is copied row by
row, so no tensor of positions x positions is held for longer than a few sublayers. A tensor that the model later
changes in place is copied when it is seen.

Cost: hooks of modules that hold kept values, and what `function_taps` needs in those of attention; see `make bench`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.model.anatomy import Anatomy, AttentionCore, ExpertSite, Write
from mainstem.model.expert_reads import ReadRows, read_rows
from mainstem.model.expert_rows import ExpertRows
from mainstem.model.experts import ExpertParts, expert_parts, find_sum
from mainstem.model.graph import Gate, gates_of
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.model.recorder import recorded_call
from mainstem.model.views import heads_first, pattern_rows, query_rows
from mainstem.run.keeper import Arrange, Keeper, Store, copy_of

Rows = Callable[[Tensor, str, dict[str, int], int], Tensor]


@dataclass(eq=False)
class AttentionRun:
    """What one attention product received: values (and keys) at all sources, the rest at the destinations.

    Attributes:
        value: [batch, n_key_value_heads, source, d_head].
        key: the same for keys, None where the pattern itself was seen.
        query: [batch, n_heads, destination, d_key] or None.
        mask: [batch, 1 or n_heads, destination, source], boolean or added to the scores; or None.
        pattern: [batch, n_heads, destination, source] where the model computed it itself.
        gates: for each gated step, [batch, destination, entries].
    """

    value: Tensor | None = None
    key: Tensor | None = None
    query: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    scaling: float | None = None
    pattern: Tensor | None = None
    gates: dict[Site, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Captured:
    """Everything kept of one run; rows of "destination" are those of `destinations` [batch, n].

    `order` is the order in which the writes were seen; `reads` and `block_inputs` are empty if they were not asked for.
    """

    destinations: Tensor
    writes: list[Tensor]
    stream: Tensor
    logits: Tensor
    gates: dict[Gate, Tensor]
    sources: dict[int, Tensor]
    attention: dict[Site, AttentionRun]
    experts: dict[ExpertSite, list[ExpertParts]]
    expert_reads: dict[ExpertSite, list[list[ReadRows]]]
    reads: list[Tensor]
    block_inputs: list[Tensor]
    order: list[int]


@torch.inference_mode(False)  # of a caller: there nothing tells what is changed in place
@torch.no_grad()
def capture(
    model: torch.nn.Module,
    anatomy: Anatomy,
    input_ids: Int[Tensor, "batch pos"],
    destinations: Int[Tensor, "batch destination"],
    edits: Sequence[tuple[Site, Tap]] = (),
    reads: bool = True,
    **forward,
) -> Captured:
    """Runs the model on `input_ids` and keeps what the anatomy names.

    Args:
        model: the module that the anatomy was discovered in.
        anatomy: its anatomy.
        input_ids: token ids.
        destinations: for each row of the batch the positions whose rows are wanted.
        edits: taps that change the run; what is kept is what was there after them.
        reads: whether the results of reads and the stream that enters each block are wanted, for their certificate.
        forward: further arguments of the forward call (attention mask, position ids).
    """
    keeper = Keeper(input_ids.shape[1], destinations)
    out = Captured(destinations, [], torch.empty(0), torch.empty(0), {}, {}, {}, {}, {}, [], [], [])
    out.writes = [torch.empty(0)] * len(anatomy.writes)
    _keep_stream(keeper, anatomy, out)
    if reads:
        _keep_reads(keeper, anatomy, out)
    for i, write in enumerate(anatomy.writes):
        _keep_write(keeper, i, write, out)
    sites = dict.fromkeys(write.experts for write in anatomy.writes if write.experts is not None)
    read = {read.site for read in anatomy.expert_reads}
    with ExitStack() as stack:
        stack.callback(keeper.release)
        for site in sites:
            done = _expert_recorder(keeper, site, out, site in read)
            stack.enter_context(recorded_call(model, site.path, site.call, done))
        stack.enter_context(tapped(model, [*edits, *keeper.taps]))
        result = model(input_ids=input_ids, **forward)
        keeper.finish()
        out.logits = keeper.at(logits_of(result))
    return out


def _keep_stream(keeper: Keeper, anatomy: Anatomy, out: Captured) -> None:
    keeper.keep(anatomy.readout.stream_site, _attribute(out, "stream"), last=True)
    for i, write in enumerate(anatomy.writes):
        keeper.keep_write(write.site, _setter(out.writes, i), partial(out.order.append, i))
    for gate in gates_of(anatomy.graph):
        out.gates[gate] = torch.empty(0)
        keeper.keep(gate.site, _setter(out.gates, gate))


def _keep_reads(keeper: Keeper, anatomy: Anatomy, out: Captured) -> None:
    out.reads = [torch.empty(0)] * len(anatomy.reads)
    for i, read in enumerate(anatomy.reads):
        keeper.keep_rows(read.site, _setter(out.reads, i), read.axis)
    out.block_inputs = [torch.empty(0)] * len(anatomy.blocks)
    for i, block in enumerate(anatomy.blocks):
        keeper.keep_rows(block.input_site, _setter(out.block_inputs, i))


def _setter(container, key):
    def store(tensor: Tensor) -> None:
        container[key] = tensor

    return store


def _attribute(owner: object, name: str) -> Store:
    return lambda tensor: setattr(owner, name, tensor)


def _keep_write(keeper: Keeper, index: int, write: Write, out: Captured) -> None:
    if write.source is not None:
        keeper.keep_rows(write.source, _setter(out.sources, index))
    core = write.attention
    if core is None or core.site in out.attention:
        return
    run = out.attention[core.site] = AttentionRun(causal=core.causal, scaling=core.scaling)
    keeper.taps.append((core.site, _attention_tap(keeper, core, run)))
    for step in core.steps:
        if step.gate_site is not None and step.gate_axis is not None:
            keeper.keep_rows(step.gate_site, _setter(run.gates, step.gate_site), step.gate_axis)


def _attention_tap(keeper: Keeper, core: AttentionCore, run: AttentionRun) -> Tap:
    def distinct(name: str, count: int) -> Arrange:
        """Of keys or values those heads that are no copies of their neighbours."""

        def arrange(tensor: Tensor) -> Tensor:
            heads = heads_first(tensor, core.layouts[name], core.sizes, keeper.batch)
            group = heads.shape[1] // count
            return heads if group == 1 else heads[:, ::group]

        return arrange

    def by_destination(name: str, rows: Rows) -> Arrange:
        return lambda tensor: rows(tensor, core.layouts[name], core.sizes, keeper.batch)

    def every_prompt(mask: Tensor) -> Tensor:
        middle = mask.shape[1:] if mask.dim() == 4 else (1, *mask.shape[-2:])
        return mask.expand(keeper.batch, *middle)

    lasting, rows = keeper.note_lasting, keeper.note_rows
    kept = [("value", "value", distinct("value", core.n_key_value_heads), lasting)]
    if core.fused:
        kept.append(("key", "key", distinct("key", core.n_keys), lasting))
        kept.append(("query", "query", by_destination("query", query_rows), rows))
        kept.append(("attn_mask", "mask", every_prompt, rows))
    else:
        kept.append(("pattern", "pattern", by_destination("pattern", pattern_rows), rows))
    slots, site = core.slots, core.site
    notes = [
        (slots[name], name in core.overwritten, note, arrange, _attribute(run, attribute))
        for name, attribute, arrange, note in kept
        if name in slots
    ]
    is_causal = slots.get("is_causal") if core.fused else None

    def tap(leaves: list) -> None:
        for slot, overwritten, note, arrange, store in notes:
            tensor = leaves[slot]
            if isinstance(tensor, Tensor):
                note(copy_of(tensor) if overwritten else tensor, arrange, store, site)
        if is_causal is not None and leaves[is_causal] is not None:
            run.causal = bool(leaves[is_causal])

    return tap


def _expert_recorder(keeper: Keeper, site: ExpertSite, out: Captured, read: bool):
    """What to do with the local recording of a sum over experts: take it apart at the destinations, drop the rest.

    `read` says whether what the experts read is wanted, too.
    """

    def done(recording, frame) -> None:
        total = find_sum(recording, frame, site)
        parts = expert_parts(total)
        device = parts.constant.device
        flat = (keeper.rows * keeper.positions + keeper.destinations.to(keeper.rows.device)).to(device)
        out.experts[site] = [_at_rows(parts, rows) for rows in flat]
        if read:
            made = read_rows(total, keeper.batch * keeper.positions)
            out.expert_reads[site] = [[one.at(rows) for one in made] for rows in flat]

    return done


def _at_rows(parts: ExpertParts, rows: Int[Tensor, " pair"]) -> ExpertParts:
    kept = []
    for product in parts.rows:
        weight = product.weight[rows]
        used = torch.nonzero(weight.abs().amax(0) > 0).flatten()
        if len(used):
            bias = None if product.bias is None else product.bias[used].clone()
            kept.append(
                ExpertRows(
                    product.expert[used],
                    product.hidden[used].clone(),
                    weight[:, used],
                    product.matrix.detach(),
                    product.transposed,
                    bias,
                )
            )
    return ExpertParts(tuple(kept), parts.constant[rows].clone())
