"""Laws of the maps that carry parts to the stream, against dense matrices, on random graphs of sums and norms."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mainstem.analysis.parts import carry, pull_back
from mainstem.model.graph import (
    Evaluated,
    LinearMap,
    NormNode,
    StreamGraph,
    SumNode,
    Term,
    WriteNode,
    bias_of,
    evaluate,
    maps_to,
    maps_to_root,
    stream_values,
)
from mainstem.model.norms import Norm

WIDTH, ROWS = 5, 2
SEEDS = st.integers(0, 2**31)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(made: LinearMap) -> Tensor:
    """[rows, out, in]: the matrix of a map, by what it does to each axis."""
    axes = torch.eye(WIDTH, dtype=torch.float64).expand(ROWS, WIDTH, WIDTH)
    return made(axes).transpose(1, 2)


@st.composite
def maps(draw: st.DrawFn) -> LinearMap:
    """Diagonal, of low rank, both or zero diagonal."""
    seed, rank = draw(SEEDS), draw(st.integers(0, 3))
    diag = random(ROWS, WIDTH, seed=seed) if draw(st.booleans()) or rank == 0 else None
    if rank == 0:
        return LinearMap(diag)
    return LinearMap(diag, random(ROWS, WIDTH, rank, seed=seed + 1), random(ROWS, WIDTH, rank, seed=seed + 2))


@given(first=maps(), second=maps())
def test_a_sum_of_maps_is_the_sum_of_their_matrices(first: LinearMap, second: LinearMap) -> None:
    torch.testing.assert_close(dense(first.plus(second)), dense(first) + dense(second))


@given(made=maps(), seed=SEEDS, number=st.floats(-3, 3))
def test_a_map_after_a_factor(made: LinearMap, seed: int, number: float) -> None:
    factor = random(WIDTH, seed=seed)
    torch.testing.assert_close(dense(made.after_factor(factor)), dense(made) @ factor.diag())
    torch.testing.assert_close(dense(made.after_factor(number)), dense(made) * number)
    by_row = random(ROWS, WIDTH, seed=seed)
    torch.testing.assert_close(dense(made.after_factor(by_row)), dense(made) @ torch.diag_embed(by_row))


@given(made=maps())
def test_a_map_after_centring(made: LinearMap) -> None:
    centring = torch.eye(WIDTH, dtype=torch.float64) - 1 / WIDTH
    torch.testing.assert_close(dense(made.after_centring()), dense(made) @ centring)
    torch.testing.assert_close(dense(made.after_centring().after_centring()), dense(made) @ centring)


@given(made=maps(), seed=SEEDS)
def test_carrying_and_pulling_back_are_adjoint(made: LinearMap, seed: int) -> None:
    """The first row alone, as decompositions have it: <direction, map v> = <pulled back, v>."""
    one = LinearMap(*(None if part is None else part[:1] for part in (made.diag, made.left, made.right)))
    vectors, direction = random(4, WIDTH, seed=seed), random(WIDTH, seed=seed + 1)
    torch.testing.assert_close(carry(one, vectors) @ direction, vectors @ pull_back(one, direction))


# --- graphs -------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> StreamGraph:
    """A few writes, then sums and norms of what came before; the root is the last node."""
    n_writes, n_nodes, seed = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(SEEDS)
    nodes: list = [WriteNode(i, torch.float64) for i in range(n_writes)]
    for i in range(n_nodes):
        places = st.integers(0, len(nodes) - 1)
        if draw(st.booleans()):
            gain = random(WIDTH, seed=seed + i) if draw(st.booleans()) else None
            bias = random(WIDTH, seed=seed + 50 + i) if draw(st.booleans()) else None
            norm = Norm(draw(st.booleans()), gain, bias, 1e-3)
            nodes.append(NormNode(draw(places), norm, torch.float64))
            continue
        terms = []
        for k, place in enumerate(draw(st.lists(places, min_size=1, max_size=3))):
            factors = (1.0, -0.7, random(WIDTH, seed=seed + 100 + 7 * i + k))
            terms.append(Term(place, draw(st.sampled_from(factors))))
        bias = random(WIDTH, seed=seed + 200 + i) if draw(st.booleans()) else None
        nodes.append(SumNode(tuple(terms), bias, torch.float64))
    return StreamGraph(tuple(nodes), len(nodes) - 1)


def with_frozen_scales(graph: StreamGraph, run: Evaluated, added: int, vectors: Tensor) -> list[Tensor]:
    """What each node changes by when `vectors` [rows, parts, width] are added at node `added`, by recursion."""
    out: list[Tensor] = []
    for i, node in enumerate(graph.nodes):
        value = torch.zeros_like(vectors)
        if isinstance(node, SumNode):
            for term in node.terms:
                value = value + out[term.node] * term.factor
        elif isinstance(node, NormNode):
            scale = run.scales[i]
            assert scale is not None
            value = node.norm.centre(out[node.node]) * scale[:, None]
            value = value if node.norm.gain is None else value * node.norm.gain
        out.append(value + vectors if i == added else value)
    return out


@given(graph=graphs(), seed=SEEDS)
def test_maps_to_any_node_are_the_linear_parts_of_the_graph(graph: StreamGraph, seed: int) -> None:
    writes = [random(ROWS, WIDTH, seed=seed + i) for i in range(4)]
    run = evaluate(graph, writes, {})
    torch.testing.assert_close(stream_values(graph, writes, {}), run.values[graph.root])
    vectors = random(ROWS, 3, WIDTH, seed=seed + 9)
    for end in {graph.root, len(graph.nodes) // 2}:
        found = maps_to(graph, end, run, {})
        for added, made in enumerate(found):
            expected = with_frozen_scales(graph, run, added, vectors)[end] if added <= end else vectors * 0
            torch.testing.assert_close(vectors * 0 if made is None else made(vectors), expected)


@given(graph=graphs(), seed=SEEDS)
def test_writes_and_biases_carried_to_the_root_are_the_root(graph: StreamGraph, seed: int) -> None:
    """The account is complete, whatever the graph: frozen norms are linear, so contributions add up."""
    writes = [random(ROWS, WIDTH, seed=seed + i) for i in range(4)]
    run = evaluate(graph, writes, {})
    total = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for node, made in zip(graph.nodes, maps_to_root(graph, run, {}), strict=True):
        if made is None:
            continue
        own = writes[node.write] if isinstance(node, WriteNode) else bias_of(node)
        if own is not None:
            total = total + made(own.expand(ROWS, WIDTH)[:, None])[:, 0]
    torch.testing.assert_close(total, run.values[graph.root])
