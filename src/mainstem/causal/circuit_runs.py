"""A circuit run for real: every edge outside it carries what it carries in the corrupted run.

The clean prompt runs once, and each reader is given a stream of its own: the run's, with the writes of the circuit's
other writers exchanged for those of the corrupted run (resample ablation; Wang et al. 2022, "Interpretability in the
Wild", and the path patching of Goldowsky-Dill et al. 2023). The stream graph is evaluated with the exchanged writes, so
norms are computed anew; the difference goes through the reader's rows of its matrix and is added to the read's result.
Readers come in the order of execution, so what a writer writes is what its own inputs made it. A circuit of all edges
is the clean run, to the bit; one without edges gives the corrupted run's logits.

    faithfulness   (m(circuit) - m(corrupted)) / (m(clean) - m(corrupted)): 1 if the circuit is enough
    completeness   the same of everything but the circuit: 0 if nothing outside it does the same
    minimality     for each writer, m(circuit) - m(circuit without its edges), over m(clean) - m(corrupted)

Cost: a forward pass for each circuit and the evaluations of the stream graph; some circuits are a batch, where the
model does not mix its rows.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mainstem.analysis.circuits import Edges, members
from mainstem.causal.edge_attribution import written_by
from mainstem.causal.edges import EdgeGraph, Part, Piece
from mainstem.causal.row_batches import BATCH_ENTRIES, mixes_rows
from mainstem.causal.tracked import LogitMetric, Prompt, Tracked, require_same_length, seen
from mainstem.errors import UsageError
from mainstem.model.graph import Gate, StreamGraph, gates_of, stream_values, writes_behind
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.layouts import by_token
from mainstem.model.outputs import logits_of
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class CircuitQuality:
    """What one circuit does, by real runs.

    Attributes:
        edges: how many edges it has; `nodes` its writers.
        clean, corrupted, circuit, complement: the metric of the whole runs, of the circuit, and of all but the circuit.
        minimality: for each writer what the circuit loses without it, as a share of the whole difference.
    """

    edges: int
    nodes: tuple[Unit, ...]
    clean: float
    corrupted: float
    circuit: float
    complement: float
    minimality: dict[Unit, float]

    @property
    def faithfulness(self) -> float:
        """The share of the metric's difference that the circuit has."""
        return (self.circuit - self.corrupted) / (self.clean - self.corrupted)

    @property
    def completeness(self) -> float:
        """The share that is left without the circuit."""
        return (self.complement - self.corrupted) / (self.clean - self.corrupted)


class CircuitRunner:
    """Runs circuits between two prompts.

    Args:
        model: the module; it is left as it was.
        graph: its writers and readers.
        clean: the run that is circuits' own.
        corrupted: the run that everything outside them is taken from, of as many tokens.
        metric: of the logits at the clean prompt's destination.

    Raises:
        UsageError: if the prompts have not the same number of tokens.
    """

    def __init__(
        self, model: torch.nn.Module, graph: EdgeGraph, clean: Prompt, corrupted: Prompt, metric: LogitMetric
    ) -> None:
        require_same_length(clean, corrupted)
        self.model, self.graph, self.prompt, self.metric = model, graph, clean, metric
        donor = seen(model, graph.sites, corrupted, metric, {})
        self.donor = {piece: written_by(graph.anatomy, piece, donor, 1, len(clean))[0] for piece in graph.pieces}
        with torch.no_grad():
            logits = logits_of(model(input_ids=clean.ids[None], **clean.forward))[:, clean.position]
        self.clean, self.corrupted = float(metric(logits)), float(donor.metric)
        # Where a read's result has its batch on another axis than the first is only known of a single run.
        apart = all(read.axis is None for read in graph.anatomy.reads)
        self.in_batches = apart and not mixes_rows(model, clean.ids, clean.position, logits[0], **clean.forward)

    def quality(self, edges: Edges) -> CircuitQuality:
        """Faithfulness, completeness and minimality of a circuit.

        Raises:
            UsageError: if the metric does not tell the two prompts apart.
        """
        if not abs(self.clean - self.corrupted) > 1e-6 * max(abs(self.clean), abs(self.corrupted)):
            raise UsageError(
                f"The metric is {self.clean:.6g} on the clean prompt and {self.corrupted:.6g} on the corrupted one",
                None,
                "Choose prompts or answers that it tells apart.",
            )
        wiring = self.graph.wiring
        nodes = torch.nonzero(members(wiring, edges)).flatten().tolist()
        without = []
        for node in nodes:
            kept = edges.clone()
            kept[node] = False
            kept[:, wiring.feeds[:, node]] = False
            without.append(kept)
        circuit, complement, *rest = self.metrics([edges, wiring.exists & ~edges, *without]).tolist()
        whole = self.clean - self.corrupted
        units = [self.graph.writers[node] for node in nodes]
        lost = {unit: (circuit - value) / whole for unit, value in zip(units, rest, strict=True)}
        ends = (self.clean, self.corrupted, circuit, complement)
        return CircuitQuality(int(edges.sum()), tuple(units), *ends, lost)

    def metrics(self, circuits: Sequence[Edges]) -> Float[Tensor, " run"]:
        """The metric of each circuit."""
        anatomy = self.graph.anatomy
        entries = len(self.prompt) * max(anatomy.sizes.d_vocab, len(self.graph.writers) * anatomy.sizes.d_model)
        size = max(1, BATCH_ENTRIES // entries) if self.in_batches else 1
        chunks = [circuits[start : start + size] for start in range(0, len(circuits), size)]
        return torch.cat([_PathRun(self, torch.stack(list(chunk))).metric() for chunk in chunks])


class _PathRun:
    """One batch of circuits, each a row."""

    def __init__(self, runner: CircuitRunner, kept: Bool[Tensor, "run writer reader"]) -> None:
        self.runner, self.graph, self.anatomy = runner, runner.graph, runner.graph.anatomy
        self.out = self.graph.exists & ~kept
        self.runs, self.positions = len(kept), len(runner.prompt)
        self.values: dict[Site, Tensor] = {}
        self.changes: dict[Piece, Tensor] = {}
        self.stream: dict[int, Tensor] = {}

    @torch.no_grad()
    def metric(self) -> Float[Tensor, " run"]:
        """Runs the batch."""
        prompt = self.runner.prompt
        readers: dict[Site, list[tuple[int, Part | None]]] = defaultdict(list)
        for r, reader in enumerate(self.graph.readers):
            for part in reader.parts or (None,):
                site = self.anatomy.readout.stream_site if part is None else part.site
                if self.out[:, :, r].any():
                    readers[site].append((r, part))
        taps = [(site, self._keep(site)) for site in self.graph.sites]
        taps += [(site, self._exchange(site, own)) for site, own in readers.items()]
        with tapped(self.runner.model, taps):
            logits = logits_of(
                self.runner.model(input_ids=prompt.ids.expand(self.runs, -1).contiguous(), **prompt.forward)
            )
        return self.runner.metric(logits[:, prompt.position])

    def _keep(self, site: Site) -> Tap:
        def tap(leaves: list[Any]) -> None:
            value = leaves[site.slot]
            self.values[site] = value.clone() if site.overwritten else value

        return tap

    def _exchange(self, site: Site, readers: list[tuple[int, Part | None]]) -> Tap:
        """Adds to the result of a read, or to the last stream, what the exchange of writes changes in it."""

        def tap(leaves: list[Any]) -> list[Any]:
            out = leaves[site.slot].clone(memory_format=torch.contiguous_format)
            places = torch.arange(out.numel(), device=out.device).reshape(out.shape)
            for r, part in readers:
                change = self._difference(r, self.graph.node(part))
                if part is None:
                    where = by_token(places, site, self.runs, self.positions)
                else:
                    where, change = part.arranged(places, self.runs, self.positions), part.in_result(change)
                out.view(-1)[where] += change.to(out)
            new = list(leaves)
            new[site.slot] = out
            return new

        return tap

    def _difference(self, reader: int, node: int) -> Float[Tensor, "run pos d_model"]:
        """What a reader's value of the stream is with its writes exchanged, minus what it is in the run."""
        own = self._writes(node)
        other = dict(own)
        for piece in self.graph.pieces:
            out = self.out[:, list(piece.writers), reader]
            if piece.write in own and out.any():
                change = torch.einsum("rw,rpwd->rpd", out.to(own[piece.write]), self._change(piece))
                other[piece.write] = other[piece.write] + change
        if node not in self.stream:
            self.stream[node] = self._value(node, own)
        return self._value(node, other) - self.stream[node]

    def _writes(self, node: int) -> dict[int, Float[Tensor, "run pos d_model"]]:
        behind = writes_behind(self.anatomy.graph, node)
        sites = {i: self.anatomy.writes[i].site for i in behind}
        return {i: by_token(self.values[site], site, self.runs, self.positions) for i, site in sites.items()}

    def _change(self, piece: Piece) -> Float[Tensor, "run pos writer d_model"]:
        """What the writers of a piece write in the corrupted run, minus what they write in this one."""
        if piece not in self.changes:
            run = Tracked(self.values, torch.empty(0))
            self.changes[piece] = self.runner.donor[piece] - written_by(
                self.anatomy, piece, run, self.runs, self.positions
            )
        return self.changes[piece]

    def _value(self, node: int, writes: dict[int, Tensor]) -> Float[Tensor, "run pos d_model"]:
        empty = torch.empty(0)
        rows = [writes[i].flatten(0, 1) if i in writes else empty for i in range(len(self.anatomy.writes))]
        gates: dict[Gate, Tensor] = {}
        for gate in gates_of(self.anatomy.graph):
            if gate.site in self.values:
                gates[gate] = by_token(self.values[gate.site], gate.site, self.runs, self.positions).flatten(0, 1)
        return stream_values(StreamGraph(self.anatomy.graph.nodes, node), rows, gates).unflatten(0, (self.runs, -1))
