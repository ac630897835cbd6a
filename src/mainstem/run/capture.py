"""One run of a model with everything kept that its anatomy names.

Writes are kept by reference, which costs no time. Keys and values are copied for the heads that are distinct, and what
is needed at the asked destinations alone (query rows, pattern rows, what W_O reads, neurons' activations, results of
reads) row by row, so no tensor of positions x positions is held. A tensor that the model later changes in place is
copied.

Cost: one hook for each kept value, and a function mode inside attention modules; see `make bench`.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.model.anatomy import Anatomy, AttentionCore, ExpertSite, Write
from mainstem.model.expert_reads import ReadRows, read_rows
from mainstem.model.expert_rows import ExpertRows
from mainstem.model.experts import ExpertParts, expert_parts, find_sum
from mainstem.model.graph import Gate, gates_of
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.layouts import PositionAxis, by_position, by_token
from mainstem.model.outputs import logits_of
from mainstem.model.recorder import recorded_call
from mainstem.model.views import heads_first, pattern_rows, query_rows
from mainstem.run.shelf import Shelf

ROWS = 256
"""For how many rows memory is taken at once; a run keeps some hundreds."""


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

    `order` is the order in which the writes were seen.
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


class _Keeper:
    """Builds taps that store what they see."""

    def __init__(
        self, batch: int, positions: int, destinations: Int[Tensor, "batch destination"], attentions: int
    ) -> None:
        self.batch, self.positions = batch, positions
        self.destinations = destinations
        self.rows = torch.arange(batch, device=destinations.device)[:, None]
        self.single = int(destinations) if destinations.numel() == 1 else None
        self.shelf, self.sources = Shelf(ROWS, 1 << 20), Shelf(2 * attentions, 1 << 24)
        self.taps: list[tuple[Site, Tap]] = []

    def by_token(self, tensor: Tensor, site: Site) -> Tensor:
        """[batch, positions, rest] of what is at a site."""
        return by_token(tensor, site, self.batch, self.positions)

    def rows_at(self, tensor: Tensor, site: Site) -> Tensor:
        """[batch, destination, rest] of what is at a site."""
        return self.at(self.by_token(tensor, site))

    def at(self, tensor: Tensor) -> Tensor:
        """[batch, destination, rest]: the asked rows of [batch, positions, rest], copied."""
        if self.single is not None:  # a slice is many times cheaper than an index, and there are hundreds
            return self.shelf.put(tensor[:, self.single : self.single + 1])
        return tensor[self.rows.to(tensor.device), self.destinations.to(tensor.device)]

    def keep(self, site: Site, store, select) -> None:
        """Stores `select(what is at site, site)` with `store`."""

        def tap(leaves):
            tensor = leaves[site.slot]
            store(select(tensor.clone() if site.overwritten else tensor, site))

        self.taps.append((site, tap))


@torch.no_grad()
def capture(
    model: torch.nn.Module,
    anatomy: Anatomy,
    input_ids: Int[Tensor, "batch pos"],
    destinations: Int[Tensor, "batch destination"],
    edits: Sequence[tuple[Site, Tap]] = (),
    **forward,
) -> Captured:
    """Runs the model on `input_ids` and keeps what the anatomy names.

    Args:
        model: the module that the anatomy was discovered in.
        anatomy: its anatomy.
        input_ids: token ids.
        destinations: for each row of the batch the positions whose rows are wanted.
        edits: taps that change the run; what is kept is what was there after them.
        forward: further arguments of the forward call (attention mask, position ids).
    """
    batch, positions = input_ids.shape
    attentions = len({write.attention.site for write in anatomy.writes if write.attention is not None})
    keeper = _Keeper(batch, positions, destinations, attentions)
    out = Captured(destinations, [], torch.empty(0), torch.empty(0), {}, {}, {}, {}, {}, [], [], [])
    out.writes = [torch.empty(0)] * len(anatomy.writes)
    out.reads = [torch.empty(0)] * len(anatomy.reads)
    out.block_inputs = [torch.empty(0)] * len(anatomy.blocks)
    _keep_stream(keeper, anatomy, out)
    for i, write in enumerate(anatomy.writes):
        _keep_write(keeper, i, write, out)
    sites = dict.fromkeys(write.experts for write in anatomy.writes if write.experts is not None)
    read = {read.site for read in anatomy.expert_reads}
    with ExitStack() as stack:
        for site in sites:
            done = _expert_recorder(keeper, site, out, site in read)
            stack.enter_context(recorded_call(model, site.path, site.call, done))
        stack.enter_context(tapped(model, [*edits, *keeper.taps]))
        result = model(input_ids=input_ids, **forward)
    out.logits = keeper.at(logits_of(result))
    return out


def _keep_stream(keeper: _Keeper, anatomy: Anatomy, out: Captured) -> None:
    def set_stream(tensor: Tensor) -> None:
        out.stream = tensor

    keeper.keep(anatomy.readout.stream_site, set_stream, keeper.by_token)
    for i, write in enumerate(anatomy.writes):
        keeper.keep(write.site, _ordered(_setter(out.writes, i), out.order, i), keeper.by_token)
    for i, read in enumerate(anatomy.reads):
        keeper.keep(read.site, _setter(out.reads, i), keeper.rows_at if read.axis is None else _rows(keeper, read.axis))
    for i, block in enumerate(anatomy.blocks):
        keeper.keep(block.input_site, _setter(out.block_inputs, i), keeper.rows_at)
    for gate in gates_of(anatomy.graph):
        out.gates[gate] = torch.empty(0)
        keeper.keep(gate.site, _setter(out.gates, gate), keeper.by_token)


def _setter(container, key):
    def store(tensor: Tensor) -> None:
        container[key] = tensor

    return store


def _ordered(store, order: list[int], index: int):
    """Stores, and notes that write `index` came next."""

    def noting(tensor: Tensor) -> None:
        store(tensor)
        order.append(index)

    return noting


def _keep_write(keeper: _Keeper, index: int, write: Write, out: Captured) -> None:
    if write.source is not None:
        keeper.keep(write.source, _setter(out.sources, index), keeper.rows_at)
    core = write.attention
    if core is None or core.site in out.attention:
        return
    run = out.attention[core.site] = AttentionRun(causal=core.causal, scaling=core.scaling)
    keeper.taps.append((core.site, _attention_tap(keeper, core, run)))
    for step in core.steps:
        if step.gate_site is not None and step.gate_axis is not None:
            keeper.keep(step.gate_site, _setter(run.gates, step.gate_site), _rows(keeper, step.gate_axis))


def _rows(keeper: _Keeper, axis: PositionAxis):
    """Rows at the destinations of what has its positions on an axis of its own."""
    return lambda t, site: keeper.at(by_position(t, axis, keeper.batch, keeper.positions))


def _attention_tap(keeper: _Keeper, core: AttentionCore, run: AttentionRun) -> Tap:
    def distinct(tensor: Tensor, layout: str, count: int) -> Tensor:
        heads = heads_first(tensor, layout, core.sizes, keeper.batch)
        group = heads.shape[1] // count
        return keeper.sources.put(heads[:, ::group])

    def rows(tensor: Tensor) -> Tensor:
        """Rows of [batch, heads, destination, ...] at the asked destinations, copied."""
        if keeper.single is not None:
            return keeper.shelf.put(tensor[:, :, keeper.single : keeper.single + 1])
        where = keeper.destinations.to(tensor.device)
        return tensor.transpose(1, 2)[keeper.rows.to(tensor.device), where].transpose(1, 2)

    def tap(leaves):
        def argument(name: str):
            return leaves[core.slots[name]] if name in core.slots else None

        run.value = distinct(leaves[core.slots["value"]], core.layouts["value"], core.n_key_value_heads)
        if not core.fused:
            seen = leaves[core.slots["pattern"]]
            run.pattern = rows(pattern_rows(seen, core.layouts["pattern"], core.sizes, keeper.batch))
            return
        run.key = distinct(leaves[core.slots["key"]], core.layouts["key"], core.n_keys)
        query = query_rows(leaves[core.slots["query"]], core.layouts["query"], core.sizes, keeper.batch)
        run.query = rows(query)
        mask = argument("attn_mask")
        if isinstance(mask, Tensor):
            middle = mask.shape[1:] if mask.dim() == 4 else (1, *mask.shape[-2:])
            run.mask = rows(mask.expand(keeper.batch, *middle))
        causal = argument("is_causal")
        run.causal = bool(causal) if causal is not None else core.causal

    return tap


def _expert_recorder(keeper: _Keeper, site: ExpertSite, out: Captured, read: bool):
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
