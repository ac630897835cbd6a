"""The key of a value unit: the direction of the stream that activates it, read through the norm before it.

Here are keys of attention; those of neurons are in `neuron_keys`. For an attention value: what the source's value adds
to a direction of the stream at the destination, through W_V and W_O. For a pattern: query . key x scale, with the other
side as it is, rotary embedding at the real positions and norms of queries and keys at their scale (after the subkeys of
Yu et al. 2023). Biases of the matrices add constants of their own.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.certificate import SAFETY
from mainstem.analysis.decompose import product_bound
from mainstem.analysis.parts import pull_back
from mainstem.model.graph import Evaluated, evaluate, maps_to
from mainstem.run.moment import HeadRun, Moment
from mainstem.run.operands import AttentionOperands
from mainstem.units import Unit

Side = Literal["value", "query", "key"]
SIDES: tuple[str, ...] = get_args(Side)


@dataclass(frozen=True, eq=False)
class Key:
    """One inner product of the stream that makes a value unit what it is.

    Attributes:
        side: of attention, value, query or key; value for neurons.
        quantity: what key . x + constant is.
        moment: the run at the position whose stream is read.
        node, stream_node: of the graph: the normed stream that is read, and the stream before its norm.
        direction: [d_model] float64, the key.
        constant: what biases of the matrices add.
        observed: what the model computed.
        slack: the error to expect of `observed` against key . x + constant from the matrices' own arithmetic.
        weights: of attention, what is read of the value, query or key that attention received.
    """

    unit: Unit
    side: Side
    quantity: str
    moment: Moment
    node: int
    stream_node: int
    direction: Float[Tensor, " d_model"]
    constant: float
    observed: float
    slack: float
    weights: Float[Tensor, " d_head"] | None = None

    def in_stream(self) -> Float[Tensor, " d_model"]:
        """The key as a direction of the stream before the read's norm, whose scale is frozen; float64.

        Its inner product with that stream is key . x, but for what the norm's bias adds.
        """
        graph, run = self.moment.anatomy.graph, evaluated(self.moment)
        back = maps_to(graph, self.node, run, self.moment.gates, self.stream_node)[self.stream_node]
        assert back is not None
        return pull_back(back, self.direction)


def evaluated(moment: Moment) -> Evaluated:
    """The stream values of a moment."""
    return evaluate(moment.anatomy.graph, moment.writes, moment.gates)


@dataclass(frozen=True, eq=False)
class HeadReading:
    """What is needed of one head and one source.

    `here` is the run at the destination, `there` at the source; `outputs` [d_model, d_value] carries the head's value
    to the write; both are as a decomposition has them.
    """

    unit: Unit
    here: Moment
    there: Moment
    operands: AttentionOperands
    heads: HeadRun
    outputs: Float[Tensor, "d_model d_value"]

    @property
    def head(self) -> int:
        """The head's number."""
        assert self.unit.head_index is not None
        return self.unit.head_index

    @property
    def source(self) -> int:
        """The source position."""
        assert self.unit.source is not None
        return self.unit.source

    @property
    def weight(self) -> float:
        """The pattern's weight."""
        return float(self.heads.pattern[self.head, self.source])

    @property
    def value(self) -> Float[Tensor, " d_value"]:
        """The source's value, float64."""
        return self.heads.value[self.heads.group()[self.head], self.source].double()


def head_reading(here: Moment, there: Moment, operands: AttentionOperands, unit: Unit) -> HeadReading:
    """The reading of a subvalue or of an attention neuron of one source."""
    write = here.anatomy.writes[operands.write]
    assert write.attention is not None and write.projection is not None and unit.head_index is not None
    heads = here.attention[write.attention.site]
    matrix = write.projection.columns(slice(None)).double() * heads.multiplier
    outputs = matrix[:, write.attention.channels.to(matrix.device)[unit.head_index]]
    return HeadReading(unit, here, there, operands, heads, outputs)


def value_key(reading: HeadReading, direction: Float[Tensor, " d_model"] | None) -> Key:
    """What the source's value adds, through the head's pattern, to a `direction` of what attention writes.

    For an attention neuron `direction` is None: its coefficient pattern x value entry is explained.
    """
    weights = torch.zeros_like(reading.value)
    if direction is None:
        assert reading.unit.neuron is not None
        weights[reading.unit.neuron] = reading.weight
    else:
        weights = reading.weight * (reading.outputs.T @ direction.to(reading.outputs))
    quantity = "pattern x value" if direction is None else "direct effect"
    observed = float(weights @ reading.value)
    return _attention_key(reading, "value", quantity, weights, observed)


def pattern_key(reading: HeadReading, side: Side) -> Key:
    """The score of the pattern before mask and softmax, the other side (and its position) as it is."""
    query, _ = reading.operands.of("query")
    key, _ = reading.operands.of("key")
    n_heads = reading.heads.pattern.shape[0]
    q = query.received[query.head(reading.head, n_heads), reading.here.position]
    k = key.received[key.head(reading.head, n_heads), reading.source]
    if not reading.operands.fused:  # what is received is the product itself, a row over the other side's positions
        weights = torch.zeros_like(q)
        weights[reading.source if side == "query" else reading.here.position] = 1.0
        return _attention_key(reading, side, "score before scale", weights, float(q[reading.source]))
    scale = reading.operands.scaling
    return _attention_key(reading, side, "score", (k if side == "query" else q) * scale, float(q @ k) * scale)


def _attention_key(reading: HeadReading, side: Side, quantity: str, weights: Tensor, observed: float) -> Key:
    carrying, number = reading.operands.of(side)
    moment = reading.here if side == "query" else reading.there
    read = moment.anatomy.reads[number]
    head = carrying.head(reading.head, reading.heads.pattern.shape[0])
    rows, constant = carrying.pull_back(weights, head, moment.position)
    used = rows.nonzero().flatten()
    chosen, matrix = rows[used], read.weight[used].double()
    direction = chosen @ matrix
    x = evaluated(moment).values[read.node][0].double()
    if read.bias is not None:
        constant += float(chosen @ read.bias[used].double())
    error = product_bound(read.weight[used], x, read.dtype, x.abs() * 8 * torch.finfo(torch.float32).eps)
    unit = max(torch.finfo(read.dtype).eps, torch.finfo(torch.float32).eps)
    received = carrying.received[head, moment.position].abs()
    slack = SAFETY * float((chosen.abs() @ error) + 8 * unit * (weights.abs() @ received))
    return Key(
        reading.unit, side, quantity, moment, read.node, read.stream_node, direction, constant, observed, slack, weights
    )


@torch.no_grad()
def through_head(reading: HeadReading, vectors: Float[Tensor, "top d_model"]) -> Float[Tensor, "top d_model"]:
    """Parts of what the source reads, as the head writes them at the destination: W_O W_V, no pattern, before the tail.

    `vectors` are parts of the normed stream that W_V reads.
    """
    carrying, number = reading.operands.of("value")
    read = reading.here.anatomy.reads[number]
    head = carrying.head(reading.head, reading.heads.pattern.shape[0])
    out = []
    for vector in vectors.double():
        rows = torch.zeros(carrying.positions, len(read.weight), dtype=torch.float64, device=vector.device)
        rows[reading.source] = read.weight.double() @ vector
        out.append(reading.outputs @ carrying.linear(rows)[head, reading.source])
    return torch.stack(out)
