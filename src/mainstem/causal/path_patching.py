"""Path patching: the effect of a sender on a receiver along the direct path alone, through the stream.

In a run of the clean prompt a receiver reads what it would read if the sender (a head, a neuron, an MLP, an embedding)
had written what it writes for the other prompt, and all other writes were what they are; everything after the receiver
runs free. (Goldowsky-Dill et al. 2023, "Localizing model behavior with path patching"; Wang et al. 2022, appendix B.
Wang et al. let MLPs between the two compute again; here they are frozen too, so that a path is one edge of the graph
of writes and reads, and longer paths go through a receiver of their own.)

No run with frozen writes is needed. A stream value is a known function of the writes (`mainstem.model.graph`), norms
included, so what a receiver reads is computed from the clean run's writes with the sender's in place of its own: exact,
also behind norms after a sublayer and before the read, which have the scale of the stream that they then see. Factors
that the model computes from the stream itself (gates) stay those of the clean run, as writes do. Two steps follow, both
as rows of batches: for heads one run for each sender, in which the model makes rotated queries, keys and values of what
is read; then one run for each pair, in which only the receiver is changed. The path to the logits needs no run.

A sender's total effect stands beside: the run in which its write is the other one, and everything after it runs free.
In a circuit that is linear in its sender (patterns and norms frozen, no neurons) the effects along all direct paths out
of the sender add up to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.readout import logits_of
from mainstem.causal.changes import Change, Pass, set_by_position
from mainstem.causal.edges import ROLES
from mainstem.causal.edited_rows import EditedRows, Row
from mainstem.causal.head_changes import HeadChange, head_values
from mainstem.causal.pieces import Attending, PieceMap
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import LevelRefusedError, UnitError, UsageError
from mainstem.model.anatomy import ExpertRead, Read
from mainstem.model.graph import Gate, evaluate
from mainstem.points import Point
from mainstem.run.capture import Captured, capture
from mainstem.units import Unit

LOGITS = "logits"
HELP = "Receivers are L9H8.query, L9H8.key, L9H8.value, L5.attn.input, L5.mlp.input and logits."


@dataclass(frozen=True, eq=False)
class PathEffects:
    """What each sender does to each receiver.

    Attributes:
        senders: addresses.
        receivers: addresses; several that were changed together are joined by " + ".
        effects: the change of the metric when the receiver alone reads what the other prompt's sender writes; exactly
            0 where no path leads.
        totals: the change of the metric when all that follow the sender do.
        metric: its name.
        clean, other: the metric of the two prompts' runs.
        position: the destination, counted from 0.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    effects: Float[Tensor, "sender receiver"]
    totals: Float[Tensor, " sender"]
    metric: str
    clean: float
    other: float
    position: int
    provenance: Any = None

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """The paths with the largest effects of either sign: sender, receiver, effect."""
        order = self.effects.flatten().abs().argsort(descending=True, stable=True)[:count].tolist()
        width = len(self.receivers)
        return [(self.senders[i // width], self.receivers[i % width], float(self.effects.flatten()[i])) for i in order]


@dataclass(frozen=True, eq=False)
class _Reading:
    """A receiver's point: the matrices or experts by which it reads, and the head whose operand they make."""

    reads: Sequence[Read | ExpertRead]
    head: Attending | None = None


class PathPatching:
    """Two runs, of which paths are asked.

    Args:
        rows: makes runs of the clean prompt.
        other: [pos] the other prompt, of as many tokens.
    """

    def __init__(self, rows: EditedRows, other: Int[Tensor, " pos"]) -> None:
        self.rows, self.anatomy, self.pieces = rows, rows.anatomy, PieceMap(rows.anatomy)
        self.clean, self.other = (_captured(rows, ids) for ids in (rows.ids, other))
        self.other_logits = self.other.logits[0, rows.position]
        self.gates: dict[Gate, Tensor] = {gate: value[0] for gate, value in self.clean.gates.items()}
        self.values = self._values({})

    def effects(
        self,
        senders: Sequence[Unit],
        receivers: Sequence[Sequence[str]],
        metric: LogitMetric,
        positions: Sequence[int] | None = None,
        name: str = "metric",
    ) -> PathEffects:
        """The effect of each sender on each receiver.

        Args:
            senders: embeddings, sublayers, heads, attention neurons or FFN neurons.
            receivers: for each one its addresses, several if they are changed together.
            metric: from logits to numbers.
            positions: where the sender's write is the other one, from 0; everywhere by default.
            name: of the metric.

        Raises:
            UnitError, LevelRefusedError: if the model has no such sender or receiver, or it cannot be had.
            UsageError: if nothing is named, or the logits are changed together with other receivers.
        """
        if not senders or not receivers:
            raise UsageError("Paths need a sender and a receiver", None, HELP)
        readings = [None if list(own) == [LOGITS] else [self._reading(at) for at in own] for own in receivers]
        sent = [self._sent(sender, positions) for sender in senders]
        found = [self._values(writes) for writes in sent]
        heads = [one for own in readings if own is not None for one in own if one.head is not None]
        operands = self._operands(found, heads)
        clean = float(metric(self.rows.clean[None]))
        effects = torch.zeros(len(senders), len(receivers), dtype=torch.float64)
        cells: list[tuple[int, int]] = []
        runs: list[Row] = []
        for i, values in enumerate(found):
            for j, own in enumerate(readings):
                if own is None:
                    effects[i, j] = self._to_logits(values, metric)
                elif changes := [change for reading in own for change in self._changes(i, reading, values, operands)]:
                    cells.append((i, j))
                    runs.append(Row(changes=changes))
        if runs:
            effects[tuple(torch.tensor(cells).T)] = (metric(self.rows.logits(runs)) - clean).cpu()
        return PathEffects(
            tuple(map(str, senders)),
            tuple(" + ".join(own) for own in receivers),
            effects,
            (metric(self.rows.logits([self._whole(writes) for writes in sent])) - clean).cpu(),
            name,
            clean,
            float(metric(self.other_logits[None])),
            self.rows.position,
        )

    def _values(self, sent: dict[int, Tensor]) -> list[Tensor]:
        """Every stream value [pos, d_model] of the clean run, with some writes replaced."""
        writes = [sent.get(i, write[0]) for i, write in enumerate(self.clean.writes)]
        return evaluate(self.anatomy.graph, writes, self.gates).values

    def _sent(self, unit: Unit, positions: Sequence[int] | None) -> dict[int, Float[Tensor, "pos d_model"]]:
        """What the sender's writes are with its own part from the other run, by their numbers."""
        found: dict[int, Tensor] = {}
        if unit.kind in ("sublayer", "embedding"):
            self.pieces.of(Point("write", unit))
            found = {i: self.other.writes[i][0] for i in self.anatomy.writes_of(unit)}
        else:
            if unit.source is not None or unit.kind in ("bias", "rounding"):
                raise UnitError(f"{unit} is no sender", None, "Senders are embeddings, sublayers, heads and neurons.")
            for i, entries in self.pieces.neurons.places(unit):
                write = self.anatomy.writes[i]
                if write.experts is not None or write.projection is None:
                    raise LevelRefusedError(f"{unit} is no sender", reason="routing differs from token to token")
                change = (self.other.sources[i][0] - self.clean.sources[i][0])[:, entries].double()
                carried = change @ write.projection.columns(torch.tensor(entries)).to(change).T
                found[i] = (self.clean.writes[i][0] + carried).to(write.dtype)
        if positions is not None:
            kept = torch.ones(len(self.rows.ids), 1, dtype=torch.bool, device=self.rows.ids.device)
            kept[list(positions)] = False
            found = {i: torch.where(kept, self.clean.writes[i][0], write) for i, write in found.items()}
        return found

    def _whole(self, sent: dict[int, Tensor]) -> Row:
        """The run in which everything after the sender sees its other write."""
        return Row(changes=[Change(self.anatomy.writes[i].site, set_by_position(w)) for i, w in sent.items()])

    def _reading(self, address: str) -> _Reading:
        if address == LOGITS:
            raise UsageError("The logits are a receiver of their own", None, "Ask for the other receivers separately.")
        at = Point.parse(address)
        if at.kind not in (*ROLES, "input") or at.unit is None:
            raise UnitError(f"{address} receives nothing", None, HELP)
        pieces = self.pieces.of(at)
        if at.kind == "input":
            return _Reading(self.pieces.reads(at))
        reads = [read for read in self.anatomy.reads if read.unit == at.unit.sublayer and at.kind in read.roles]
        if not reads or not isinstance(pieces[0], Attending):
            raise LevelRefusedError(f"No path to {address}", reason="no matrix is seen to make it of the stream")
        return _Reading(reads, pieces[0])

    def _operands(self, found: list[list[Tensor]], heads: list[_Reading]) -> dict[_Reading, list[Tensor]]:
        """What each head's reading becomes, [pos, entry] for each sender.

        One run for each sender: what all receivers read is replaced, and the model makes queries, keys and values.
        """
        kept: dict[_Reading, list[Tensor]] = {reading: [] for reading in heads}
        reads = dict.fromkeys(read for reading in heads for read in reading.reads)
        runs = [
            Row(changes=[Change(read.input_site, set_by_position(values[read.node])) for read in reads])
            for values in found
        ]

        def watch(now: Pass):
            taps = []
            for reading in heads:
                piece = reading.head
                assert piece is not None
                taps += head_values(piece.core, {(piece.head, piece.what): kept[reading]}, now)
            return taps

        if heads:
            self.rows.logits(runs, watch)
        return kept

    def _changes(
        self, sender: int, reading: _Reading, values: list[Tensor], operands: dict[_Reading, list[Tensor]]
    ) -> list:
        """What becomes of the receiver; nothing where what it reads is the same to the bit."""
        reads = [read for read in reading.reads if not torch.equal(values[read.node], self.values[read.node])]
        if not reads:
            return []
        if reading.head is None:
            return [Change(read.input_site, set_by_position(values[read.node])) for read in reads]
        head = reading.head
        return [HeadChange(head.core, head.head, head.what, set_by_position(operands[reading][sender]))]

    def _to_logits(self, values: list[Tensor], metric: LogitMetric) -> float:
        """The change of the metric when the readout alone sees the sender's other write."""
        root, place = self.anatomy.graph.root, self.rows.position
        states = torch.stack([values[root][place], self.values[root][place]])
        made = metric(logits_of(self.anatomy.readout, states))
        return float(made[0] - made[1])


def _captured(rows: EditedRows, ids: Int[Tensor, " pos"]) -> Captured:
    every = torch.arange(len(ids), device=ids.device)[None]
    return capture(rows.model, rows.anatomy, ids[None], every, reads=False, **rows.forward)
