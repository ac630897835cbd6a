"""Which write is what: blocks in the order of execution, sublayers by what they do, and what lies behind each write.

A sublayer is attention if its write comes from a pattern times values, an MLP if it treats each position alone, a
mixer otherwise. Both are seen, not read off names: the first in the path behind the write, the second by changing what
the sublayer reads at one position and looking at the others.
"""

from dataclasses import dataclass, field, replace

import torch

from mainstem.model.addresses import Draft, addresses, blocks_in_order
from mainstem.model.anatomy import AttentionCore, Projection, Write
from mainstem.model.attention import UnsplittableError, attention_core, is_joint, joint_core
from mainstem.model.behaviour import index_map
from mainstem.model.dependence import by_position_alone, stream_inputs
from mainstem.model.experts import expert_sum
from mainstem.model.paths import Path, is_attention, projection, trace_back
from mainstem.model.program import one_call
from mainstem.model.quantised import quantised_reason
from mainstem.model.recording import Recording, Value
from mainstem.model.sites import SiteFinder
from mainstem.model.stream import StreamWalk
from mainstem.units import Unit

ATTENTION_LEVELS = ("heads", "subvalues", "attention_neurons")


@dataclass
class Labelled:
    """Writes with their units, the blocks as (path, call, writes), and facts about experts."""

    writes: list[Write]
    blocks: list[tuple[str, int, list[int]]]
    paths: list[Path]
    inputs: list[list[Value]]
    n_experts: int | None = None
    expert_widths: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def label_writes(
    leaves: list[Value], values: list[Value], recording: Recording, finder: SiteFinder, walk: StreamWalk
) -> Labelled:
    """Addresses and tails for all writes of a recording."""
    known = {value.id for value in values}
    drafts = [_draft(leaf, known - {leaf.id}, walk) for leaf in leaves]
    out = Labelled([], blocks_in_order(drafts), [], [])
    layer_of = {i: layer for layer, (_, _, found) in enumerate(out.blocks) for i in found}
    units = addresses(drafts, layer_of)
    cores: dict[int, AttentionCore | str] = {}
    for draft, unit in zip(drafts, units, strict=True):
        out.writes.append(_write(draft, unit, finder, walk.positions, cores))
        out.paths.append(draft.path)
        out.inputs.append(draft.inputs)
        if draft.experts is not None and draft.experts.reason is None:
            out.n_experts = max(out.n_experts or 0, draft.experts.n_experts)
            out.expert_widths.append(draft.experts.width)
    _number_neurons(out, drafts)
    return out


def _draft(leaf: Value, known: set[int], walk: StreamWalk) -> Draft:
    inputs, inside = stream_inputs(leaf, known)
    if not inputs:
        return Draft(leaf, trace_back(leaf, False), "embed", inputs, None)
    if by_position_alone(leaf, inputs, walk.positions):
        path = trace_back(leaf, False)
        return Draft(leaf, path, "mlp", inputs, expert_sum(leaf, inputs) if not path.products else None)
    cores = [call for call in inside if is_attention(call)]
    kind = "attn" if cores else "mixer"
    return Draft(leaf, trace_back(leaf, bool(cores)), kind, inputs, None, cores)


def _write(draft: Draft, unit: Unit, finder: SiteFinder, positions: int, cores: dict) -> Write:
    value = draft.value
    frame = value.call.frame if value.call is not None else None
    base = Write(unit, finder.site(value), frame.path if frame is not None else "", value.tensor.dtype)
    if draft.kind == "embed":
        return base
    if draft.kind == "mixer":
        return base
    if draft.kind == "mlp" and draft.experts is not None:
        experts = draft.experts
        if experts.reason is not None:
            return replace(base, refusals={"neurons": experts.reason})
        return replace(base, experts=experts.site, n_experts=experts.n_experts, expert_width=experts.width)
    if draft.kind == "attn" and draft.path.core is None:
        return replace(base, refusals=dict.fromkeys(ATTENTION_LEVELS, _not_one_attention(draft)))
    if draft.kind == "attn" and draft.path.core is not None and is_joint(draft.path.core):
        return _with_joint(base, draft, positions)
    found = projection(draft.path)
    if found is None:
        levels = ATTENTION_LEVELS if draft.kind == "attn" else ("neurons",)
        reason = "what is written is no product of a matrix with something that can be seen"
        known = {value.id for value in draft.inputs}
        return replace(base, refusals=dict.fromkeys(levels, quantised_reason(value, known) or reason))
    carried, bias = found
    product = draft.path.steps[draft.path.products[-1]]
    assert product.value.call is not None
    base = replace(
        base,
        source=finder.site(product.source, whole=True),
        input_site=finder.arguments(product.value.call, product.source),
        projection=carried,
        bias=bias,
    )
    if draft.kind == "mlp":
        return replace(base, neurons=True)
    return _with_attention(base, draft, finder, positions, cores)


def _not_one_attention(draft: Draft) -> str:
    if len(draft.cores) > 1:
        return f"{len(draft.cores)} products of a pattern with values are combined before they are written"
    between = {value.id for core in draft.cores for value in core.outputs}
    more = "between attention and the write lies more than matrices, views, factors, gates and norms"
    return quantised_reason(draft.value, between) or more


def _with_attention(base: Write, draft: Draft, finder: SiteFinder, positions: int, cores: dict) -> Write:
    key = id(draft.path.core)
    if key not in cores:
        try:
            cores[key] = attention_core(draft.path, finder, positions)
        except UnsplittableError as error:
            cores[key] = str(error)
    core = cores[key]
    if isinstance(core, str):
        return replace(base, refusals=dict.fromkeys(ATTENTION_LEVELS, core))
    return replace(base, attention=core)


def _with_joint(base: Write, draft: Draft, positions: int) -> Write:
    try:
        core, matrix = joint_core(draft.path, positions)
    except UnsplittableError as error:
        return replace(base, refusals=dict.fromkeys(ATTENTION_LEVELS, str(error)))
    return replace(base, projection=Projection((matrix,)), attention=core)


def _before_views(value: Value) -> Value:
    """The same numbers in the same order before they were given other axes: two matrices may read them either way."""
    while value.call is not None and value.call.func is not None:
        active = value.call.active_operands()
        if len(active) != 1 or active[0].tensor.numel() != value.tensor.numel():
            break
        index = index_map(one_call(value, active), active[0].tensor)
        if index is None or not torch.equal(index.reshape(-1).cpu(), torch.arange(index.numel())):
            break
        value = active[0]
    return value


def _number_neurons(out: Labelled, drafts: list[Draft]) -> None:
    """Shared experts beside routed ones get numbers of their own; further dense parts continue the numbering."""
    by_unit: dict[Unit, list[int]] = {}
    for i, write in enumerate(out.writes):
        if write.unit.kind == "sublayer":
            by_unit.setdefault(write.unit, []).append(i)
    for members in by_unit.values():
        routed = any(out.writes[i].experts is not None for i in members)
        sources: dict[int, tuple[int, int]] = {}
        first = 0
        for i in members:
            write = out.writes[i]
            if not write.neurons or write.projection is None:
                continue
            key = _before_views(drafts[i].path.steps[drafts[i].path.products[-1]].source).id
            if key not in sources:
                sources[key] = (len(sources), first)
                first += write.projection.n_in
            number, start = sources[key]
            out.writes[i] = replace(
                write, shared_expert=number if routed else None, first_neuron=0 if routed else start
            )
