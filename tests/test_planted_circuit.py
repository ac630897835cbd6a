"""The planted circuit is recovered exactly at its size, by edges and by nodes, and is all there is."""

from functools import cache

import pytest
import torch
from torch import Tensor

import mainstem
from mainstem.causal.edge_attribution import EdgeScores
from mainstem.causal.metrics import Metric
from mainstem.errors import ChoiceError, UsageError
from mainstem.intervene.attributing import Circuit, PatchPair
from mainstem.lab.planted import EDGES, NODES, PlantedModel, planted_pairs


@cache
def opened() -> "mainstem.Model":
    return mainstem.open(PlantedModel())


def pairs(count: int) -> list[PatchPair]:
    found = []
    for one in planted_pairs(count):
        answers, wrong = ([int(token) for token in ids] for ids in (one.answers, one.wrong_answers))
        metric = Metric("logit-difference", tuple(answers), tuple(wrong))
        found.append(PatchPair(one.clean, one.corrupted, metric))
    return found


@cache
def scores(steps: int) -> EdgeScores:
    return opened().edge_scores(pairs(5), steps=steps)


def edges_of(circuit: Circuit) -> set[tuple[str, str, str]]:
    return {(str(edge.writer), edge.reader, edge.role) for edge in circuit.edges}


PLANTED = {(edge.writer, edge.reader, edge.role) for edge in EDGES}


@pytest.mark.parametrize("steps", [0, 5])
def test_the_planted_circuit_is_found_by_edges_and_by_nodes(steps: int) -> None:
    found = opened().circuit(pairs(5), len(EDGES), scores=scores(steps))
    assert edges_of(found) == PLANTED and {str(unit) for unit in found.nodes} == set(NODES)
    nodes = opened().circuit(pairs(5), len(NODES), by="nodes", scores=scores(steps))
    assert {str(unit) for unit in nodes.nodes} == set(NODES) and edges_of(nodes) >= PLANTED
    for circuit in (found, nodes):
        assert circuit.faithfulness == pytest.approx(1, abs=1e-4)
        assert circuit.completeness == pytest.approx(0, abs=1e-4)
        assert all(value > 0.25 for value in circuit.minimality.values())
        assert circuit.unexplained <= circuit.tolerance


def test_one_edge_fewer_is_not_faithful_and_one_more_adds_nothing() -> None:
    fewer = opened().circuit(pairs(5), len(EDGES) - 1, scores=scores(5))
    assert edges_of(fewer) < PLANTED and fewer.faithfulness < 0.8
    weakest = opened().circuit(pairs(5), len(EDGES), scores=scores(5)).edges[-1]
    more = opened().circuit(pairs(5), len(EDGES) + 5, scores=scores(5))
    assert edges_of(more) >= PLANTED
    assert all(abs(edge.score) < 0.1 * abs(weakest.score) for edge in more.edges[len(EDGES) :])


def test_every_pair_by_itself_finds_it() -> None:
    for pair in pairs(3):
        assert edges_of(opened().circuit(pair, len(EDGES))) == PLANTED


def test_scores_of_several_pairs_are_the_mean() -> None:
    several = [opened().edge_scores(pair, steps=0) for pair in pairs(5)]
    mean: Tensor = torch.stack([one.scores for one in several]).mean(0)
    assert torch.allclose(scores(0).scores, mean)
    assert (scores(0).cost.forwards, scores(0).cost.backwards) == (15, 5)


def test_estimates_of_the_planted_units() -> None:
    """Patching by estimate and for real, both ways, on the units of the circuit and its distractors."""
    pair = pairs(1)[0]
    kinds = ("sublayer", "head", "ffn_neuron")
    for direction in ("corrupt", "restore"):
        made = opened().attribution_patching(pair, direction=direction, kinds=kinds, sample=200)
        assert made.agreement is not None and made.agreement.correlation.units == 66
        best = {str(u) for (_, u), s in made.estimates.of_kind("head").items() if abs(s) > 1e-4}
        assert best <= {"L0H1", "L1H2"} and "L1H2" in best
    assert made.estimates.donor > made.estimates.base  # restoring brings the metric back


def test_wrong_requests_are_refused() -> None:
    pair = pairs(1)[0]
    with pytest.raises(ChoiceError, match="edges"):
        opened().circuit(pair, 3, by="neurons")
    with pytest.raises(UsageError, match="Give 1"):
        opened().circuit(pair, 0)
    with pytest.raises(UsageError, match="no pair"):
        opened().edge_scores([])
    with pytest.raises(ChoiceError, match="direction"):
        opened().attribution_patching(pair, direction="denoise")
    longer = PatchPair(pair.clean, [*pair.corrupted, 3], pair.metric)
    with pytest.raises(UsageError, match="8 and 9 tokens"):
        opened().edge_scores(longer)
