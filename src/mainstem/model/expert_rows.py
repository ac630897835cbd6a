"""The rows of one product with experts' matrices: which expert's each is, its neurons, and the matrix it went through.

A product may be of one expert's matrix, of matrices chosen by token and batched, or of all in groups; what it is shows
in its operands. Rows are compared with what the model computed; what does not fit gives a reason.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.behaviour import index_map
from mainstem.model.norms import recorded_error
from mainstem.model.program import one_call, zeros_like
from mainstem.model.recording import Call, Value

INDEXING = frozenset(["__getitem__", "index_select", "select", "take_along_dim", "gather", "embedding"])


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


class UnreadableError(Exception):
    """A sum over experts whose structure is not understood; the message is the reason."""


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


def data_operand(call: Call) -> Value | None:
    """The activations among a product's operands, if the other one is a weight."""
    floating = [o for o in call.operands() if o.tensor.is_floating_point() and o.tensor.dim() >= 2]
    data = [o for o in floating if o.active and not _is_gathered_weight(o)]
    weights = [o for o in floating if not o.active or _is_gathered_weight(o)]
    return data[0] if len(data) == 1 and weights else None


def _weight_operand(call: Call, data: Value | None) -> Value:
    """The other factor of a product of `data` with a matrix."""
    return next(o for o in call.operands() if o is not data and o.tensor.is_floating_point() and o.tensor.dim() >= 2)


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


def stacked_experts(product: Value) -> int | None:
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
