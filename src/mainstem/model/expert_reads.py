"""What experts read: rows of the stream, chosen token by token, times the experts' gate and up matrices.

As with what they write, nothing about it is fixed but where it comes from: the anatomy names the stream value that the
experts of a sublayer read, and each run's local recording shows which expert's matrix met which position. From the
products whose results become the neurons it goes back through views and choices of rows to that stream value; the calls
from their results to the neurons are kept as a program, so that a neuron has a key.

Limits: experts that read scaled rows of the stream, or rows of several values, are not seen; then there are none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mainstem.model.activation import Activation, activation_of
from mainstem.model.behaviour import index_map
from mainstem.model.expert_rows import ExpertRows, UnreadableError, data_operand, expert_rows, hidden_rows
from mainstem.model.experts import expert_products
from mainstem.model.program import one_call
from mainstem.model.recording import Value
from mainstem.model.stream import PRODUCTS

MAX_STEPS = 30


@dataclass(frozen=True, eq=False)
class ReadRows:
    """The rows of one product of experts' matrices with rows of the stream.

    Attributes:
        rows: the product: which expert each row belongs to, its matrix, and what it read.
        position: [rows] the position that each row reads, counted over the batch.
        result: [rows, out] what the product gave.
        activation: how neurons come from this product and its fellows.
        number: which of the activation's reads this product is.
    """

    rows: ExpertRows
    position: Tensor
    result: Tensor
    activation: Activation
    number: int

    def at(self, positions: Tensor) -> "ReadRows":
        """The rows that read one of `positions`; `position` then says which of them."""
        place, row = torch.nonzero(positions[:, None] == self.position[None], as_tuple=True)
        rows, bias = self.rows, self.rows.bias
        own = (rows.expert[row], rows.hidden[row], rows.weight[:, row], rows.matrix.detach(), rows.transposed)
        made = ExpertRows(*own, None if bias is None else bias[row])
        return replace(self, rows=made, position=place, result=self.result[row])


def experts_source(result: Value, inputs: Sequence[Value], is_stream: Callable[[Value], bool]) -> Value | None:
    """The stream value whose rows all experts of a sum read; None where there is no such value."""
    found: dict[int, Value] = {}
    for product in (product for _, products in _neurons(result, inputs) for product in products):
        assert product.call is not None
        data = data_operand(product.call)
        source = None if data is None else next((value for value, _ in _sources(data) if is_stream(value)), None)
        if source is None:
            return None
        found[source.id] = source
    return next(iter(found.values())) if len(found) == 1 else None


def read_rows(result: Value, positions: int) -> tuple[ReadRows, ...]:
    """The rows of all products of a local recording that read the stream at one of its `positions`."""
    found = []
    for hidden, products in _neurons(result, ()):
        width = hidden.shape[-1] if hidden.shape[-1] > 1 else hidden.shape[-2]
        activation = activation_of(hidden, products, tuple(range(len(products))), hidden.tensor.numel() // width)
        for number, product in enumerate(products):
            try:
                rows = _read_rows(product, positions, activation, number)
            except UnreadableError:
                continue
            if rows is not None:
                found.append(rows)
    return tuple(found)


def _neurons(result: Value, inputs: Sequence[Value]) -> list[tuple[Value, list[Value]]]:
    """What each product of experts' output matrices reads, and the first products with matrices met going back."""
    found = []
    for product in expert_products(result, inputs):
        hidden = data_operand(product.call) if product.call is not None else None
        if hidden is not None:
            found.append((hidden, _products_behind(hidden, inputs)))
    return found


def _products_behind(hidden: Value, inputs: Sequence[Value]) -> list[Value]:
    found: dict[int, Value] = {}
    seen = {value.id for value in inputs}
    pending = [hidden]
    while pending:
        value = pending.pop()
        if value.id in seen or value.call is None:
            continue
        seen.add(value.id)
        if value.call.name in PRODUCTS and data_operand(value.call) is not None:
            if value.tensor.numel():
                found[value.id] = value
            continue
        pending.extend(operand for operand in value.call.active_operands() if operand.tensor.is_floating_point())
    return sorted(found.values(), key=lambda value: value.id)


def _sources(value: Value) -> Iterator[tuple[Value, Tensor]]:
    """The value and those before it that it is a view or a choice of rows of, nearest first.

    With each, where in it the elements of `value` are. Step by step, because what is chosen may depend on the source.
    """
    index = torch.arange(value.tensor.numel(), device=value.tensor.device)
    for _ in range(MAX_STEPS):
        yield value, index
        call = value.call
        floating = [o for o in call.active_operands() if o.tensor.is_floating_point()] if call is not None else []
        step = index_map(one_call(value, floating), floating[0].tensor) if len(floating) == 1 else None
        if step is None:
            return
        value, index = floating[0], step.reshape(-1)[index]


def _read_rows(product: Value, positions: int, activation: Activation, number: int) -> ReadRows | None:
    call = product.call
    data = data_operand(call) if call is not None else None
    if data is None:
        return None
    *_, (source, index) = _sources(data)
    width = source.shape[-1]
    if source.tensor.numel() != positions * width:
        return None
    n_out = product.shape[-1] if product.shape[-1] > 1 else product.shape[-2]
    index, hidden = hidden_rows(index.reshape(data.shape), product.tensor, n_out)
    position = index[:, 0] // width
    if hidden != width or not torch.equal(index, position[:, None] * width + torch.arange(width, device=index.device)):
        return None
    weight = torch.ones(1, len(position), dtype=torch.float64, device=index.device)
    result = product.tensor.reshape(-1, n_out)
    return ReadRows(expert_rows(product, weight, n_out), position, result, activation, number)
