"""Sums over experts: which rows of which expert's output product reach which position, and with what weight.

Routing depends on the tokens, so nothing about it is fixed in the anatomy: the module call that makes the sum is
recorded anew in each run, and this module reads the recording. From the sum it goes back through everything linear to
the products with experts' matrices (a loop over experts, one product batched over chosen matrices, or one grouped
product), and finds each row's weight at each position by sending unit rows through what lies between, all at once in
different dimensions. Verified on a random probe and on the rows themselves; what does not fit gives a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.anatomy import ExpertSite
from mainstem.model.expert_rows import (
    ExpertRows,
    UnreadableError,
    data_operand,
    expert_rows,
    hidden_rows,
    stacked_experts,
)
from mainstem.model.norms import PROBE
from mainstem.model.program import Program, extract, one_call, probe_dtype, probe_like, zeros_like
from mainstem.model.recording import Frame, Recording, Value
from mainstem.model.stream import PRODUCTS


@dataclass(frozen=True, eq=False)
class ExpertSum:
    """What discovery keeps of a sum over experts; `reason` says why its neurons cannot be had, else None."""

    site: ExpertSite
    n_experts: int
    width: int
    reason: str | None


@dataclass(frozen=True, eq=False)
class ExpertParts:
    """A sum over experts taken apart: rows of products, and [positions, d_model] that no neuron writes."""

    rows: tuple[ExpertRows, ...]
    constant: Tensor


def expert_sum(leaf: Value, inputs: Sequence[Value]) -> ExpertSum | None:
    """What discovery can say about a write, computed from the stream values `inputs`, that may be a sum over experts.

    None if no expert's product is behind it.
    """
    products = expert_products(leaf, inputs)
    frame = leaf.call.frame if leaf.call is not None else None
    if not products or frame is None or leaf.call is None:
        return None
    slot = next((i for i, v in enumerate(frame.outputs) if v is not None and _same(v, leaf)), None)
    site = ExpertSite(frame.path, frame.call, slot, leaf.call.key, leaf.call.ordinal)
    try:
        rows = expert_parts(leaf, inputs).rows
    except UnreadableError as error:
        return ExpertSum(site, 0, 0, str(error))
    n_experts = max(
        stacked_experts(product) or int(r.expert.max()) + 1 for product, r in zip(products, rows, strict=True)
    )
    return ExpertSum(site, n_experts, rows[0].hidden.shape[1], None)


def _same(a: Value, b: Value) -> bool:
    same = a.tensor.numel() == b.tensor.numel() and a.tensor.dtype == b.tensor.dtype
    return a is b or same and torch.equal(a.tensor.reshape(-1), b.tensor.reshape(-1))


def find_sum(recording: Recording, frame: Frame, site: ExpertSite) -> Value:
    """The sum over experts in a local recording."""
    if site.slot is not None:
        value = frame.outputs[site.slot]
        assert value is not None
        return value
    for value in recording.values:
        call = value.call
        if call is not None and call.frame is frame and call.key == site.function and call.ordinal == site.ordinal:
            return value
    raise UnreadableError("the sum over experts is not where the anatomy saw it")


def expert_products(result: Value, inputs: Sequence[Value] = ()) -> list[Value]:
    """The products with experts' matrices that `result` depends on linearly, looking no further back than `inputs`."""
    found: dict[int, Value] = {}
    seen: set[int] = {value.id for value in inputs}
    pending = [result]
    while pending and len(seen) < 20_000:
        value = pending.pop()
        call = value.call
        if value.id in seen or call is None or call.func is None:
            continue
        seen.add(value.id)
        if call.name in PRODUCTS and data_operand(call) is not None:
            found[value.id] = value
            continue
        for operand in call.active_operands():
            if operand.tensor.is_floating_point() and _linear(value, operand):
                pending.append(operand)
    return sorted((v for v in found.values() if v.tensor.numel()), key=lambda value: value.id)


def _linear(value: Value, operand: Value) -> bool:
    program = one_call(value, [operand])
    if program is None:
        return False
    a, b = probe_like(operand, 5), probe_like(operand, 8)
    try:
        zero, one, two, both = (program(x).double() for x in (a * 0, a, b, a + 2 * b))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    expected = one + 2 * two - 2 * zero
    size = one.norm() + two.norm()
    return bool((both - expected).norm() <= 100 * PROBE * size + 1e-30)


def expert_parts(result: Value, inputs: Sequence[Value] = ()) -> ExpertParts:
    """A sum over experts taken apart.

    Raises:
        UnreadableError: with the reason, if the rows cannot be found or do not add up to the sum.
    """
    products = expert_products(result, inputs)
    if not products:
        raise UnreadableError("no product with an expert's matrix leads linearly to the write")
    width = result.shape[-1]
    if any(product.tensor.numel() % width for product in products):
        raise UnreadableError("an expert's product has another width than the stream")
    program = extract(result, products)
    if program is None:
        raise UnreadableError("the sum over experts is changed through an alias")
    constant, weights = _weights(program, products, width)
    rows = tuple(expert_rows(product, weight, width) for product, weight in zip(products, weights, strict=True))
    return ExpertParts(rows, constant)


def _weights(program: Program, products: list[Value], width: int) -> tuple[Tensor, list[Tensor]]:
    """What the sum is with all products zero, and each row's factor at each position."""
    counts = [product.tensor.numel() // width for product in products]
    zeros = [zeros_like(product).contiguous() for product in products]

    def run(tensors: list[Tensor]) -> Tensor:
        return program(*tensors).double().reshape(-1, width)

    constant = run(zeros)
    weights = [torch.zeros(constant.shape[0], n, dtype=torch.float64, device=constant.device) for n in counts]
    places = [(k, row) for k, n in enumerate(counts) for row in range(n)]
    for start in range(0, len(places), width):
        probes = [z.clone() for z in zeros]
        chunk = places[start : start + width]
        for channel, (k, row) in enumerate(chunk):
            probes[k].view(-1)[row * width + channel] = 1
        out = run(probes) - constant
        for channel, (k, row) in enumerate(chunk):
            weights[k][:, row] = out[:, channel]
    generator = torch.Generator().manual_seed(6)
    random = [torch.randn(z.shape, generator=generator).to(z) for z in zeros]
    expected = constant.clone()
    for weight, probe in zip(weights, random, strict=True):
        expected += weight @ probe.double().reshape(-1, width)
    seen = run(random)
    if not bool((seen - expected).norm() <= 300 * PROBE * expected.norm()):
        raise UnreadableError("experts' outputs do not enter the sum row by row")
    return constant, weights


def zeroed_change(result: Value, position: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor] | None:
    """A random neuron of a random expert chosen at `position`, zeroed: (seen change, expected change, size).

    The change of the sum is computed by running the recorded operations again from the zeroed activation on.
    """
    products = expert_products(result)
    parts = expert_parts(result)
    choices = [
        (k, row)
        for k, rows in enumerate(parts.rows)
        for row in torch.nonzero(rows.weight[position].abs() > 0).flatten().tolist()
    ]
    if not choices:
        return None
    k, row = choices[int(torch.randint(len(choices), (1,), generator=generator))]
    rows, product = parts.rows[k], products[k]
    neuron = int(torch.randint(rows.hidden.shape[1], (1,), generator=generator))
    assert product.call is not None
    data = data_operand(product.call)
    assert data is not None
    program = extract(result, [data])
    if program is None:
        return None
    places, _ = hidden_rows(torch.arange(data.tensor.numel()).reshape(data.shape), product.tensor, result.shape[-1])
    plain = data.tensor.to(probe_dtype(data.tensor.dtype))
    changed = plain.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[int(places[row, neuron])] = 0
    width = result.shape[-1]
    before = program(plain).double().reshape(-1, width)[position]
    seen = program(changed).double().reshape(-1, width)[position] - before
    part = rows.weight[position, row] * rows.hidden[row, neuron].double() * rows.of(row)[:, neuron].double()
    return seen, -part, before.abs()
