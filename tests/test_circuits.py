"""Edges, their scores and circuits: sums, real runs with single edges exchanged, and what is connected."""

from collections.abc import Callable
from functools import cache

import handmade
import pytest
import torch
import zoo
from tiny_models import hardly_different
from torch import Tensor, nn

import mainstem
from mainstem.analysis.circuits import Wiring, among, best_edges, best_nodes, members
from mainstem.causal.circuit_runs import CircuitRunner
from mainstem.causal.edge_attribution import EdgeScores, edge_attribution
from mainstem.causal.edges import EdgeGraph, edge_graph
from mainstem.causal.exact_patching import exact_effects
from mainstem.causal.patch_places import patch_places
from mainstem.causal.tracked import Prompt
from mainstem.errors import CertificateError, LevelRefusedError, UsageError
from mainstem.run.inputs import base_arguments

CLEAN = zoo.prompt(9, seed=2)[0]
CORRUPTED = torch.where(torch.arange(9) == 3, CLEAN + 7, CLEAN)
LAST = len(CLEAN) - 1
SHORT = torch.arange(11, 18)[None]

HANDMADE = [name for name in handmade.ALL if name not in {*handmade.REFUSED, "inline_norms"}]
ZOO = ["llama", "gpt2", "gemma2", "olmo2", "gpt_neox", "qwen3", "falcon", "bloom", "doge", "granite"]
EXPERTS = [
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "granitemoeshared",
    "flex_olmo",
    "gpt_oss",
    "cohere2_moe",
    "afmoe",
    "zaya",
]
QUICK = {"llama", "gemma2", "mixtral", "qwen2_moe", "in_place", "einsum_sinks", "mixing"}

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    **handmade.ALL,
    **{name: (lambda n=name: zoo.build(n)) for name in ZOO},
    **{name: (lambda n=name: zoo.build(n, experts_implementation="eager")) for name in [*EXPERTS, "llama4_text"]},
    "fused": lambda: zoo.build("llama", attn_implementation="sdpa"),
    "mixing": handmade.Mixing,
}


def metric(logits: Tensor) -> Tensor:
    return logits[:, 3] - logits[:, 5]


@cache
def opened(name: str) -> "mainstem.Model":
    return mainstem.open(BUILDERS[name]().double())


@cache
def graph_of(name: str) -> EdgeGraph:
    model = opened(name)
    return edge_graph(model.module, model.anatomy, SHORT, **base_arguments(model.module))


def prompts(name: str, corrupted: Tensor = CORRUPTED) -> tuple[Prompt, Prompt]:
    arguments = base_arguments(opened(name).module)
    return Prompt(CLEAN, LAST, arguments), Prompt(corrupted, LAST, arguments)


def scored(name: str, steps: int = 0) -> EdgeScores:
    return edge_attribution(opened(name).module, graph_of(name), *prompts(name), metric, steps)


def runner(name: str) -> CircuitRunner:
    return CircuitRunner(opened(name).module, graph_of(name), *prompts(name), metric)


def marked(names: list[str]) -> list:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def edge(graph: EdgeGraph, writer: str, reader: str) -> tuple[int, int]:
    return [str(u) for u in graph.writers].index(writer), [str(r) for r in graph.readers].index(reader)


# --- the graph -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "fused"])
def test_edges_go_from_writers_to_later_readers(name: str) -> None:
    graph = graph_of(name)
    assert [str(u) for u in graph.writers][:6] == ["embed", "L0H0", "L0H1", "L0H2", "L0H3", "L0.mlp"]
    readers = [str(r) for r in graph.readers]
    assert readers[:9] == [
        *(f"L0H{h} query" for h in range(4)),
        *("L0H0 key", "L0H2 key", "L0H0 value", "L0H2 value"),
        "L0.mlp",
    ]
    assert readers[-1] == "logits" and [len(graph.readers[r].feeds) for r in (0, 4, 6)] == [1, 2, 2]
    for writer, reader, there in (
        ("embed", "L0H3 query", True),
        ("L0H0", "L0H1 query", False),
        ("L0H0", "L0.mlp", True),
        ("L0.mlp", "L0.mlp", False),
        ("L0.mlp", "L2H0 key", True),
        ("L2.mlp", "logits", True),
        ("L2H1", "L1.mlp", False),
    ):
        assert bool(graph.exists[edge(graph, writer, reader)]) is there, (writer, reader)
    rows = [graph.readers[r].parts[0].rows for r in (1, 5)]
    assert [r.tolist() for r in rows if r is not None] == [list(range(16, 32)), list(range(16, 32))]


def test_queries_keys_and_values_in_one_matrix_are_told_apart() -> None:
    graph = graph_of("gpt2")
    rows = {str(r): r.parts[0].rows for r in graph.readers if r.role != "input"}
    for name, start in (("L1H1 query", 16), ("L1H1 key", 80), ("L1H1 value", 144)):
        own = rows[name]
        assert own is not None and own.tolist() == list(range(start, start + 16))


def test_experts_are_one_writer_and_one_reader() -> None:
    graph = graph_of("qwen2_moe")
    reader = next(r for r in graph.readers if str(r) == "L1.mlp")
    assert [str(u) for u in reader.feeds] == ["L1.mlp"] and [str(u) for u in graph.writers].count("L1.mlp") == 1
    assert [(part.site.where, part.site.path) for part in reader.parts] == [("input", "model.layers.1.mlp")]
    apart = next(r for r in graph_of("granitemoeshared").readers if str(r) == "L1.mlp")
    assert sorted(part.site.where for part in apart.parts) == ["input", "output"]  # a shared expert of its own module


def test_routing_is_made_anew_where_what_experts_read_changes() -> None:
    """Without the edges into one router's module its experts get the corrupted run's stream, and choose for it."""
    model, run = opened("mixtral"), runner("mixtral")
    gates = [m for name, m in model.module.named_modules() if name.endswith("layers.0.mlp.gate")]
    chosen: list[Tensor] = []
    hook = gates[0].register_forward_hook(lambda module, args, out: chosen.append(out[-1].view(-1, len(CLEAN), 2)[-1]))
    with hook:
        for prompt in prompts("mixtral"):
            model.module(prompt.ids[None], **prompt.forward)
        circuit = run.graph.exists.clone()
        circuit[:, [str(r) for r in run.graph.readers].index("L0.mlp")] = False
        run.metrics([circuit])
    clean, corrupted, exchanged = chosen[0], chosen[1], chosen[-1]
    assert not torch.equal(clean, corrupted) and torch.equal(exchanged, corrupted)


def test_experts_whose_read_was_not_found_are_refused() -> None:
    with pytest.raises(LevelRefusedError, match=r"input of L1\.mlp"):  # they read scaled rows
        graph_of("llama4_text")


def test_a_sublayer_whose_reads_are_not_known_is_refused() -> None:
    with pytest.raises(LevelRefusedError, match=r"into L0\.attn"):
        graph_of("inline_norms")


# --- scores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked([*ZOO, *EXPERTS, *HANDMADE]))
@pytest.mark.parametrize("steps", [0, 2])
def test_the_edges_of_a_writer_sum_to_the_writer(name: str, steps: int) -> None:
    made = scored(name, steps)
    assert float(made.nodes.abs().max()) > 1e-3
    assert made.unexplained < 1e-6
    assert not made.scores[~made.graph.exists].any()


def test_a_reader_that_is_missing_shows_in_the_sums() -> None:
    whole = graph_of("llama")
    kept = [i for i, reader in enumerate(whole.readers) if str(reader) != "L1H2 value"]
    readers = tuple(whole.readers[i] for i in kept)
    graph = EdgeGraph(whole.anatomy, whole.writers, whole.pieces, readers)
    with pytest.raises(CertificateError, match="sum to what patching it does"):
        edge_attribution(opened("llama").module, graph, *prompts("llama"), metric, 0)


@pytest.mark.parametrize(
    "name", marked(["llama", "gpt2", "gemma2", "mixtral", "qwen2_moe", "in_place", "einsum_sinks", "post_norm"])
)
def test_a_small_difference_in_one_edge_does_what_its_score_says(name: str) -> None:
    """A corrupted token that hardly differs: first order is all there is, whatever the model does."""
    graph = graph_of(name)
    with hardly_different(opened(name).module, int(CORRUPTED[3]), int(CLEAN[3])):
        scores = scored(name).scores
        size = float(scores.abs().max())
        chosen = torch.nonzero(graph.exists)[::7].tolist()
        chosen += [divmod(i, scores.shape[1]) for i in scores.abs().flatten().topk(10).indices.tolist()]
        circuits = [graph.exists.clone() for _ in chosen]
        for circuit, (writer, reader) in zip(circuits, chosen, strict=True):
            circuit[writer, reader] = False
        run = runner(name)
        for (writer, reader), value in zip(chosen, run.metrics(circuits).tolist(), strict=True):
            assert value - run.clean == pytest.approx(float(scores[writer, reader]), abs=2e-2 * size)


def test_edges_into_logits_that_are_linear_are_exact() -> None:
    graph, made, run = graph_of("no_final_norm"), scored("no_final_norm"), runner("no_final_norm")
    writers = torch.nonzero(graph.exists[:, -1]).flatten().tolist()
    circuits = [graph.exists.clone() for _ in writers]
    for circuit, writer in zip(circuits, writers, strict=True):
        circuit[writer, -1] = False
    effects = run.metrics(circuits) - run.clean
    assert torch.allclose(effects, made.scores[writers, -1], atol=1e-12)
    assert float(effects.abs().max()) > 1e-2


# --- circuits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked([*ZOO, *EXPERTS, *HANDMADE, "mixing"]))
def test_all_edges_are_the_clean_run_and_none_the_corrupted_one(name: str) -> None:
    run = runner(name)
    everything = run.graph.exists
    whole, empty = run.metrics([everything, torch.zeros_like(everything)]).tolist()
    assert abs(run.clean - run.corrupted) > 1e-3
    tolerance = 1e-6 if name == "afmoe" else 1e-10  # its router computes in float32
    assert whole == pytest.approx(run.clean, abs=tolerance) and empty == pytest.approx(run.corrupted, abs=tolerance)


@pytest.mark.parametrize("name", marked(["llama", "gpt2", "mixtral", "qwen2_moe", "granitemoeshared", "in_place"]))
def test_a_writer_without_its_edges_is_the_writer_patched(name: str) -> None:
    run, model = runner(name), opened(name)
    places = patch_places(model.anatomy, ["embedding", "head", "sublayer"])
    effects = {unit: v for (_, unit), v in exact_effects(model.module, places, *prompts(name), metric).items()}
    circuits = [run.graph.exists.clone() for _ in run.graph.writers]
    for number, circuit in enumerate(circuits):
        circuit[number] = False
    for unit, value in zip(run.graph.writers, run.metrics(circuits).tolist(), strict=True):
        assert value - run.clean == pytest.approx(effects[unit], abs=1e-10), unit


def test_quality_is_of_real_runs() -> None:
    run, made = runner("llama"), scored("llama", 3)
    wiring = run.graph.wiring
    edges = best_edges(wiring, made.scores, 20)
    found = run.quality(edges)
    assert 15 <= found.edges <= 20 == min(20, int(wiring.exists.sum()))
    circuit, rest = run.metrics([edges, wiring.exists & ~edges]).tolist()
    assert (found.circuit, found.complement) == pytest.approx((circuit, rest))
    assert found.faithfulness == pytest.approx((circuit - run.corrupted) / (run.clean - run.corrupted))
    assert found.completeness == pytest.approx((rest - run.corrupted) / (run.clean - run.corrupted))
    assert {str(u) for u in found.nodes} == {str(u) for u in found.minimality}
    whole = run.quality(wiring.exists)
    assert whole.faithfulness == pytest.approx(1) and whole.completeness == pytest.approx(0, abs=1e-9)
    assert whole.minimality[run.graph.writers[0]] == pytest.approx(1)


def test_a_metric_that_does_not_change_is_refused() -> None:
    module = opened("llama").module
    run = CircuitRunner(module, graph_of("llama"), *prompts("llama"), lambda logits: logits[:, 0] * 0 + 1)
    with pytest.raises(UsageError, match="tells apart"):
        run.quality(graph_of("llama").exists)
    with pytest.raises(UsageError, match="tokens"):
        CircuitRunner(module, graph_of("llama"), *prompts("llama", CORRUPTED[:-1]), metric)
    with pytest.raises(UsageError, match="negative"):
        scored("llama", -1)


# --- what is connected ---------------------------------------------------------------------------------------


def random_wiring(seed: int) -> tuple[Wiring, Tensor]:
    """Five layers of two units with one reader each, a beginning and an end."""
    generator = torch.Generator().manual_seed(seed)
    n = 11
    feeds = torch.zeros(n, n, dtype=torch.bool)
    for unit in range(1, n):
        feeds[unit - 1, unit] = True
    layer = [0, *((i + 1) // 2 for i in range(1, n))]
    exists = torch.tensor([[layer[w] < (layer[r + 1] if r < n - 1 else n) for r in range(n)] for w in range(n)])
    begins, ends = torch.arange(n) == 0, torch.arange(n) == n - 1
    return Wiring(exists, feeds, begins, ends), torch.randn(n, n, generator=generator)


def paths(wiring: Wiring, edges: Tensor) -> Tensor:
    """The edges on a path, by walking all paths."""
    on = torch.zeros_like(edges)

    def walk(writer: int, trail: list[tuple[int, int]]) -> None:
        for reader in torch.nonzero(edges[writer]).flatten().tolist():
            step = [*trail, (writer, reader)]
            if wiring.ends[reader]:
                for w, r in step:
                    on[w, r] = True
            for fed in torch.nonzero(wiring.feeds[reader]).flatten().tolist():
                walk(fed, step)

    for start in torch.nonzero(wiring.begins).flatten().tolist():
        walk(start, [])
    return on


@pytest.mark.parametrize("seed", range(5))
def test_the_best_edges_are_connected_and_grow_with_the_size(seed: int) -> None:
    wiring, scores = random_wiring(seed)
    sparse = wiring.exists & (torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) < 0.3)
    assert torch.equal(wiring.connected(sparse), paths(wiring, sparse))
    before = torch.zeros_like(wiring.exists)
    for size in (1, 3, 5, 8, 13, 21, 34, 1000):
        found = best_edges(wiring, scores, size)
        assert int(found.sum()) <= size
        assert torch.equal(wiring.connected(found), found)
        assert not (before & ~found).any() and not (found & ~wiring.exists).any()
        before = found
    assert torch.equal(before, wiring.exists)


def test_the_best_nodes_keep_all_edges_among_them() -> None:
    wiring, scores = random_wiring(1)
    nodes = torch.tensor([3.0, 0, -2, 1, 0, 0, 0, 0, 0, 0, 0])
    found = best_nodes(wiring, nodes, 2)
    assert members(wiring, found).nonzero().flatten().tolist() == [0, 2]
    assert torch.equal(found, among(wiring, (torch.arange(11) == 0) | (torch.arange(11) == 2)))
    assert int(members(wiring, best_nodes(wiring, nodes, 9)).sum()) == 3  # what scores 0 is in no circuit
