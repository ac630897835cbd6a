"""The planted circuit is the ground truth that it says it is: by brute force, node by node and edge by edge."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mainstem
from mainstem.causal.metrics import Metric
from mainstem.lab import planted
from mainstem.lab.pairs import PromptPair
from mainstem.lab.planted import EDGES, NEURONS, NODES, Edge, PlantedModel, planted_pairs
from mainstem.units import Unit

HEADS = range(planted.N_HEADS)
NODE_EFFECT, NEURON_EFFECT, OUTSIDE = 3.5, 1.9, 1e-5


class Brute:
    """The planted model computed edge by edge: what each part reads is a sum over writers, each clean or resampled."""

    def __init__(self, model: PlantedModel, clean: Tensor, corrupted: Tensor) -> None:
        self.model, self.clean = model, clean
        self.resampled: dict[str, Tensor] = {}
        self.resampled_neurons: dict[int, Tensor] = {}
        self.corrupted_logits = self.logits(clean=corrupted)
        self.resampled, self.resampled_neurons = dict(self.writes), dict(self.neurons)
        self.clean_logits = self.logits()

    def logits(self, edges=frozenset(), nodes=frozenset(), neurons=frozenset(), clean: Tensor | None = None) -> Tensor:
        """The last position's logits with some edges, whole nodes, or neurons of L1.mlp resampled."""
        ids = self.clean if clean is None else clean
        self.writes: dict[str, Tensor] = {}
        self.neurons: dict[int, Tensor] = {}

        def write(name: str, value: Tensor) -> None:
            self.writes[name] = self.resampled[name] if name in nodes else value

        def read(reader: str, role: str) -> Tensor:
            swapped = {name for name in self.writes if Edge(name, reader, role) in edges}
            return sum(self.resampled[n] if n in swapped else value for n, value in self.writes.items())

        model = self.model
        write("embed", model.tokens(ids))
        write("embed.pos", model.positions(torch.arange(ids.shape[1]))[None])
        for layer, block in enumerate(model.blocks):
            attention = block.attention
            for head, value in [(h, self._head(attention, h, read, f"L{layer}H{h}")) for h in HEADS]:
                write(f"L{layer}H{head}", value)
            acts = F.relu(read(f"L{layer}.mlp", "input") @ block.mlp.input.weight.T)
            if layer == 1:
                self.neurons = {n: acts[..., n] for n in range(planted.D_MLP)}
                columns = [self.resampled_neurons[n] if n in neurons else acts[..., n] for n in range(planted.D_MLP)]
                acts = torch.stack(columns, -1)
            write(f"L{layer}.mlp", acts @ block.mlp.output.weight.T)
        return (read("logits", "input") @ model.unembedding.weight.T)[:, -1]

    @staticmethod
    def _head(attention, head: int, read, name: str) -> Tensor:
        rows = slice(head * planted.D_HEAD, (head + 1) * planted.D_HEAD)
        roles = zip(("query", "key", "value"), attention.projections(), strict=True)
        q, k, v = (read(name, role) @ projection.weight[rows].T for role, projection in roles)
        scores = q @ k.transpose(-1, -2) / math.sqrt(planted.D_HEAD)
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v @ attention.output.weight[:, rows].T


def parts() -> list[str]:
    """All writers in the order of execution."""
    blocks = [[*(f"L{layer}H{head}" for head in HEADS), f"L{layer}.mlp"] for layer in range(planted.N_LAYERS)]
    return ["embed", "embed.pos", *itertools.chain.from_iterable(blocks)]


def every_edge() -> list[Edge]:
    names = parts()
    before = {name: names[: 2 + 5 * int(name[1]) + (4 if "mlp" in name else 0)] for name in names[2:]}
    inner = [
        Edge(writer, reader, role)
        for reader, writers in before.items()
        for role in (("input",) if "mlp" in reader else ("query", "key", "value"))
        for writer in writers
    ]
    return inner + [Edge(writer, "logits", "input") for writer in names]


@torch.no_grad()
def prepared(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Brute, list[PromptPair]]:
    pairs = planted_pairs(16, seed=seed)
    clean, corrupted = (torch.tensor(rows) for rows in zip(*((p.clean, p.corrupted) for p in pairs), strict=True))
    return Brute(PlantedModel(seed=seed).to(dtype), clean, corrupted), pairs


@pytest.fixture(scope="module", params=[0, 1])
def brute(request):
    return prepared(request.param)


def difference(pairs, logits: Tensor) -> Tensor:
    """The logit difference of each pair's own answers."""
    rows = zip(pairs, logits, strict=True)
    return torch.cat([Metric("logit-difference", p.answers, p.wrong_answers)(row[None]) for p, row in rows])


@torch.no_grad()
def lowered(brute, **swapped) -> Tensor:
    """How much the metric falls, pair by pair, when something is resampled."""
    made, pairs = brute
    return difference(pairs, made.clean_logits) - difference(pairs, made.logits(**swapped))


@torch.no_grad()
def test_the_account_by_edges_is_the_model() -> None:
    made, pairs = prepared(0, torch.float64)
    corrupted = torch.tensor([p.corrupted for p in pairs])
    everything = made.logits(edges=frozenset(every_edge()))
    for ids, found in ((made.clean, made.clean_logits), (corrupted, made.corrupted_logits), (corrupted, everything)):
        torch.testing.assert_close(found, made.model(ids)[:, -1], rtol=1e-10, atol=1e-10)


def test_the_model_solves_the_task_and_the_corrupted_run_does_not(brute) -> None:
    made, pairs = brute
    answers = torch.tensor([p.answers[0] for p in pairs])
    assert torch.equal(made.clean_logits.argmax(-1), answers)
    assert bool((made.clean_logits.softmax(-1)[range(16), answers] > 0.99).all())
    assert bool((difference(pairs, made.clean_logits) > 7.9).all())
    assert bool((difference(pairs, made.corrupted_logits) < -3.9).all())


@pytest.mark.parametrize("node", NODES)
def test_each_node_of_the_circuit_matters(brute, node: str) -> None:
    assert bool((lowered(brute, nodes={node}) > NODE_EFFECT).all())


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_each_edge_of_the_circuit_matters(brute, edge: Edge) -> None:
    assert bool((lowered(brute, edges={edge}) > NODE_EFFECT).all())


@pytest.mark.parametrize("neuron", NEURONS)
def test_each_neuron_of_the_circuit_matters(brute, neuron: str) -> None:
    """Half of the group is active for either case, and resampling an idle one turns it on."""
    assert bool((lowered(brute, neurons={Unit.parse(neuron).neuron}) > NEURON_EFFECT).all())


def outside() -> dict[str, set]:
    """Everything that is not in the circuit."""
    neurons = set(range(planted.D_MLP)) - {Unit.parse(name).neuron for name in NEURONS}
    return {"nodes": set(parts()) - set(NODES), "edges": set(every_edge()) - set(EDGES), "neurons": neurons}


def test_nothing_outside_matters_together(brute) -> None:
    sizes = {name: len(members) for name, members in outside().items()}
    assert sizes == {"nodes": 13, "edges": 24 + 84 + 144 + 33 + 17 - 7, "neurons": 12}
    for name, members in outside().items():
        assert bool((lowered(brute, **{name: members}).abs() < OUTSIDE).all()), name


def test_nothing_outside_matters_place_by_place() -> None:
    """Node by node, neuron by neuron, and all edges into one input: effects of two places cannot hide each other."""
    one, left = prepared(0), outside()
    inputs = sorted({(edge.reader, edge.role) for edge in left["edges"]})
    into = [{edge for edge in left["edges"] if (edge.reader, edge.role) == place} for place in inputs]
    places = {"nodes": [{n} for n in left["nodes"]], "neurons": [{n} for n in left["neurons"]], "edges": into}
    assert len(into) == 3 * 12 + 3 + 1
    for name, sets in places.items():
        for members in sets:
            assert bool((lowered(one, **{name: members}).abs() < OUTSIDE).all()), members


@torch.no_grad()
def test_distractors_write_as_much_as_the_circuit_and_move_the_logits(brute) -> None:
    made, _ = brute
    made.logits()
    norms = {name: float(write[:, 1:].norm(dim=-1).mean()) for name, write in made.writes.items()}
    changes = {name: made.writes[name] - made.resampled[name] for name in parts() if name not in (*NODES, "embed.pos")}
    assert all(norms[name] > 0.3 for name in changes), norms
    assert all(float(change[:, 1:].norm(dim=-1).mean()) > 0.1 for change in changes.values())
    without = made.logits(nodes=frozenset(changes))
    assert float((without - made.clean_logits).abs().mean()) > 0.05


def test_the_circuit_runs_along_its_edges() -> None:
    assert {edge.writer for edge in EDGES} == set(NODES)
    assert {edge.reader for edge in EDGES} - {"logits"} == set(NODES) - {"embed"}
    assert set(EDGES) <= set(every_edge())
    assert all(str(Unit.parse(address)) == address for address in (*NODES, *NEURONS))


def test_mainstem_discovers_all_of_it_and_its_certificates_hold() -> None:
    model = mainstem.open(PlantedModel())
    assert model.labels.holds
    trace = model.trace(planted_pairs(1)[0].clean)
    assert trace.reads().holds
    sizes = {"heads": 12, "subvalues": 12 * 8, "attention_neurons": 12 * 16, "neurons": 48, "units": 12 * 8 + 48}
    for level, count in sizes.items():
        made = trace.decompose(level)
        assert not model.anatomy.refusals(level)
        assert made.certificate.holds and made.certificate.relative_error < 1e-6
        found = [unit for group in made.groups for unit in group.units]
        split = [u for u in found if u.head_index is not None or u.neuron is not None]
        assert len(split) == count, level
    assert {str(unit) for unit in model.anatomy.sublayers()} >= {"embed", "embed.pos", "L0.attn", "L1.mlp", "L2.mlp"}


def test_pairs_and_weights_are_reproducible_and_leave_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    first, second, other = PlantedModel(seed=3), PlantedModel(seed=3), PlantedModel(seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b) and bool(a.isfinite().all()), name
    assert not torch.equal(first.blocks[0].mlp.input.weight, other.blocks[0].mlp.input.weight)
    assert planted_pairs(5, seed=1) == planted_pairs(5, seed=1) != planted_pairs(5, seed=2)


def test_pairs_are_what_they_say() -> None:
    for pair in planted_pairs(50):
        (answer,), (other_case, other_letter) = pair.answers, pair.wrong_answers
        assert len(pair.clean) == len(pair.corrupted) == 8
        letters = [{(token - 1) % planted.LETTERS for token in prompt[1:]} for prompt in (pair.clean, pair.corrupted)]
        assert not letters[0] & letters[1]
        assert abs(answer - other_case) == planted.LETTERS and (answer > planted.LETTERS) == (
            other_letter > planted.LETTERS
        )
        assert (pair.clean[-1] > planted.LETTERS) == (answer > planted.LETTERS)
        assert (pair.clean[-1] > planted.LETTERS) != (pair.corrupted[-1] > planted.LETTERS)
