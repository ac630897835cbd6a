"""Attribution patching and circuits for a model's own prompts: what the session asks of the layers below.

A `PatchPair` is a clean and a corrupted prompt and a metric of the logits at one destination. Estimates say what
patching each unit would do; a circuit is found by edge attribution over one pair or several, and run for real on each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

import torch

from mainstem.analysis.circuits import best_edges, best_nodes, members
from mainstem.causal.attribution_patching import (
    KINDS,
    STEPS,
    AttributionPatcher,
    AttributionPatching,
    Gradient,
    QueryKeyEffect,
)
from mainstem.causal.circuit_runs import CircuitQuality, CircuitRunner
from mainstem.causal.edge_attribution import EdgeScores, edge_attribution, mean_scores
from mainstem.causal.exact_patching import Agreement, agreement, exact_effects
from mainstem.causal.metrics import checked_metric
from mainstem.causal.tracked import Cost, LogitMetric, Prompt, require_same_length
from mainstem.errors import ChoiceError, UsageError
from mainstem.intervene.intervening import one_prompt, require_whole_edits
from mainstem.results.reading import Provenance
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model

Direction = Literal["corrupt", "restore"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
"""Corrupted activations into the clean run, or clean ones into the corrupted run."""
CircuitBy = Literal["edges", "nodes"]
CIRCUITS_BY: tuple[CircuitBy, ...] = get_args(CircuitBy)


@dataclass(frozen=True, eq=False)
class PatchPair:
    """Two prompts of as many tokens, and what is asked of their runs.

    Attributes:
        clean, corrupted: text, or token ids.
        metric: differentiable; from the logits of some runs at the destination, [run, d_vocab], to a number for each.
        position: the destination, negative from the end.
    """

    clean: str | Sequence[int]
    corrupted: str | Sequence[int]
    metric: LogitMetric
    position: int = -1


@dataclass(frozen=True, eq=False)
class PatchingEstimates:
    """Attribution patching of one pair.

    Attributes:
        estimates: of every unit.
        agreement: with exact patching of a sample; None if none was asked for.
    """

    estimates: AttributionPatching
    agreement: Agreement | None
    provenance: Provenance


@dataclass(frozen=True)
class CircuitEdge:
    """An edge of a circuit: who writes, who reads (an address, or `logits`), as what, and its score."""

    writer: Unit
    reader: str
    role: str
    score: float


@dataclass(frozen=True, eq=False)
class Circuit:
    """A circuit, and what it does in each pair.

    Attributes:
        by: whether edges or nodes were chosen, and `size` how many were asked for.
        edges: in the order of their scores' sizes.
        nodes: the writers, each with its score.
        qualities: one for each pair.
        unexplained: how far the edges of a writer are from its own score, at most, relative; `tolerance` the bound.
        cost: of the scores; circuits run beside it.
    """

    by: CircuitBy
    size: int
    edges: list[CircuitEdge]
    nodes: dict[Unit, float]
    qualities: list[CircuitQuality]
    steps: int
    unexplained: float
    tolerance: float
    cost: Cost
    provenance: Provenance

    @property
    def faithfulness(self) -> float:
        """The share of the metric's difference that the circuit has, averaged over the pairs."""
        return fmean(quality.faithfulness for quality in self.qualities)

    @property
    def completeness(self) -> float:
        """The share that is left without the circuit, averaged over the pairs."""
        return fmean(quality.completeness for quality in self.qualities)

    @property
    def minimality(self) -> dict[Unit, float]:
        """What the circuit loses without each writer, averaged over the pairs."""
        return {unit: fmean(quality.minimality[unit] for quality in self.qualities) for unit in self.nodes}


def attribution_patching(
    model: "Model",
    pair: PatchPair,
    *,
    direction: Direction = "corrupt",
    gradient: Gradient = "gradient",
    query_key: QueryKeyEffect = "linear",
    steps: int = STEPS,
    kinds: Iterable[str] = KINDS,
    sample: int = 0,
) -> PatchingEstimates:
    """What patching each unit from one prompt's run into the other's would do, estimated for all at once.

    Args:
        model: the session's.
        pair: the prompts and the metric.
        direction: `corrupt` patches the clean run, `restore` the corrupted one.
        gradient: `gradient`, `grad-drop` or `integrated`; see `mainstem.causal.attribution_patching`.
        query_key: `linear`, or `exact`: queries and keys go through the softmax.
        steps: of `integrated`.
        kinds: embedding, sublayer, head, attention_neuron, ffn_neuron, expert_neuron, query, key, value.
        sample: how many units to patch for real, to say how well the estimates order them.

    Raises:
        ChoiceError: if a word is not among those allowed.
        UsageError: if the prompts differ in length, there is no kind, or the sample is negative.
        LevelRefusedError: if no unit of the kinds can be patched.
    """
    if direction not in DIRECTIONS:
        raise ChoiceError("direction", direction, DIRECTIONS)
    if sample < 0:
        raise UsageError("A sample of fewer than no units", f"sample={sample}", "Give 1 or more, or 0 for none.")
    clean, corrupted, metric = _asked(model, pair)
    base, donor = (clean, corrupted) if direction == "corrupt" else (corrupted, clean)
    patcher = AttributionPatcher(model.module, model.anatomy, base, donor, metric, kinds)
    estimates = patcher.estimate(gradient, query_key, steps)
    found = None
    if sample:
        exact = exact_effects(model.module, patcher.places, base, donor, metric, sample, model.seed)
        found = agreement(estimates, exact, seed=model.seed)
    return PatchingEstimates(estimates, found, model.provenance())


def edge_scores(model: "Model", pairs: PatchPair | Sequence[PatchPair], steps: int = STEPS) -> EdgeScores:
    """The estimated effect of corrupting each edge alone, averaged over the pairs.

    Args:
        model: the session's.
        pairs: one or several.
        steps: of integrated gradients; 0 is the clean run's gradient.

    Raises:
        UsageError: if there is no pair, or prompts of a pair differ in length.
        LevelRefusedError: if the model's edges cannot be had.
        CertificateError: if the edges of a writer do not sum to the writer.
    """
    several = [pairs] if isinstance(pairs, PatchPair) else list(pairs)
    if not several:
        raise UsageError("There is no pair of prompts", None, "Give one at least.")
    made = []
    for pair in several:
        made.append(edge_attribution(model.module, model.edges, *_asked(model, pair), steps))
    return mean_scores(made)


def circuit(
    model: "Model",
    pairs: PatchPair | Sequence[PatchPair],
    size: int,
    by: CircuitBy = "edges",
    steps: int = STEPS,
    scores: EdgeScores | None = None,
) -> Circuit:
    """The circuit of at most `size` edges or nodes, and what it does when everything else is corrupted.

    Args:
        model: the session's.
        pairs: one or several.
        size: how many edges or writers.
        by: what is chosen: `edges`, or `nodes` with all edges among them.
        steps: of integrated gradients.
        scores: as `edge_scores` gave them, where they are known already.

    Raises:
        ChoiceError: if `by` is neither.
        UsageError: if the size is below 1, or a metric does not tell the prompts of a pair apart.
        LevelRefusedError, CertificateError: as `edge_scores`.
    """
    if by not in CIRCUITS_BY:
        raise ChoiceError("what a circuit is made of", by, CIRCUITS_BY)
    if size < 1:
        raise UsageError(f"A circuit of {size} {by}", None, "Give 1 at least.")
    several = [pairs] if isinstance(pairs, PatchPair) else list(pairs)
    made = edge_scores(model, several, steps) if scores is None else scores
    graph = made.graph
    wiring = graph.wiring
    chosen = best_edges(wiring, made.scores, size) if by == "edges" else best_nodes(wiring, made.nodes, size)
    qualities = []
    for pair in several:
        qualities.append(CircuitRunner(model.module, graph, *_asked(model, pair)).quality(chosen))
    edges = []
    for writer, reader in torch.nonzero(chosen).tolist():
        own = graph.readers[reader]
        edges.append(CircuitEdge(graph.writers[writer], own.name, own.role, float(made.scores[writer, reader])))
    edges.sort(key=lambda edge: -abs(edge.score))
    kept = torch.nonzero(members(wiring, chosen)).flatten().tolist()
    nodes = {graph.writers[i]: float(made.nodes[i]) for i in kept}
    certificate = made.unexplained, made.tolerance
    return Circuit(by, size, edges, nodes, qualities, made.steps, *certificate, made.cost, model.provenance())


def _asked(model: "Model", pair: PatchPair) -> tuple[Prompt, Prompt, LogitMetric]:
    """The prompts of a pair as runs need them, clean and corrupted, and its metric."""
    require_whole_edits(model)
    inputs = [one_prompt(model, prompt) for prompt in (pair.clean, pair.corrupted)]
    clean, corrupted = (Prompt(one.ids[0], one.place(pair.position), one.forward) for one in inputs)
    require_same_length(clean, corrupted)
    return clean, corrupted, checked_metric(pair.metric)
