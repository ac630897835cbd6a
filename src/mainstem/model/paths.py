"""From a write back to what its last matrix product reads: attention's result, neurons, or neither.

The path consists of products with weights (composed into one projection, so that low-rank adapters count as part of
the matrix), views, constant factors, gates and norms. It ends at an attention product (two factors that both depend on
the tokens, the first a pattern: no negative entries, rows of sum at most 1), or at a non-linearity (neurons).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mainstem.model.anatomy import Projection
from mainstem.model.behaviour import affine, index_map
from mainstem.model.function_taps import FUSED
from mainstem.model.norms import PROBE, Norm, constants_of, fit_norm, recorded_error
from mainstem.model.program import extract, near, one_call, probe_dtype, zeros_like
from mainstem.model.recording import Call, Value
from mainstem.model.stream import PRODUCTS, is_weight_product

MAX_STEPS = 60
CHECKED = 64


@dataclass(eq=False)
class PathStep:
    """One step of a path: `kind` is product, view, factor, gate or norm; `value` its result, `source` its input.

    `index` says for a view where each element comes from.
    """

    kind: str
    value: Value
    source: Value
    factor: Tensor | None = None
    gate: Value | None = None
    norm: Norm | None = None
    index: Tensor | None = None


@dataclass(eq=False)
class Path:
    """Steps from a write back to `source`; `core` is the attention call that made `source`, if one did."""

    write: Value
    source: Value
    steps: list[PathStep] = field(default_factory=list)
    core: Call | None = None

    @property
    def products(self) -> list[int]:
        """Which steps are products with a weight."""
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
        slack = max(4 * torch.finfo(tensor.dtype).eps, 300 * PROBE)
        if bool((tensor >= 0).all()) and tensor.any() and bool((tensor.double().sum(-1) <= 1 + slack).all()):
            return pattern, value
    return None


def trace_back(value: Value, attends: bool) -> Path:
    """The path behind a write; `attends` says whether there is attention to look for."""
    if attends:
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
    index = index_map(program, operand.tensor)
    if index is not None:
        return PathStep("view", value, operand, index=index.cpu())
    if operand.tensor.numel() != value.tensor.numel():
        return None
    form = affine(program, [operand.tensor], value.shape[-1])
    if form is None or form.constant.any():
        return None
    factor = form.factors[0]
    if not near(factor, factor[:1], rtol=1e-5, atol=1e-9):
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
        if not torch.allclose(form.factors[0], _broadcast(gate, value, form.factors[0]), rtol=100 * PROBE, atol=1e-7):
            continue
        if _walk(carrier, True, depth + 1).core is not None:
            return PathStep("gate", value, carrier, gate=gate)
    return None


def _broadcast(gate: Value, value: Value, like: Tensor) -> Tensor:
    """The gate's numbers where a product with it would put them; not a number where it does not fit."""
    try:
        return gate.tensor.double().expand(value.shape).reshape(like.shape)
    except RuntimeError:
        return torch.full_like(like, torch.nan)


def _norm_step(value: Value) -> PathStep | None:
    """A norm over the last axis (all heads together, or each head)."""
    frontier = {value.id: value}
    for _ in range(20):
        latest = frontier.pop(max(frontier))
        if latest.call is None or (
            latest is not value and (is_weight_product(latest.call) or is_attention(latest.call))
        ):
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

    Verified on what the run computed; None if the piece is not such a map.
    """
    products = path.products
    if not products:
        return None
    steps = path.steps[: products[-1] + 1]
    source = steps[-1].source
    factors: list[Tensor] = []
    constant: Tensor | None = None
    for step in reversed(steps):
        if step.kind == "product":
            found = linear_map(step.value, step.source)
            if found is None:
                return None
            factors.append(found[0])
            carried = None if constant is None else found[0].double() @ constant
            own = None if found[1] is None else found[1].double()
            constant = own if carried is None else carried if own is None else carried + own
        elif step.kind == "factor" and step.factor is not None:
            factors.append(step.factor)
            constant = None if constant is None else constant * step.factor.double()
        elif step.kind != "view" or not _keeps_order(step):
            return None
    whole = Projection(tuple(factors))
    width = path.write.shape[-1]
    index = _some(width, path.write.tensor.device)
    expected = _rows_of(whole, index)(
        source.tensor.detach().reshape(-1, whole.n_in).to(probe_dtype(source.tensor.dtype))
    )
    if constant is not None:
        expected = expected + constant[index].to(expected)
    seen = path.write.tensor.reshape(-1, width)[:, index]
    error = recorded_error(path.write.tensor.dtype)
    if expected.shape != seen.shape or not bool((seen - expected).norm() <= error * expected.norm()):
        return None
    return whole, constant


def _some(width: int, device: torch.device) -> Tensor:
    """Some channels out of `width`, to compare where comparing all would cost a forward pass."""
    return torch.linspace(0, width - 1, min(width, CHECKED), device=device).round().long()


def _rows_of(whole: Projection, index: Tensor) -> Projection:
    """The projection to the output channels `index` alone."""
    factors = list(whole.factors)
    for i in reversed(range(len(factors))):
        factors[i] = factors[i][index]
        if factors[i].dim() == 2:
            break
    return Projection(tuple(factors))


def _keeps_order(step: PathStep) -> bool:
    same = step.source.tensor.numel() == step.value.tensor.numel()
    return same and torch.equal(step.source.tensor.reshape(-1), step.value.tensor.reshape(-1).to(step.source.tensor))


def linear_map(value: Value, source: Value, axis: int | None = None) -> tuple[Tensor, Tensor | None] | None:
    """The matrix [out, in] and the constant [out] of a product with a weight, row by row.

    A row of the result is its last axis, unless the `axis` is given along which rows are counted: then all other axes
    are in a row. A row of `source` is as many of its numbers as there are for each row of the result (several axes,
    where the product sums over several). The matrix is the model's own tensor, or, where none acts like the product did
    in the run, measured. None if it is no such map.
    """
    call = value.call
    program: Callable[[Tensor], Tensor] | None = one_call(value, [source])
    rows = value.tensor.numel() // max(value.shape[-1], 1) if axis is None else value.shape[axis]
    program = program if axis is None else _rows_first(program, axis)
    if call is None or program is None or rows == 0 or source.tensor.numel() % rows:
        return None
    n_in, n_out = source.tensor.numel() // rows, value.tensor.numel() // rows
    constant = _constant(program, call, source, rows, n_out)
    if constant is None:
        return None
    flat = source.tensor.detach().reshape(rows, n_in).to(probe_dtype(source.tensor.dtype))
    index = _some(n_out, value.tensor.device)
    result = value.tensor if axis is None else value.tensor.movedim(axis, 0)
    seen = result.reshape(rows, n_out)[:, index].to(flat) - constant[index].to(flat)

    def acts(matrix: Tensor) -> bool:
        expected = flat @ matrix[index].to(flat).T
        return bool((seen - expected).norm() <= recorded_error(value.tensor.dtype) * expected.norm())

    bias = constant if constant.any() else None
    for operand in call.operands():
        tensor = operand.tensor
        if operand.active or tensor.dim() < 2 or tensor.numel() != n_in * n_out or not tensor.is_floating_point():
            continue
        for matrix in (tensor.reshape(n_out, n_in), tensor.reshape(n_in, n_out).T):
            if acts(matrix):
                return matrix.detach(), bias
    matrix = _measured(program, source, constant.expand(rows, -1), n_in)
    return (matrix, bias) if matrix is not None and acts(matrix) else None


def _rows_first(program: Callable[[Tensor], Tensor] | None, axis: int) -> Callable[[Tensor], Tensor] | None:
    """The program with an axis of its result moved to the front."""
    return None if program is None else lambda x: program(x).movedim(axis, 0)


def _constant(program: Callable[[Tensor], Tensor], call: Call, source: Value, rows: int, n_out: int) -> Tensor | None:
    """[out] what the product gives for zeros; None if it is not the same for every row."""
    if len(call.operands()) == 2:  # a product of two factors has none
        return torch.zeros(n_out, dtype=probe_dtype(source.tensor.dtype), device=source.tensor.device)
    try:
        constant = program(zeros_like(source)).detach().reshape(rows, n_out)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return constant[0].clone() if torch.equal(constant, constant[:1].expand_as(constant)) else None


def _measured(program: Callable[[Tensor], Tensor], source: Value, constant: Tensor, n_in: int) -> Tensor | None:
    """The matrix by running the product on unit vectors, as many at a time as it has rows."""
    if n_in > 65536:
        return None
    rows = constant.shape[0]
    columns = []
    for start in range(0, n_in, rows):
        probe = zeros_like(source).reshape(rows, n_in)
        count = min(rows, n_in - start)
        probe[torch.arange(count), start + torch.arange(count)] = 1
        try:
            out = program(probe.reshape(source.shape))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        columns.append((out.reshape(constant.shape) - constant)[:count])
    return torch.cat(columns).T.contiguous().to(source.tensor.dtype)
