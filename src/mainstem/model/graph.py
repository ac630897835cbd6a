"""The stream as a graph: writes, weighted sums and norms, down to the stream value before the final norm.

The graph holds no activations. Given what the writes of a run were, `evaluate` gives every stream value (in the
model's dtype, so that each addition rounds as it did in the model), and `maps_to_root` gives for each node the linear
map that carries a vector added there to the root, with every norm's scale frozen at its value in the run.

A map is diag(a) + U W^T (`LinearMap`): additions, factors and RMS norms are diagonal, each centring adds one column,
and both forms are closed under sums and products, so streams that split and meet again (an embedding mixed into every
layer) cost nothing extra.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.hooks import Site
from mainstem.model.norms import Norm


@dataclass(frozen=True)
class Gate:
    """A factor that the run itself computed: the value at `site`, to the power of 1 or -1, times `factor`."""

    site: Site
    power: int
    factor: float


@dataclass(frozen=True, eq=False)
class Term:
    """One summand: the value of `node` times a constant factor (a number or [d_model]) or a gate."""

    node: int
    factor: Tensor | float = 1.0
    gate: Gate | None = None


@dataclass(frozen=True, eq=False)
class WriteNode:
    """What write number `write` added, before any tail."""

    write: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class SumNode:
    """A sum of terms and perhaps a constant [d_model], rounded to `dtype`."""

    terms: tuple[Term, ...]
    bias: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class NormNode:
    """A norm of a stream value."""

    node: int
    norm: Norm
    dtype: torch.dtype


Node = WriteNode | SumNode | NormNode
Gates = Mapping[Gate, Tensor]


@dataclass(frozen=True, eq=False)
class StreamGraph:
    """Nodes in the order in which the model computes them; `root` is the stream before the final norm."""

    nodes: tuple[Node, ...]
    root: int


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Stream values of a run: `values` [positions, d_model] in the model's dtype, and the rounding of each sum."""

    values: list[Tensor]
    rounding: list[Tensor | None]
    scales: list[Tensor | None]


def children(graph: StreamGraph, node: int) -> list[int]:
    """The nodes that a node is made of."""
    made = graph.nodes[node]
    if isinstance(made, WriteNode):
        return []
    return [made.node] if isinstance(made, NormNode) else [term.node for term in made.terms]


def behind(graph: StreamGraph, end: int) -> set[int]:
    """The nodes that a node is made of in the end, itself with them."""
    found = {end}
    for i in range(end, -1, -1):
        if i in found:
            found.update(children(graph, i))
    return found


def writes_behind(graph: StreamGraph, end: int) -> set[int]:
    """The numbers of the writes that a node is made of in the end."""
    nodes = (graph.nodes[i] for i in behind(graph, end))
    return {node.write for node in nodes if isinstance(node, WriteNode)}


def gates_of(graph: StreamGraph) -> list[Gate]:
    """The gates of all sums, each once."""
    sums = [node for node in graph.nodes if isinstance(node, SumNode)]
    return list(dict.fromkeys(term.gate for node in sums for term in node.terms if term.gate is not None))


def term_factor(term: Term, gates: Gates, like: Tensor) -> Tensor | float:
    """The factor of a term, as a number or a tensor that multiplies [positions, d_model]."""
    if term.gate is None:
        return term.factor.to(like) if isinstance(term.factor, Tensor) else term.factor
    value = gates[term.gate].to(like)
    return (value if term.gate.power > 0 else 1 / value) * term.gate.factor


def evaluate(graph: StreamGraph, writes: Sequence[Tensor], gates: Gates) -> Evaluated:
    """Every stream value from the writes ([positions, d_model] each), rounding where the model rounded."""
    values: list[Tensor] = []
    rounding: list[Tensor | None] = []
    scales: list[Tensor | None] = []
    for node in graph.nodes:
        exact = scale = None
        if isinstance(node, WriteNode):
            value = writes[node.write]
        elif isinstance(node, NormNode):
            x = values[node.node].double()
            scale = node.norm.scale(x)
            value = node.norm(x).to(node.dtype)
        else:
            value, exact = _sum(node, values, gates)
        values.append(value)
        rounding.append(None if exact is None else value.double() - exact)
        scales.append(scale)
    return Evaluated(values, rounding, scales)


def _sum(node: SumNode, values: list[Tensor], gates: Gates) -> tuple[Tensor, Tensor]:
    """The sum as the model rounds it, and exactly."""
    value = exact = None
    for term in node.terms:
        x = values[term.node]
        wide = x.double()
        if term.gate is not None or not isinstance(term.factor, float) or term.factor != 1.0:
            x = x * term_factor(term, gates, x)
            wide = wide * term_factor(term, gates, wide)
        value = x if value is None else value + x
        exact = wide if exact is None else exact + wide
    assert value is not None and exact is not None
    if node.bias is not None:
        value = value + node.bias.to(value)
        exact = exact + node.bias.to(exact)
    return value.to(node.dtype), exact


def stream_values(graph: StreamGraph, writes: Sequence[Tensor], gates: Gates) -> Tensor:
    """The root alone, in the model's dtype and for any number of positions: cheaper than `evaluate`."""
    values: dict[int, Tensor] = {}
    for i in sorted(behind(graph, graph.root)):
        node = graph.nodes[i]
        if isinstance(node, WriteNode):
            values[i] = writes[node.write]
        elif isinstance(node, NormNode):
            wide = values[node.node].float() if node.dtype != torch.float64 else values[node.node]
            values[i] = node.norm(wide).to(node.dtype)
        else:
            total = None
            for term in node.terms:
                x = values[term.node]
                if term.gate is not None or not isinstance(term.factor, float) or term.factor != 1.0:
                    x = x * term_factor(term, gates, x)
                total = x if total is None else total + x
            assert total is not None
            values[i] = (total if node.bias is None else total + node.bias.to(total)).to(node.dtype)
    return values[graph.root]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """v -> diag * v + left (right^T v), per position; `diag` None stands for zero."""

    diag: Tensor | None
    left: Tensor | None = None
    right: Tensor | None = None

    def __call__(self, v: Tensor) -> Tensor:
        """Carries `v` [positions, parts, d_model] (float64) to the stream."""
        out = torch.zeros_like(v) if self.diag is None else v * self.diag[:, None, :]
        if self.left is not None and self.right is not None:
            out = out + torch.einsum("npd,ndr,ner->npe", v, self.right, self.left)
        return out

    def plus(self, other: "LinearMap") -> "LinearMap":
        """v -> this map of v plus the other's."""
        diag = other.diag if self.diag is None else self.diag if other.diag is None else self.diag + other.diag
        return LinearMap(diag, _join(self.left, other.left), _join(self.right, other.right))

    def after_factor(self, factor: Tensor | float) -> "LinearMap":
        """This map applied to factor * v."""
        right = self.right
        if right is not None:
            right = right * (_rows(factor, right)[..., None] if isinstance(factor, Tensor) else factor)
        return LinearMap(None if self.diag is None else self.diag * factor, self.left, right)

    def after_centring(self) -> "LinearMap":
        """This map applied to v - mean(v)."""
        total = torch.zeros_like(self.left[..., 0]) if self.diag is None and self.left is not None else self.diag
        assert total is not None
        if self.left is not None and self.right is not None:
            total = total + (self.left * self.right.sum(1, keepdim=True)).sum(-1)
        ones = torch.full_like(total, 1 / total.shape[-1])[..., None]
        return LinearMap(self.diag, _join(self.left, -total[..., None]), _join(self.right, ones))


def _rows(factor: Tensor, right: Tensor) -> Tensor:
    return factor.expand(right.shape[0], right.shape[1])


def _join(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return torch.cat([a, b], -1)


def maps_to_root(graph: StreamGraph, run: Evaluated, gates: Gates) -> list[LinearMap | None]:
    """For each node the map that carries a vector added to it to the root; None where nothing flows."""
    return maps_to(graph, graph.root, run, gates)


def maps_to(graph: StreamGraph, end: int, run: Evaluated, gates: Gates, start: int = 0) -> list[LinearMap | None]:
    """For each node from `start` on the map that carries a vector added to it to `end`; None where nothing flows."""
    like = run.values[end].double()
    maps: list[LinearMap | None] = [None] * len(graph.nodes)
    maps[end] = LinearMap(torch.ones_like(like))
    for i in range(end, start - 1, -1):
        here, node = maps[i], graph.nodes[i]
        if here is None or isinstance(node, WriteNode):
            continue
        if isinstance(node, NormNode):
            scale = run.scales[i]
            assert scale is not None
            gain = scale if node.norm.gain is None else scale * node.norm.gain.to(scale)
            step = here.after_factor(gain)
            _add(maps, node.node, step.after_centring() if node.norm.centred else step)
            continue
        for term in node.terms:
            plain = term.gate is None and isinstance(term.factor, float) and term.factor == 1.0
            _add(maps, term.node, here if plain else here.after_factor(term_factor(term, gates, like)))
    return maps


def _add(maps: list[LinearMap | None], node: int, step: LinearMap) -> None:
    known = maps[node]
    maps[node] = step if known is None else known.plus(step)


def bias_of(node: Node) -> Tensor | None:
    """The constant that a node adds, [d_model] or None."""
    return node.bias if isinstance(node, SumNode) else node.norm.bias if isinstance(node, NormNode) else None
