"""What reads the stream: every product of a matrix with a stream value, the norm before it, and what it is for.

The role of a matrix is where its result goes: to attention's query, key or value; through a non-linearity to neurons
(gate), or to them linearly (up); to the choice of experts (router); to a factor of what is written (output_gate); to a
mixer (input).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mainstem.model.activation import Activation, find_activation
from mainstem.model.anatomy import ExpertRead, Read
from mainstem.model.behaviour import index_map
from mainstem.model.expert_inputs import ExpertInputs, Matrix
from mainstem.model.expert_reads import experts_source
from mainstem.model.function_taps import FUSED
from mainstem.model.head_norms import head_norm
from mainstem.model.labels import Labelled
from mainstem.model.layouts import PositionAxis
from mainstem.model.norms import Norm
from mainstem.model.paths import Path, linear_map, pattern_operands
from mainstem.model.program import one_call
from mainstem.model.recording import Call, Recording, Value
from mainstem.model.sites import SiteFinder
from mainstem.model.stream import PRODUCTS, StreamWalk, is_weight_product
from mainstem.units import Unit


@dataclass
class Reads:
    """Reads with the values they read; `finish` gives them their nodes in the graph."""

    found: list[tuple[Read, Value, Value]]
    experts: list[tuple[ExpertRead, Value, Value]]
    inputs: list[Value]
    activations: dict[int, Activation] = field(default_factory=dict)
    query_width: dict[Unit, int] = field(default_factory=dict)

    def finish_experts(self, node_of: Mapping[int, int]) -> list[ExpertRead]:
        """What experts read, with its place in the stream graph."""
        return [
            replace(read, node=node_of[value.id], stream_node=node_of[stream.id])
            for read, value, stream in self.experts
        ]

    def finish(self, node_of: Mapping[int, int]) -> list[Read]:
        """The reads with their places in the stream graph."""
        return [
            replace(read, node=node_of[value.id], stream_node=node_of[stream.id]) for read, value, stream in self.found
        ]


def find_reads(
    recording: Recording, walk: StreamWalk, values: list[Value], labelled: Labelled, finder: SiteFinder
) -> Reads:
    """Every read of the recording that belongs to a labelled sublayer."""
    known = {value.id for value in values}
    resolver = _Resolver(walk, known)
    roles = _roles(labelled)
    _note_output_gates(roles, walk, values, labelled)
    found: list[tuple[Read, Value, Value]] = []
    made: list[Value] = []
    for value in recording.values:
        call = value.call
        if call is None or value.slot != 0 or not is_weight_product(call) or value.id not in roles.owner:
            continue
        active = call.active_operands()
        if len(active) != 1 or not resolver.resolves(active[0]):
            continue
        read = _read(value, active[0], walk, resolver, roles, finder)
        if read is not None:
            made.append(value)
            found.append(read)
    matrices = [Matrix(i, roles.owner[i.id], source) for i, (_, source, _) in zip(made, found, strict=True)]
    experts = _expert_reads(labelled, resolver, ExpertInputs(finder, known, matrices))
    inputs = [value for _, value, _ in [*found, *experts]]
    products = {value.id: i for i, value in enumerate(made)}
    return Reads(found, experts, inputs, _activations(labelled, products, walk.positions))


def _activations(labelled: Labelled, products: dict[int, int], positions: int) -> dict[int, Activation]:
    """For each write of neurons, by its number, how they come from the reads."""
    found: dict[int, Activation] = {}
    for i, (write, path) in enumerate(zip(labelled.writes, labelled.paths, strict=True)):
        if write.neurons:
            found[i] = find_activation(path.steps[path.products[-1]].source, products, positions)
    return found


def _expert_reads(
    labelled: Labelled, resolver: "_Resolver", places: ExpertInputs
) -> list[tuple[ExpertRead, Value, Value]]:
    found = []
    for write, path, inputs in zip(labelled.writes, labelled.paths, labelled.inputs, strict=True):
        if write.experts is not None:
            source = experts_source(path.write, inputs, resolver.resolves)
            if source is not None:
                norm, stream = resolver.behind_norm(source)
                site, beside = places.of(source, path.write, write.unit)
                found.append((ExpertRead(write.unit, write.experts, -1, -1, norm, site, beside), source, stream))
    return found


class _Resolver:
    """Which values are stream values seen through norms and factors."""

    def __init__(self, walk: StreamWalk, known: set[int]) -> None:
        self.walk = walk
        self.known = dict.fromkeys(known, True)

    def resolves(self, value: Value) -> bool:
        if value.id not in self.known:
            self.known[value.id] = False
            if self.walk.full(value) and value.active:
                step = self.walk.step(value)
                self.known[value.id] = bool(step.terms) and all(self.resolves(t.value) for t in step.terms)
        return self.known[value.id]

    def behind_norm(self, value: Value) -> tuple[Norm | None, Value]:
        """The norm through which `value` sees the stream, with factors that follow it, and the stream value behind."""
        gain: Tensor | float = 1.0
        for _ in range(8):
            step = self.walk.step(value)
            if step.norm is not None:
                return _with_gain(step.norm, gain), step.terms[0].value
            if len(step.terms) != 1 or step.bias is not None or step.terms[0].gate is not None:
                break
            gain = _times(gain, step.terms[0].factor)
            value = step.terms[0].value
        return None, value


def _times(a: Tensor | float, b: Tensor | float) -> Tensor | float:
    if isinstance(a, float) and a == 1.0:
        return b
    return a if isinstance(b, float) and b == 1.0 else a * b


def _with_gain(norm: Norm, factor: Tensor | float) -> Norm:
    """The norm followed by a factor for each dimension."""
    if isinstance(factor, float):
        if factor == 1.0:
            return norm
        factor = torch.full((1,), factor)
    gain = factor if norm.gain is None else norm.gain * factor
    bias = None if norm.bias is None else norm.bias * factor
    return replace(norm, gain=gain, bias=bias)


@dataclass
class _Roles:
    """For each product's result the sublayer it serves and its roles."""

    owner: dict[int, Unit] = field(default_factory=dict)
    roles: dict[int, list[str]] = field(default_factory=dict)
    operands: dict[int, Value] = field(default_factory=dict)

    def note(self, value: Value, unit: Unit, role: str, operand: Value | None = None) -> None:
        self.owner.setdefault(value.id, unit)
        roles = self.roles.setdefault(value.id, [])
        if role not in roles:
            roles.append(role)
        if operand is not None:
            self.operands[value.id] = operand


def _roles(labelled: Labelled) -> _Roles:
    out = _Roles()
    for write, path, inputs in zip(labelled.writes, labelled.paths, labelled.inputs, strict=True):
        stop = {value.id for value in inputs}
        if path.core is not None:
            for role, operand in attention_operands(path.core).items():
                for product in _products_behind(operand, stop):
                    out.note(product, write.unit, role, operand)
        elif write.neurons:
            _note_neurons(out, path, write.unit, stop)
        else:
            role = "input" if write.unit.kind == "sublayer" and "mixer" in str(write.unit) else "router"
            for product in _products_behind(path.write, stop):
                out.note(product, write.unit, role)
        if path.core is not None or write.neurons:
            for product in _products_behind(path.write, stop):
                if product.id not in out.owner and product is not path.write:
                    out.note(product, write.unit, "gate")
    return out


def _note_output_gates(out: _Roles, walk: StreamWalk, values: list[Value], labelled: Labelled) -> None:
    """Products behind the factors that a write gets on its way into the stream, such as a shared expert's gate."""
    unit_of = {path.write.id: write.unit for write, path in zip(labelled.writes, labelled.paths, strict=True)}
    known = {value.id for value in values}
    for value in values:
        for term in walk.step(value).terms:
            if term.gate is None:
                continue
            gated = term.value
            while gated.id not in unit_of:
                gated = max((t.value for t in walk.step(gated).terms), key=lambda v: v.id)
            for product in _products_behind(term.gate, known):
                out.note(product, unit_of[gated.id], "output_gate")


def attention_operands(core: Call) -> dict[str, Value]:
    """query, key and value of an attention product, as far as they can be seen."""
    if core.name == FUSED:
        names = ("query", "key", "value")
        bound = dict(zip(names, core.args, strict=False)) | {k: v for k, v in core.kwargs.items() if k in names}
        return {name: value for name, value in bound.items() if isinstance(value, Value)}
    found = pattern_operands(core)
    assert found is not None
    pattern, value = found
    scores = score_product(pattern)
    if scores is None:
        return {"value": value}
    query, key = scores.active_operands()[-2:]
    return {"query": query, "key": key, "value": value}


def score_product(pattern: Value) -> Call | None:
    """The product of queries and keys behind a pattern."""
    pending, seen = [pattern], 0
    while pending and seen < 60:
        value = pending.pop(0)
        seen += 1
        call = value.call
        if call is None:
            continue
        if call.name in PRODUCTS and len(call.active_operands()) >= 2:
            return call
        pending.extend(call.active_operands())
    return None


def _products_behind(value: Value, stop: set[int]) -> list[Value]:
    """The first weight products met going back from `value`, down to the stream values in `stop`."""
    found: dict[int, Value] = {}
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current.id in seen or current.id in stop or current.call is None:
            continue
        seen.add(current.id)
        if is_weight_product(current.call):
            found[current.id] = current
        pending.extend(current.call.active_operands())
    return list(found.values())


def _note_neurons(out: _Roles, path: Path, unit: Unit, stop: set[int]) -> None:
    """A product of as many rows as there are neurons, through a non-linearity, is `up`; two factors are gate and up."""
    source = path.source
    factors = source.call.active_operands() if source.call is not None else []
    products = _products_behind(source, stop)
    if len(factors) != 2 or (len(products) == 1 and products[0].shape[-1] == source.shape[-1]):
        for product in products:
            out.note(product, unit, "up")
        return
    for factor in factors:
        role = "up" if _reaches_product_by_views(factor) else "gate"
        for product in _products_behind(factor, stop):
            out.note(product, unit, role)


def _reaches_product_by_views(value: Value) -> bool:
    while value.call is not None and value.call.func is not None:
        if is_weight_product(value.call):
            return True
        active = value.call.active_operands()
        if len(active) != 1 or index_map(one_call(value, active), active[0].tensor) is None:
            return False
        value = active[0]
    return False


def _read(
    value: Value, source: Value, walk: StreamWalk, resolver: _Resolver, roles: _Roles, finder: SiteFinder
) -> tuple[Read, Value, Value] | None:
    axis = _position_axis(value, walk.positions)
    found = linear_map(value, source, axis=axis)
    if found is None:
        return None
    matrix, bias = found
    norm, stream = resolver.behind_norm(source)
    assert value.call is not None
    operand = roles.operands.get(value.id)
    read = Read(
        unit=roles.owner[value.id],
        roles=tuple(roles.roles[value.id]),
        node=-1,
        stream_node=-1,
        norm=norm,
        weight=matrix,
        bias=None if bias is None else bias.double(),
        module=value.call.frame.path if value.call.frame is not None else "",
        site=finder.site(value),
        dtype=value.tensor.dtype,
        input_site=finder.arguments(value.call, source),
        head_norm=None if operand is None or roles.roles[value.id] == ["value"] else head_norm(operand, value),
        axis=PositionAxis.of(value.shape, axis)
        if axis is not None and any(size != 1 for size in value.shape[:axis])
        else None,
    )
    return read, source, stream


def _position_axis(value: Value, positions: int) -> int | None:
    """The axis of the result that has the positions, where it is not plain that rows are its last axis."""
    axes = [axis for axis, size in enumerate(value.shape) if size == positions]
    first = next((axis for axis, size in enumerate(value.shape) if size != 1), 0)
    if first in axes:
        return first
    return axes[0] if len(axes) == 1 and value.tensor.dim() > 2 else None
