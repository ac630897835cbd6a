"""Edge attribution patching with integrated gradients: what corrupting each edge of the stream alone would do.

An edge carries a writer's write to one reader. Corrupting it gives that reader, and no other, the write of the
corrupted run; to first order the metric changes by (corrupted write - clean write) . d metric / d write through that
reader alone (Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit Discovery"). The gradient is its
mean along the straight line from the clean embeddings to the corrupted ones (Hanna et al. 2024, "Have Faith in
Faithfulness", eq. 4), by Gauss-Legendre quadrature; with `steps=0` it is that of the clean run (plain EAP).

A reader's gradient is that of its own rows of the read's result, carried back through its matrix and, by
differentiating the anatomy's stream graph, through every norm up to each write; nothing is frozen. So the scores of a
writer's edges sum to the score of patching the writer as a whole, and how nearly they do is the result's certificate:
it fails where something reads the stream out of the anatomy's sight.

Cost: two forwards for the differences of writes; for each step one forward and one backward, and the graph's own
derivatives.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.attribution import quadrature
from mainstem.causal.edges import EdgeGraph, Part, Piece
from mainstem.causal.row_batches import LARGEST_SLACK
from mainstem.causal.tracked import (
    Cost,
    LogitMetric,
    Prompt,
    Tracked,
    between,
    require_same_length,
    seen,
    tracked,
)
from mainstem.errors import CertificateError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.graph import Gates, StreamGraph, gates_of, stream_values, writes_behind
from mainstem.model.hooks import Site
from mainstem.model.layouts import by_token

STEPS = 5


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """The estimated effect of corrupting each edge, and each writer, alone.

    Attributes:
        graph: the writers and readers.
        scores: of each edge; 0 where there can be none.
        nodes: of each writer, from the gradient at its write.
        clean, corrupted: the metric of the two runs.
        steps: of the quadrature; 0 for the clean run's gradient.
    """

    graph: EdgeGraph
    scores: Float[Tensor, "writer reader"]
    nodes: Float[Tensor, " writer"]
    clean: float
    corrupted: float
    steps: int
    cost: Cost

    @property
    def unexplained(self) -> float:
        """The largest difference between a writer's score and the sum of its edges', over the largest score."""
        largest = float(self.nodes.abs().max())
        return float((self.scores.sum(1) - self.nodes).abs().max()) / largest if largest else 0.0

    @property
    def tolerance(self) -> float:
        """How much of that rounding can explain: norms compute in float32 at best."""
        eps = max(torch.finfo(self.graph.anatomy.dtype).eps, torch.finfo(torch.float32).eps)
        return min(1024 * eps, LARGEST_SLACK)

    def require(self) -> None:
        """Raises CertificateError if the edges do not account for the writers; names the one that is farthest off."""
        if not self.unexplained <= self.tolerance:
            worst = int((self.scores.sum(1) - self.nodes).abs().argmax())
            raise CertificateError(
                "The edges of a writer do not sum to what patching it does",
                str(self.graph.writers[worst]),
                relative_error=self.unexplained,
                tolerance=self.tolerance,
            )


def edge_attribution(
    model: torch.nn.Module,
    graph: EdgeGraph,
    clean: Prompt,
    corrupted: Prompt,
    metric: LogitMetric,
    steps: int = STEPS,
) -> EdgeScores:
    """The scores of all edges between two prompts.

    Args:
        model: the module; it is left as it was.
        graph: its writers and readers.
        clean: the run that edges are corrupted in.
        corrupted: the other prompt, of as many tokens.
        metric: of the logits at the clean prompt's destination.
        steps: of integrated gradients; 0 takes the clean run's gradient.

    Raises:
        UsageError: if the prompts have not the same number of tokens, or steps are negative.
        RunError: if the model cannot be differentiated.
        CertificateError: if the edges of a writer do not sum to the writer.
    """
    require_same_length(clean, corrupted)
    if steps < 0:
        raise UsageError("There are no negative steps", f"steps={steps}", "5 is the default; 0 is the plain gradient.")
    anatomy = graph.anatomy
    runs = [seen(model, graph.sites, prompt, metric, {}) for prompt in (clean, corrupted)]
    written = [{p: written_by(anatomy, p, run, 1, len(clean)) for p in graph.pieces} for run in runs]
    changes = {piece: (written[1][piece] - written[0][piece])[0] for piece in graph.pieces}
    scores = torch.zeros(graph.exists.shape, dtype=torch.float64)
    nodes = torch.zeros(len(graph.writers), dtype=torch.float64)
    asked = list(dict.fromkeys([*(w.site for w in anatomy.writes), *graph.read_sites, anatomy.readout.stream_site]))
    points, weights = quadrature(steps) if steps else ([0.0], [1.0])
    for point, weight in zip(points, weights, strict=True):
        replaced = between(anatomy, runs[0], runs[1], point) | dict.fromkeys(graph.input_sites, _of_its_own)
        run, slopes = tracked(
            model, anatomy, graph.sites, clean, metric, replaced, lambda run: (run, run.gradients(asked))
        )
        with torch.no_grad():
            _add_nodes(nodes, graph, changes, slopes, weight)
        _add_edges(scores, graph, changes, stream_of(anatomy, run, len(clean)), slopes, weight)
    cost = Cost(2 + len(points), len(points))
    made = EdgeScores(graph, scores, nodes, float(runs[0].metric), float(runs[1].metric), steps, cost)
    made.require()
    return made


def mean_scores(made: Sequence[EdgeScores]) -> EdgeScores:
    """The mean over several pairs of prompts, of one graph and as many steps."""
    first = made[0]
    ends = (fmean(one.clean for one in made), fmean(one.corrupted for one in made))
    scores, nodes = (torch.stack(rows).mean(0) for rows in ([m.scores for m in made], [m.nodes for m in made]))
    return EdgeScores(first.graph, scores, nodes, *ends, first.steps, sum((one.cost for one in made), Cost()))


@dataclass(frozen=True, eq=False)
class Stream:
    """What a stream graph is evaluated from: the writes and gates of one run."""

    writes: list[Float[Tensor, "pos d_model"]]
    gates: Gates


def stream_of(anatomy: Anatomy, run: Tracked, positions: int) -> Stream:
    """The writes and gates of a run."""

    def rows(site: Site) -> Tensor:
        return by_token(run.values[site].detach(), site, 1, positions)[0]

    gates = {gate: rows(gate.site) for gate in gates_of(anatomy.graph)}
    return Stream([rows(write.site) for write in anatomy.writes], gates)


def written_by(anatomy: Anatomy, piece: Piece, run: Tracked, runs: int, positions: int) -> Tensor:
    """[run, pos, writer, d_model]: what the writers of one write wrote, a bias that they share left out."""
    write = anatomy.writes[piece.write]
    if not piece.heads:
        return by_token(run.values[write.site].detach(), write.site, runs, positions)[:, :, None]
    assert write.source is not None and write.attention is not None and write.projection is not None
    source = by_token(run.values[write.source].detach(), write.source, runs, positions)
    matrix = write.projection.columns(slice(None)).detach().to(source)
    channels = write.attention.channels.to(source.device)
    return torch.einsum("rphj,dhj->rphd", source[..., channels], matrix[:, channels])


def _of_its_own(value: Tensor) -> Tensor:
    """What one module call receives, so that its gradient is of that call alone: others may receive the same tensor."""
    return value.view_as(value)


def _add_nodes(nodes: Tensor, graph: EdgeGraph, changes: dict[Piece, Tensor], slopes: dict, weight: float) -> None:
    for piece, change in changes.items():
        site = graph.anatomy.writes[piece.write].site
        slope = by_token(slopes[site], site, 1, len(change))[0]
        nodes[list(piece.writers)] += weight * torch.einsum("pd,pwd->w", slope, change).double().cpu()


def _add_edges(
    scores: Tensor, graph: EdgeGraph, changes: dict[Piece, Tensor], stream: Stream, slopes: dict, weight: float
) -> None:
    """Adds the scores of all edges at one point of the line."""
    positions = len(next(iter(changes.values())))
    entering: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for r, reader in enumerate(graph.readers):
        for part in reader.parts or (None,):
            entering[graph.node(part)].append((r, _slope_of(graph.anatomy, part, slopes, positions)))
    for node, found in entering.items():
        readers = [r for r, _ in found]
        slope = torch.stack([one for _, one in found])
        for i, gradient in _through_graph(graph, node, stream, slope).items():
            for piece in (p for p in graph.pieces if p.write == i):
                made = torch.einsum("rpd,pwd->wr", gradient, changes[piece]).double().cpu()
                for writer, row in zip(piece.writers, made, strict=True):
                    scores[writer].index_add_(0, torch.tensor(readers), weight * row)


def _slope_of(anatomy: Anatomy, part: Part | None, slopes: dict[Site, Tensor], positions: int) -> Tensor:
    """[pos, d_model]: the gradient at what a matrix reads, through some of its rows alone."""
    if part is None:
        site = anatomy.readout.stream_site
        return by_token(slopes[site], site, 1, positions)[0]
    return part.in_stream(part.arranged(slopes[part.site], 1, positions)[0])


def _through_graph(
    graph: EdgeGraph, node: int, stream: Stream, slope: Float[Tensor, "reader pos d_model"]
) -> dict[int, Float[Tensor, "reader pos d_model"]]:
    """From gradients at a value of the stream to gradients at each write that it is made from."""
    below = StreamGraph(graph.anatomy.graph.nodes, node)
    leaves = {i: stream.writes[i].clone().requires_grad_() for i in sorted(writes_behind(below, node))}
    with torch.enable_grad():
        writes = [leaves.get(i, write) for i, write in enumerate(stream.writes)]
        value = stream_values(below, writes, stream.gates)
        found = torch.autograd.grad(value, list(leaves.values()), slope.to(value), is_grads_batched=True)
    return dict(zip(leaves, found, strict=True))
