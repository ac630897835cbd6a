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
from mainstem.model.behaviour import index_map
from mainstem.model.norms import PROBE, recorded_error
from mainstem.model.program import Program, extract, one_call, probe_dtype, probe_like, zeros_like
from mainstem.model.recorder import Call, Frame, Recording, Value
from mainstem.model.stream import PRODUCTS

INDEXING = frozenset(["__getitem__", "index_select", "select", "take_along_dim", "gather", "embedding"])


@dataclass(frozen=True, eq=False)
class ExpertSum:
    """What discovery keeps of a sum over experts; `reason` says why its neurons cannot be had, else None."""

    site: ExpertSite
    n_experts: int
    width: int
    reason: str | None


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of one product with experts' matrices.

    Attributes:
        expert: [rows] which expert each row belongs to.
        hidden: [rows, d_mlp] the neurons' activations.
        weight: [positions, rows] with what factor each row enters the sum.
        matrix: the experts' output matrices, [d_model, d_mlp] or [n_experts, d_model, d_mlp] after `transposed`.
        bias: [rows, d_model] constant part of the product, or None.
    """

    expert: Tensor
    hidden: Tensor
    weight: Tensor
    matrix: Tensor
    transposed: bool
    bias: Tensor | None

    def of(self, row: int) -> Tensor:
        """[d_model, d_mlp]: the output matrix that `row` was multiplied with."""
        matrix = self.matrix if self.matrix.dim() == 2 else self.matrix[int(self.expert[row])]
        return matrix.T if self.transposed else matrix


@dataclass(frozen=True, eq=False)
class ExpertParts:
    """A sum over experts taken apart: rows of products, and [positions, d_model] that no neuron writes."""

    rows: tuple[ExpertRows, ...]
    constant: Tensor


class UnreadableError(Exception):
    """A sum over experts whose structure is not understood; the message is the reason."""


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
    n_experts = max(_stacked(product) or int(r.expert.max()) + 1 for product, r in zip(products, rows, strict=True))
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


def _is_gathered_weight(value: Value) -> bool:
    """Whether an operand is made of weights that were chosen by token."""
    for _ in range(4):
        call = value.call
        if call is None:
            return False
        floating = [o for o in call.operands() if o.tensor.is_floating_point()]
        if call.name in INDEXING and floating and not any(o.active for o in floating):
            return True
        if len(floating) != 1:
            return False
        value = floating[0]
    return False


def data_operand(call: Call) -> Value | None:
    """The activations among a product's operands, if the other one is a weight."""
    floating = [o for o in call.operands() if o.tensor.is_floating_point() and o.tensor.dim() >= 2]
    data = [o for o in floating if o.active and not _is_gathered_weight(o)]
    weights = [o for o in floating if not o.active or _is_gathered_weight(o)]
    return data[0] if len(data) == 1 and weights else None


def _weight_operand(call: Call, data: Value | None) -> Value:
    """The other factor of a product of `data` with a matrix."""
    return next(o for o in call.operands() if o is not data and o.tensor.is_floating_point() and o.tensor.dim() >= 2)


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


def expert_rows(product: Value, weight: Tensor, width: int) -> ExpertRows:
    """The rows of a product of experts' matrices, each `width` wide, with their weights [positions, rows].

    Raises:
        UnreadableError: with the reason, if the rows are not a matrix times what they read.
    """
    call = product.call
    assert call is not None
    data = data_operand(call)
    assert data is not None
    out = product.tensor.reshape(-1, width)
    n_rows = out.shape[0]
    flat, hidden = hidden_rows(data.tensor, product.tensor, width)
    program = one_call(product, [data])
    assert program is not None
    bias = program(zeros_like(data)).reshape(-1, width)
    matrix, expert = _matrix(call, data, n_rows, hidden)
    rows = ExpertRows(expert, flat, weight, matrix, False, bias if bias.any() else None)
    for transposed in (False, True):
        candidate = ExpertRows(expert, flat, weight, matrix, transposed, rows.bias)
        if _reproduces(candidate, out):
            return candidate
    raise UnreadableError("an expert's rows are not its matrix times its neurons")


def hidden_rows(data: Tensor, product: Tensor, width: int) -> tuple[Tensor, int]:
    """[rows, d_mlp]: the neurons' activations row by row."""
    n_rows = product.numel() // width
    if data.numel() % n_rows == 0 and data.dim() and data.shape[-1] == 1:
        hidden = data.numel() // n_rows
        return data.reshape(n_rows, hidden), hidden
    hidden = data.shape[-1]
    flat = data.reshape(-1, hidden)
    if flat.shape[0] != n_rows:
        if n_rows % flat.shape[0]:
            raise UnreadableError("an expert's product has rows that its input has not")
        flat = flat.repeat(n_rows // flat.shape[0], 1)
    return flat, hidden


def _matrix(call: Call, data: Value, n_rows: int, hidden: int) -> tuple[Tensor, Tensor]:
    """The experts' matrices and which of them each row uses."""
    device = data.tensor.device
    weight = _weight_operand(call, data)
    if weight.active:
        base, index = _gathered(weight)
        chosen = index.tensor.reshape(-1).long()
        return base.tensor, chosen.expand(n_rows) if len(chosen) == 1 else chosen
    if weight.tensor.dim() == 2:
        number = _expert_number(weight, call)
        return weight.tensor.reshape(weight.tensor.shape[-2:]), torch.full((n_rows,), number, device=device)
    ends = [o for o in call.operands() if not o.tensor.is_floating_point()]
    if ends:
        rows = torch.arange(n_rows, device=device)
        return weight.tensor, torch.searchsorted(ends[0].tensor.long(), rows, right=True)
    n_experts = weight.tensor.shape[0]
    return weight.tensor, torch.arange(n_rows, device=device) // (n_rows // n_experts)


def _gathered(weight: Value) -> tuple[Value, Value]:
    """(all matrices, which were chosen) of a weight that was indexed by token."""
    value, moved = weight, False
    while value.call is not None and value.call.name not in INDEXING:
        value = next(o for o in value.call.operands() if o.tensor.is_floating_point())
        moved = True
    assert value.call is not None and (moved or value is weight)
    base = next(o for o in value.call.operands() if o.tensor.is_floating_point())
    index = next((o for o in value.call.operands() if not o.tensor.is_floating_point()), None)
    if index is None or base.tensor.dim() != 3:
        raise UnreadableError("experts' matrices are chosen in a way that cannot be followed")
    return base, index


def _expert_number(weight: Value, call: Call) -> int:
    """Which expert a matrix belongs to: its index in a stack of matrices, or its place in a list of modules."""
    value = weight
    while value.call is not None:
        if value.call.name in INDEXING or value.call.name == "unbind":
            chosen = [a for a in value.call.args[1:] if isinstance(a, int)]
            tensors = [o.tensor for o in value.call.operands() if not o.tensor.is_floating_point()]
            if chosen or tensors:
                return int(chosen[0] if chosen else tensors[0].flatten()[0])
            return value.slot
        floating = [o for o in value.call.operands() if o.tensor.is_floating_point()]
        if len(floating) != 1 or index_map(one_call(value, floating), floating[0].tensor) is None:
            break
        value = floating[0]
    path = call.frame.path.split(".") if call.frame is not None else []
    numbers = [int(word) for word in path if word.isdigit()]
    return numbers[-1] if numbers else 0


def _stacked(product: Value) -> int | None:
    """How many experts' matrices lie in one tensor with the one that a product uses; None where each is its own."""
    assert product.call is not None
    value = _weight_operand(product.call, data_operand(product.call))
    if value.active:  # chosen by token
        return _gathered(value)[0].shape[0]
    while value.tensor.dim() < 3 and value.call is not None:
        floating = [o for o in value.call.operands() if o.tensor.is_floating_point()]
        if len(floating) != 1:
            return None
        value = floating[0]
    return value.shape[0] if value.tensor.dim() == 3 else None


def _reproduces(rows: ExpertRows, out: Tensor) -> bool:
    used = torch.nonzero(rows.weight.abs().amax(0) > 0).flatten().tolist()
    for row in used[:: max(1, len(used) // 6)]:
        matrix = rows.of(row)
        if matrix.shape != (out.shape[1], rows.hidden.shape[1]):
            return False
        expected = matrix.double() @ rows.hidden[row].double()
        if rows.bias is not None:
            expected = expected + rows.bias[row].double()
        size = expected.norm() + out[row].double().norm()
        if not bool((expected - out[row].double()).norm() <= recorded_error(out.dtype) * size):
            return False
    return True


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
