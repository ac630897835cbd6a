"""From a write back to what its last matrix product reads: attention's result, neurons, or neither.

The path consists of products with weights (composed into one projection, so that low-rank adapters count as part of
the matrix), views, constant factors, gates and norms. It ends at an attention product (two factors that both depend on
the tokens, the first a pattern: no negative entries, rows of sum at most 1), or at a non-linearity (neurons).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mainstem.model.anatomy import Projection
from mainstem.model.behaviour import affine, index_map
from mainstem.model.norms import Norm, constants_of, fit_norm, precision
from mainstem.model.program import extract, one_call
from mainstem.model.recorder import Call, Value
from mainstem.model.stream import PRODUCTS, is_weight_product

MAX_STEPS = 60
FUSED = "scaled_dot_product_attention"


@dataclass(eq=False)
class PathStep:
    """One step of a path: `kind` is product, view, factor, gate or norm; `value` its result, `source` its input."""

    kind: str
    value: Value
    source: Value
    factor: Tensor | None = None
    gate: Value | None = None
    norm: Norm | None = None


@dataclass(eq=False)
class Path:
    """Steps from a write back to `source`; `core` is the attention call that made `source`, if one did."""

    write: Value
    source: Value
    steps: list[PathStep] = field(default_factory=list)
    core: Call | None = None

    @property
    def products(self) -> list[int]:
        return [i for i, step in enumerate(self.steps) if step.kind == "product"]


def is_attention(call: Call) -> bool:
    """Whether the call mixes values of positions by a pattern: the fused kernel, or pattern times values."""
    if call.name == FUSED:
        return True
    return pattern_operands(call) is not None


def pattern_operands(call: Call) -> tuple[Value, Value] | None:
    """(pattern, value) of an unfused attention product."""
    if call.name not in PRODUCTS:
        return None
    operands = call.active_operands()
    if len(operands) != 2:
        return None
    for pattern, value in (operands, operands[::-1]):
        tensor = pattern.tensor
        if tensor.dim() < 2 or tensor.shape[-1] < 2 or not tensor.is_floating_point():
            continue
        if bool((tensor >= 0).all()) and bool((tensor.double().sum(-1) <= 1 + 300 * precision(tensor.dtype)).all()):
            return pattern, value
    return None


def trace_back(value: Value, width_axis: bool = True) -> Path:
    """The path behind a write."""
    to_core = _walk(value, through_gates=True, depth=0)
    if to_core.core is not None:
        return to_core
    return _trim(_walk(value, through_gates=False, depth=0))


def _trim(path: Path) -> Path:
    """A path that found no attention ends at its first product, or at the last of a chain of low rank."""
    products = path.products
    if not products:
        return path
    end = products[0]
    for previous, following in zip(products, products[1:], strict=False):
        between = path.steps[previous + 1 : following]
        narrow = path.steps[previous].source.shape[-1] < path.steps[previous].value.shape[-1]
        wider = path.steps[following].source.shape[-1] >= path.steps[previous].source.shape[-1]
        if all(step.kind in ("view", "factor") for step in between) and narrow and wider:
            end = following
        else:
            break
    return Path(path.write, path.steps[end].source, path.steps[: end + 1])


def _walk(value: Value, through_gates: bool, depth: int) -> Path:
    path = Path(value, value)
    current = value
    for _ in range(MAX_STEPS):
        call = current.call
        if call is None or call.func is None:
            return path
        if is_attention(call):
            path.core = call
            return path
        step = _step(current, call, through_gates, depth)
        if step is None:
            return path
        path.steps.append(step)
        current = path.source = step.source
    return path


def _step(value: Value, call: Call, through_gates: bool, depth: int) -> PathStep | None:
    active = call.active_operands()
    if is_weight_product(call):
        return PathStep("product", value, active[0]) if len(active) == 1 else None
    if len(active) == 1:
        found = _plain_step(value, active[0])
        return found or (_norm_step(value) if through_gates else None)
    if len(active) == 2 and through_gates:
        return _norm_step(value) or _gate_step(value, active, depth)
    return None


def _plain_step(value: Value, operand: Value) -> PathStep | None:
    program = one_call(value, [operand])
    if index_map(program, operand.tensor) is not None:
        return PathStep("view", value, operand)
    if operand.tensor.numel() != value.tensor.numel():
        return None
    form = affine(program, [operand.tensor], value.shape[-1])
    if form is None or form.constant.any():
        return None
    factor = form.factors[0]
    if not torch.allclose(factor, factor[:1].expand_as(factor), rtol=1e-5, atol=1e-9):
        return None
    return PathStep("factor", value, operand, factor=factor[0])


def _gate_step(value: Value, active: list[Value], depth: int) -> PathStep | None:
    """A product of two values one of which comes from attention: that one carries, the other is its gate."""
    if depth > 1:
        return None
    for carrier, gate in (active, active[::-1]):
        if carrier.tensor.numel() != value.tensor.numel():
            continue
        form = affine(one_call(value, [carrier]), [carrier.tensor], value.shape[-1])
        if form is None or form.constant.any():
            continue
        expected = gate.tensor.double().expand(value.shape).reshape(form.factors[0].shape)
        if not torch.allclose(form.factors[0], expected, rtol=100 * precision(value.tensor.dtype), atol=1e-7):
            continue
        if _walk(carrier, True, depth + 1).core is not None:
            return PathStep("gate", value, carrier, gate=gate)
    return None


def _norm_step(value: Value) -> PathStep | None:
    """A norm over the last axis (all heads together, or each head)."""
    frontier = {value.id: value}
    for _ in range(20):
        latest = frontier.pop(max(frontier))
        if latest.call is None or (latest is not value and (is_weight_product(latest.call) or is_attention(latest.call))):
            return None
        frontier |= {o.id: o for o in latest.call.active_operands()}
        if len(frontier) != 1:
            continue
        source = next(iter(frontier.values()))
        if source.shape[-1:] != value.shape[-1:] or source.tensor.numel() != value.tensor.numel():
            continue
        program = extract(value, [source])
        if program is None or not program.calls or value.shape[-1] < 2:
            return None
        norm = fit_norm(program, source.tensor, value.tensor, *constants_of(program))
        if norm is not None:
            return PathStep("norm", value, source, norm=norm)
    return None


def projection(path: Path) -> tuple[Projection, Tensor | None] | None:
    """The matrices from the input of the path's last (earliest) product to the write, and the write's constant part.

    Verified on a probe; None if the piece is not such a map.
    """
    products = path.products
    if not products:
        return None
    steps = path.steps[: products[-1] + 1]
    source = steps[-1].source
    factors: list[Tensor] = []
    for step in reversed(steps):
        if step.kind == "product":
            matrix = weight_matrix(step.value, step.source)
            if matrix is None:
                return None
            factors.append(matrix)
        elif step.kind == "factor" and step.factor is not None:
            factors.append(step.factor)
        elif step.kind != "view" or not _keeps_order(step):
            return None
    whole = Projection(tuple(factors))
    program = extract(path.write, [source])
    if program is None:
        return None
    width = path.write.shape[-1]
    constant = program(torch.zeros_like(source.tensor)).double().reshape(-1, width)
    probe = torch.randn(source.shape, generator=torch.Generator().manual_seed(3)).to(source.tensor)
    seen = program(probe).double().reshape(-1, width)
    expected = whole(probe.double()).reshape(-1, width) + constant
    close = (seen - expected).norm() <= 100 * precision(source.tensor.dtype) * expected.norm()
    same = torch.allclose(constant, constant[:1].expand_as(constant), rtol=1e-5, atol=1e-9)
    if not bool(close) or not same:
        return None
    return whole, constant[0] if constant.any() else None


def _keeps_order(step: PathStep) -> bool:
    same = step.source.tensor.numel() == step.value.tensor.numel()
    return same and torch.equal(step.source.tensor.reshape(-1), step.value.tensor.reshape(-1).to(step.source.tensor))


def weight_matrix(value: Value, source: Value) -> Tensor | None:
    """The matrix [out, in] of a product with a weight: the model's own tensor, or, failing that, measured."""
    call = value.call
    assert call is not None
    n_in, n_out = source.shape[-1], value.shape[-1]
    for operand in call.operands():
        tensor = operand.tensor
        if operand.active or tensor.dim() < 2 or tensor.numel() != n_in * n_out:
            continue
        flat = tensor.squeeze()
        for matrix in (flat, flat.T) if flat.dim() == 2 else ():
            if matrix.shape == (n_out, n_in) and _acts_as(value, source, matrix):
                return matrix.detach()
    return _measured(value, source, n_in)


def _acts_as(value: Value, source: Value, matrix: Tensor) -> bool:
    program = one_call(value, [source])
    if program is None:
        return False
    probe = torch.randn(source.shape, generator=torch.Generator().manual_seed(4)).to(source.tensor)
    zero = program(torch.zeros_like(source.tensor))
    seen = (program(probe) - zero).double().reshape(-1, matrix.shape[0])
    expected = probe.double().reshape(-1, matrix.shape[1]) @ matrix.double().T
    return bool((seen - expected).norm() <= 100 * precision(source.tensor.dtype) * expected.norm())


def _measured(value: Value, source: Value, n_in: int) -> Tensor | None:
    """The matrix by running the product on unit vectors, as many at a time as the recording has positions."""
    program = one_call(value, [source])
    if program is None or n_in > 65536:
        return None
    rows = source.tensor.numel() // n_in
    zero = program(torch.zeros_like(source.tensor))
    columns = []
    for start in range(0, n_in, rows):
        probe = torch.zeros(rows, n_in, dtype=source.tensor.dtype, device=source.tensor.device)
        count = min(rows, n_in - start)
        probe[torch.arange(count), start + torch.arange(count)] = 1
        out = (program(probe.reshape(source.shape)) - zero).reshape(-1, value.shape[-1])
        if out.shape[0] != rows:
            return None
        columns.append(out[:count])
    matrix = torch.cat(columns).T.contiguous()
    return matrix if _acts_as(value, source, matrix) else None
