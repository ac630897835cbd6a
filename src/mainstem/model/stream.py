"""Finding the residual stream in a recorded run: from the logits back to every write.

From the logits back to the product with the unembedding, from its input back to the first sum of two stream values
(the stream before the final norm; what lies between is the readout), and from there back through everything that acts
linearly on the stream: sums, factors, gates per position, norms with their scale frozen. What is left is a write. No
operation is known by name except products with a weight; all else is told from its behaviour (`behaviour`, `norms`).

Limits: several parallel streams are refused; a sum inside a sublayer's last step gives two writes of that sublayer.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mainstem.errors import ParallelStreamsError, RefusedError
from mainstem.model.behaviour import Affine, affine, index_map
from mainstem.model.norms import PROBE, Norm, constants_of, fit_norm
from mainstem.model.program import extract, near, one_call, probe_like
from mainstem.model.quantised import quantised_reason
from mainstem.model.recording import Call, Recording, Value

PRODUCTS = frozenset(
    [
        *["linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "tensordot", "conv1d", "conv2d"],
        *["grouped_mm", "_grouped_mm", "grouped_mm_fallback", "__matmul__", "__rmatmul__"],
    ]
)
"""Names of torch's products; with a weight as one operand they end the stream's linear part."""

MAX_DOMINATORS = 6


@dataclass(eq=False)
class StepTerm:
    """A summand found in the recording."""

    value: Value
    factor: Tensor | float = 1.0
    gate: Value | None = None
    gate_power: int = 1
    gate_factor: float = 1.0


@dataclass(eq=False)
class Step:
    """How a stream value came about: from `terms` (a sum), from one term through `norm`, or, with neither, a write."""

    value: Value
    terms: list[StepTerm] = field(default_factory=list)
    bias: Tensor | None = None
    norm: Norm | None = None


class StreamWalk:
    """Expands stream values of one recording; `width` is d_model, `positions` the number of tokens recorded."""

    def __init__(self, recording: Recording, width: int, positions: int) -> None:
        self.recording = recording
        self.width = width
        self.size = width * positions
        self.positions = positions
        self.memo: dict[int, Step] = {}

    def full(self, value: Value) -> bool:
        """Whether the value has one stream vector for each position."""
        return value.tensor.numel() == self.size and value.tensor.is_floating_point()

    def step(self, value: Value) -> Step:
        """The step that made `value`; views and casts that lose nothing are passed over."""
        known = self.memo.get(value.id)
        if known is None:
            known = self.memo[value.id] = self._expand(value)
        return known

    def _expand(self, value: Value) -> Step:
        call = value.call
        if call is None or call.func is None or is_weight_product(call) or _chooses_rows(call):
            return Step(value)
        operands = [o for o in call.operands() if self._summand(o)]
        if operands:
            form = affine(one_call(value, operands), [o.tensor for o in operands], self.width)
            if form is None and len(operands) == 2:
                return self._gated(value, operands) or self._normed(value) or Step(value)
            found = self._affine_step(value, operands, form) if form is not None else None
            if found is not None and not any(term.gate for term in found.terms):
                return found
            return self._normed(value) or found or Step(value)
        return Step(value)

    def _summand(self, value: Value) -> bool:
        """Whether an operand is a write of its own: what depends on the tokens, and tables looked up by position."""
        if not self.full(value):
            return False
        rows = value.tensor.reshape(self.positions, self.width)
        if value.active:
            return not torch.equal(rows, rows[:1].expand_as(rows)) or not _shape_alone(value)
        if value.call is None:
            return False
        looked_up = any(not operand.tensor.is_floating_point() for operand in value.call.operands())
        return looked_up or not torch.equal(rows, rows[:1].expand_as(rows))

    def _affine_step(self, value: Value, operands: list[Value], form: Affine) -> Step | None:
        terms = []
        for operand, factor in zip(operands, form.factors, strict=True):
            if not factor.any():
                continue
            if _same_everywhere(factor):
                constant = _constant(factor[0])
                own = self._own(value, constant) if isinstance(constant, Tensor) else constant
                terms.append(StepTerm(operand, own))
                continue
            term = self._gate_term(value, operand, factor)
            if term is None:
                return None
            terms.append(term)
        if not _same_everywhere(form.constant):
            return None
        bias = form.constant[0] if form.constant[0].any() else None
        return Step(value, terms, None if bias is None else self._own(value, bias))

    def _own(self, value: Value, bias: Tensor) -> Tensor:
        """The model's own tensor, where the bias or factor found by probing is one."""
        assert value.call is not None
        for operand in value.call.operands():
            tensor = operand.tensor
            if (
                not operand.active
                and tensor.numel() == self.width
                and torch.allclose(tensor.double().reshape(-1), bias)
            ):
                return tensor.detach().reshape(-1)
        return bias

    def _gate_term(self, value: Value, operand: Value, factor: Tensor) -> StepTerm | None:
        """The factor as a power of another operand of the call that has one number, or one vector, per position."""
        assert value.call is not None
        for other in value.call.active_operands():
            if other is operand or other.tensor.numel() not in (self.positions, self.size):
                continue
            seen = other.tensor.double().reshape(self.positions, -1)
            for power in (1, -1):
                ratio = factor / seen if power > 0 else factor * seen
                constant = float(ratio.median())
                if torch.allclose(ratio, torch.full_like(ratio, constant), rtol=100 * PROBE):
                    return StepTerm(operand, 1.0, other, power, 1.0 if abs(constant - 1) < 1e-5 else constant)
        return None

    def _gated(self, value: Value, operands: list[Value]) -> Step | None:
        """A product of two stream-sized values: the one that is a linear image carries, the other is its gate."""
        linear = [self._is_linear_image(o) for o in operands]
        if sum(linear) != 1:
            return None
        carrier = operands[linear.index(True)]
        form = affine(one_call(value, [carrier]), [carrier.tensor], self.width)
        return None if form is None else self._affine_step(value, [carrier], form)

    def _is_linear_image(self, value: Value) -> bool:
        while value.call is not None and value.call.func is not None:
            if is_weight_product(value.call):
                return True
            active = value.call.active_operands()
            if len(active) != 1 or affine(one_call(value, active), [active[0].tensor], self.width) is None:
                return False
            value = active[0]
        return False

    def _normed(self, value: Value) -> Step | None:
        """The norm that made `value` from an earlier stream value, if one did."""
        for source in self._dominators(value):
            program = extract(value, [source])
            if program is None or not program.calls:
                continue
            tensors, numbers = constants_of(program)
            norm = fit_norm(program, source.tensor, value.tensor, tensors, numbers)
            if norm is not None:
                return Step(value, [StepTerm(source)], None, norm)
        return None

    def _dominators(self, value: Value) -> list[Value]:
        """Nearest stream-sized values through which everything that `value` depends on passes."""
        found: list[Value] = []
        frontier = {value.id: value}
        for _ in range(40):
            latest = frontier.pop(max(frontier))
            if latest.call is None or (latest is not value and is_weight_product(latest.call)):
                break
            frontier |= {o.id: o for o in latest.call.active_operands()}
            if len(frontier) == 1:
                only = next(iter(frontier.values()))
                if self.full(only):
                    found.append(only)
                    if len(found) == MAX_DOMINATORS:
                        break
            if not frontier:
                break
        return found


def is_weight_product(call: Call) -> bool:
    """Whether the call multiplies an activation with a matrix that does not depend on the tokens."""
    if call.name not in PRODUCTS:
        return False
    matrices = [o for o in call.operands() if not o.active and o.tensor.dim() >= 2]
    return len(call.active_operands()) >= 1 and bool(matrices)


def _chooses_rows(call: Call) -> bool:
    """Whether the call works on rows chosen by the tokens (routing).

    Then it is no sum of stream values, even where all rows happen to be chosen.
    """
    return any(not operand.tensor.is_floating_point() for operand in call.active_operands())


def _shape_alone(value: Value, depth: int = 0) -> bool:
    """Whether the value takes nothing but its shape from what depends on the tokens."""
    active = value.call.active_operands() if value.call is not None else []
    program = one_call(value, active)
    if program is None or not active or not all(operand.tensor.is_floating_point() for operand in active):
        return False
    if depth < MAX_DOMINATORS and all(_shape_alone(operand, depth + 1) for operand in active):
        return True
    return torch.equal(program(*[probe_like(operand, 9) for operand in active]).to(value.tensor.dtype), value.tensor)


def _same_everywhere(rows: Tensor) -> bool:
    """Whether all positions have the same row."""
    return near(rows, rows[:1], rtol=1e-5, atol=1e-9)


def _constant(row: Tensor) -> Tensor | float:
    row = row.detach()
    first = float(row[0])
    if near(row, torch.full_like(row, first), rtol=1e-6):
        return float(round(first)) if abs(first - round(first)) < 1e-6 else first
    return row


def find_head(recording: Recording, logits: Tensor) -> tuple[Value, Value, Value]:
    """The logits, the product with the unembedding that they come from, and its input.

    Raises:
        RefusedError: if the logits are not an elementwise function of such a product.
    """
    value = recording.value_of(logits)
    start = value
    while value is not None and value.call is not None:
        if is_weight_product(value.call):
            inputs = value.call.active_operands()
            if len(inputs) == 1 and start is not None:
                return start, value, inputs[0]
            break
        active = value.call.active_operands()
        value = active[0] if len(active) == 1 else None
    where = start.call.frame.path if start is not None and start.call is not None and start.call.frame else "logits"
    raise RefusedError(
        "The logits are not a function of one product with an unembedding matrix",
        where or "logits",
        quantised_reason(start) or "Mainstem reads predictions through that product, and sees none here",
    )


def find_root(recording: Recording, value: Value, positions: int) -> tuple[StreamWalk, Value]:
    """From the head's input back to the first sum of two stream values, and the walk that found it.

    Raises:
        ParallelStreamsError: if the walk meets values of several streams.
        RefusedError: if it meets neither.
    """
    walk = StreamWalk(recording, value.shape[-1], positions)
    while True:
        step = walk.step(value)
        if len(step.terms) > 1:
            return walk, value
        following = step.terms[0].value if step.terms else _through_readout(walk, value)
        if following is None:
            raise _no_stream(walk, value)
        value = following
        if value.shape[-1] != walk.width and value.tensor.numel() // positions == value.shape[-1]:
            walk = StreamWalk(recording, value.shape[-1], positions)


def _through_readout(walk: StreamWalk, value: Value) -> Value | None:
    """The one stream value behind a non-linear readout (a transform or projection before the unembedding)."""
    for source in walk._dominators(value):
        return source
    call = value.call
    if call is None:
        return None
    active = call.active_operands()
    full = [o for o in active if o.tensor.numel() // o.shape[-1] == walk.positions]
    return full[0] if len(active) == 1 and full else None


def _no_stream(walk: StreamWalk, value: Value) -> RefusedError | ParallelStreamsError:
    """Why the walk ends at `value` without having met a sum."""
    call = value.call
    where = call.frame.path if call is not None and call.frame is not None and call.frame.path else "the model"
    operands = call.active_operands() if call is not None else []
    count = _parallel(walk, operands)
    if count:
        return ParallelStreamsError(
            f"This model keeps {count} parallel residual streams",
            where,
            "Mainstem accounts for a single one, which all blocks add to",
        )
    rows = [o.tensor.numel() // walk.width for o in operands if o.shape[-1:] == (walk.width,)]
    if rows and max(rows) > walk.positions:
        return RefusedError(
            f"The stream has {max(rows)} positions for {walk.positions} tokens",
            where,
            "the model puts positions of its own before or between the tokens",
        )
    return RefusedError(
        "No sum of two stream values leads to the unembedding",
        where,
        "the model has no residual stream that can be seen in its operations",
    )


def _parallel(walk: StreamWalk, operands: list[Value]) -> int:
    """How many streams the operands hold: stacked in one value, or side by side in the last axis of a joined one."""
    for operand in operands:
        size = operand.tensor.numel()
        if operand.shape[-1] == walk.width and size > walk.size and size % walk.size == 0:
            return size // walk.size
    widths = [o.shape[-1] for o in operands if o.tensor.numel() == walk.positions * o.shape[-1]]
    joined = len(widths) == len(operands) > 1 and len(set(widths)) == 1
    return len(widths) if joined and sum(widths) == walk.width else 0


__all__ = ["Step", "StepTerm", "StreamWalk", "find_head", "find_root", "index_map", "is_weight_product"]
