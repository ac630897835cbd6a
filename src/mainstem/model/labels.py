"""Which write is what: blocks in the order of execution, sublayers by what they do, and what lies behind each write.

A sublayer is attention if its write comes from a pattern times values, an MLP if it treats each position alone, a
mixer otherwise. Both are seen, not read off names: the first in the path behind the write, the second by changing what
the sublayer reads at one position and looking at the others.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import AttentionCore, Projection, Write
from mainstem.model.attention import attention_core, is_joint, joint_core
from mainstem.model.experts import ExpertSum, expert_sum
from mainstem.model.paths import Path, is_attention, projection, trace_back
from mainstem.model.program import extract
from mainstem.model.recorder import Call, Frame, Recording, Value
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


@dataclass
class _Draft:
    """What is known of one write before it has an address."""

    value: Value
    path: Path
    kind: str
    inputs: list[Value]
    experts: ExpertSum | None
    cores: list[Call] = field(default_factory=list)


def label_writes(
    leaves: list[Value], values: list[Value], recording: Recording, finder: SiteFinder, walk: StreamWalk
) -> Labelled:
    """Addresses and tails for all writes of a recording."""
    known = {value.id for value in values}
    drafts = [_draft(leaf, known - {leaf.id}, walk) for leaf in leaves]
    frames = [_block_frame(draft.value) for draft in drafts]
    blocks: dict[tuple[str, int], list[int]] = {}
    for i, frame in enumerate(frames):
        if frame is not None:
            blocks.setdefault((frame.path, frame.call), []).append(i)
    out = Labelled([], [(path, call, found) for (path, call), found in blocks.items()], [], [])
    layer_of = {i: layer for layer, (_, _, found) in enumerate(out.blocks) for i in found}
    units = _units(drafts, layer_of)
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


def _draft(leaf: Value, known: set[int], walk: StreamWalk) -> _Draft:
    inputs, inside = _stream_inputs(leaf, known)
    if not inputs:
        return _Draft(leaf, trace_back(leaf, False), "embed", inputs, None)
    if _by_position(leaf, inputs, walk.positions):
        path = trace_back(leaf, False)
        return _Draft(leaf, path, "mlp", inputs, expert_sum(leaf, inputs) if not path.products else None)
    cores = [call for call in inside if is_attention(call)]
    kind = "attn" if cores else "mixer"
    return _Draft(leaf, trace_back(leaf, bool(cores)), kind, inputs, None, cores)


def _stream_inputs(leaf: Value, known: set[int]) -> tuple[list[Value], list[Call]]:
    """The stream values that a write was computed from, and the calls in between, latest first."""
    found: dict[int, Value] = {}
    seen: dict[int, Value] = {}
    pending = [leaf]
    while pending:
        value = pending.pop()
        if value.id in seen or value.id in found:
            continue
        if value.id in known:
            found[value.id] = value
        else:
            seen[value.id] = value
            if value.call is not None:
                pending.extend(value.call.operands())
    calls = {
        id(v.call): v.call for _, v in sorted(seen.items(), reverse=True) if v.call is not None and v.active
    }
    return [found[i] for i in sorted(found)], list(calls.values())


def _by_position(leaf: Value, inputs: list[Value], positions: int) -> bool:
    """Whether a change of the stream at one position changes the write there alone.

    Products that are applied row by row cannot mix positions, and are the only part that costs: they are replaced by
    something cheap that changes the same rows.
    """
    program = extract(leaf, inputs, stand_in=_row_by_row)
    if program is None:
        return False
    try:
        before = program(*[value.tensor for value in inputs]).reshape(positions, -1)
        changed = []
        for value in inputs:
            tensor = value.tensor.clone().reshape(positions, -1)
            tensor[1] += max(1e-3, 4 * torch.finfo(tensor.dtype).eps) * tensor[1].roll(1)
            changed.append(tensor.reshape(value.shape))
        after = program(*changed).reshape(positions, -1)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    moved = (before.double() - after.double()).abs().amax(-1)
    others = torch.arange(positions, device=moved.device) != 1
    return bool(moved[1] > 0) and bool(moved[others].max() <= 1e-3 * moved[1])


ROW_BY_ROW = frozenset(["linear", "matmul", "__matmul__", "mm", "addmm"])


def _row_by_row(call: Call) -> tuple[Value, Any] | None:
    """For a product of rows with one matrix: its activations, and a cheap function that changes the same rows."""
    active = call.active_operands()
    if call.name not in ROW_BY_ROW or len(active) != 1 or len(call.outputs) != 1:
        return None
    source, result = active[0].tensor, call.outputs[0].tensor
    plain = all(o.tensor.dim() <= 2 for o in call.operands() if not o.active)
    if not plain or source.shape[:-1] != result.shape[:-1] or call.outputs[0].slot != 0:
        return None

    def cheap(x: torch.Tensor) -> torch.Tensor:
        change = (x - source.to(x)).mean(-1, keepdim=True)
        return (result.to(x) * (1 + change) + change).to(result.dtype if x.dtype == source.dtype else x.dtype)

    return active[0], cheap


def _block_frame(leaf: Value) -> Frame | None:
    """The outermost module call that is an entry of a list of modules."""
    frame = leaf.call.frame if leaf.call is not None else None
    if frame is None:
        return None
    numbered = [f for f in frame.stack() if f.path.rpartition(".")[2].isdigit()]
    return numbered[-1] if numbered else None


def _units(drafts: list[_Draft], layer_of: dict[int, int]) -> list[Unit]:
    """Addresses: per block one for each attention product, and one for each set of stream values read by others.

    A write between blocks counts with the block before it.
    """
    units: list[Unit] = []
    places: dict[tuple[int, str], list[Any]] = {}
    layer = 0
    for i, draft in enumerate(drafts):
        if draft.kind == "embed":
            units.append(_embedding_unit(draft.value, units))
            continue
        layer = layer_of.get(i, layer)
        key = id(draft.path.core) if draft.path.core is not None else tuple(v.id for v in draft.inputs)
        keys = places.setdefault((layer, draft.kind), [])
        if key not in keys:
            keys.append(key)
        units.append(Unit.write(layer, draft.kind, nth=keys.index(key) + 1))
    return units


def _embedding_unit(leaf: Value, units: list[Unit]) -> Unit:
    """embed for what depends on the tokens, embed.pos for what differs by position alone, embed.type for the rest."""
    rows = leaf.tensor.reshape(-1, leaf.shape[-1])
    if torch.equal(rows, rows[:1].expand_as(rows)):
        which = "type"
    else:
        which = "pos" if not leaf.active or _counts_positions(leaf) else None
    place = Unit.embedding(which).place
    return Unit.embedding(which, nth=1 + sum(1 for unit in units if unit.place == place))


def _counts_positions(leaf: Value) -> bool:
    """Whether a table is looked up by numbers that count one by one, which some models compute from the tokens."""
    index = [o for o in leaf.call.active_operands() if not o.tensor.is_floating_point()] if leaf.call is not None else []
    return bool(index) and bool((index[0].tensor.flatten().diff() == 1).all())


def _write(draft: _Draft, unit: Unit, finder: SiteFinder, positions: int, cores: dict) -> Write:
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
        return replace(base, experts=experts.site)
    if draft.kind == "attn" and draft.path.core is None:
        return replace(base, refusals=dict.fromkeys(ATTENTION_LEVELS, _not_one_attention(draft.cores)))
    if draft.kind == "attn" and draft.path.core is not None and is_joint(draft.path.core):
        return _with_joint(base, draft, positions)
    found = projection(draft.path)
    if found is None:
        levels = ATTENTION_LEVELS if draft.kind == "attn" else ("neurons",)
        reason = "what is written is no product of a matrix with something that can be seen"
        return replace(base, refusals=dict.fromkeys(levels, reason))
    carried, bias = found
    source = draft.path.steps[draft.path.products[-1]].source
    base = replace(base, source=finder.site(source, whole=True), projection=carried, bias=bias)
    if draft.kind == "mlp":
        return replace(base, neurons=True)
    return _with_attention(base, draft, finder, positions, cores)


def _not_one_attention(cores: list[Call]) -> str:
    if len(cores) > 1:
        return f"{len(cores)} products of a pattern with values are combined before they are written"
    return "between attention and the write lies more than matrices, views, factors, gates and norms"


def _with_attention(base: Write, draft: _Draft, finder: SiteFinder, positions: int, cores: dict) -> Write:
    key = id(draft.path.core)
    if key not in cores:
        try:
            cores[key] = attention_core(draft.path, finder, positions)
        except LevelRefusedError as error:
            cores[key] = error.what
    core = cores[key]
    if isinstance(core, str):
        return replace(base, refusals=dict.fromkeys(ATTENTION_LEVELS, core))
    return replace(base, attention=core)


def _with_joint(base: Write, draft: _Draft, positions: int) -> Write:
    try:
        core, matrix = joint_core(draft.path, positions)
    except LevelRefusedError as error:
        return replace(base, refusals=dict.fromkeys(ATTENTION_LEVELS, error.what))
    return replace(base, projection=Projection((matrix,)), attention=core)


def _number_neurons(out: Labelled, drafts: list[_Draft]) -> None:
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
            key = drafts[i].path.steps[drafts[i].path.products[-1]].source.id
            if key not in sources:
                sources[key] = (len(sources), first)
                first += write.projection.n_in
            number, start = sources[key]
            out.writes[i] = replace(
                write, shared_expert=number if routed else None, first_neuron=0 if routed else start
            )
