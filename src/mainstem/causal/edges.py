"""The edges of a model's stream: who writes, who reads, and which rows of a read's matrix are a head's.

Writers are embeddings, heads, and every other sublayer as a whole; readers are each head's query, key and value, the
input of every other sublayer (all its reads together), and the logits. An edge goes from a writer to a reader that
comes after it. Keys and values that several heads share are one reader, which feeds all of them.

A head's rows are those of the read's result that its query, key or value changes with: they are asked of the linear
map from the read to attention (`mainstem.run.operands`), so that no order of heads, queries, keys and values in a
matrix needs to be known.

Experts are one reader at the input of the module call that they and their router are in, because which matrix reads
which token is decided there: the gradient at that input has the router's share in it, and a run of a circuit routes
anew.

Limits: attention behind a read that is not found again is one writer and one reader; experts that scale what they read
before they multiply it are refused, as is anything else whose reads were not found.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mainstem.analysis.circuits import Wiring
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, ExpertRead, Read, Write
from mainstem.model.graph import gates_of, writes_behind
from mainstem.model.hooks import Site
from mainstem.model.layouts import by_position, by_token
from mainstem.run.operands import AttentionOperands, attention_operands
from mainstem.units import Unit

ROLES = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Piece:
    """The units that share one write of the anatomy: its heads, or the one unit that it belongs to.

    Attributes:
        write: the number of the write.
        writers: the numbers of the units among the graph's writers.
    """

    write: int
    writers: tuple[int, ...]

    @property
    def heads(self) -> bool:
        """Whether the write is split into heads."""
        return len(self.writers) > 1


@dataclass(frozen=True, eq=False)
class Part:
    """What a reader reads by one matrix, and its rows (None: all of them), or by experts."""

    read: Read | ExpertRead
    rows: Int[Tensor, " d_out"] | None = None

    @property
    def site(self) -> Site:
        """Where it acts: the result of the matrix, or what experts receive."""
        return self.read.site if isinstance(self.read, Read) else self.read.input_site

    def in_result(self, change: Float[Tensor, "run pos d_model"]) -> Float[Tensor, "run pos d_out"]:
        """What a change of the stream, after the norm, changes at the part's site."""
        if isinstance(self.read, ExpertRead):
            return change
        weight = self.read.weight.detach()
        return change @ (weight if self.rows is None else weight[self.rows.to(weight.device)]).to(change).T

    def in_stream(self, slope: Float[Tensor, "run pos d_out"]) -> Float[Tensor, "run pos d_model"]:
        """The gradient at the stream, after the norm, from the one at the part's site."""
        if isinstance(self.read, ExpertRead):
            return slope
        weight = self.read.weight.detach()
        return slope @ (weight if self.rows is None else weight[self.rows.to(weight.device)]).to(slope)

    def arranged(self, value: Tensor, runs: int, positions: int) -> Float[Tensor, "run pos d_out"]:
        """What is at the site (or anything of its shape) by run and position, the part's rows alone."""
        if isinstance(self.read, ExpertRead) or self.read.axis is None:
            rows = by_token(value, self.site, runs, positions)
        else:
            rows = by_position(value, self.read.axis, runs, positions)
        return rows if self.rows is None else rows[..., self.rows.to(rows.device)]


@dataclass(frozen=True, eq=False)
class Reader:
    """Something that reads the stream.

    Attributes:
        unit: whose input it is; for what several heads share the first of them, for the logits None.
        role: "query", "key", "value", or "input".
        feeds: the writers that it is an input of.
        parts: the matrices that it reads by; none for the logits.
    """

    unit: Unit | None
    role: str
    feeds: tuple[Unit, ...]
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """The address of its unit, or `logits`."""
        return "logits" if self.unit is None else str(self.unit)

    def __str__(self) -> str:
        return self.name if self.role == "input" else f"{self.name} {self.role}"


@dataclass(frozen=True, eq=False)
class EdgeGraph:
    """Writers and readers of one model, each in the order of execution."""

    anatomy: Anatomy
    writers: tuple[Unit, ...]
    pieces: tuple[Piece, ...]
    readers: tuple[Reader, ...]

    @cached_property
    def exists(self) -> Bool[Tensor, "writer reader"]:
        """Between which writers and readers there can be an edge."""
        found = torch.zeros(len(self.writers), len(self.readers), dtype=torch.bool)
        for r, reader in enumerate(self.readers):
            for part in reader.parts or (None,):
                behind = writes_behind(self.anatomy.graph, self.node(part))
                for piece in self.pieces:
                    if piece.write in behind:
                        found[list(piece.writers), r] = True
        return found

    @cached_property
    def sites(self) -> list[Site]:
        """What a run must keep for its writers' writes, every value of the stream, and the results of reads."""
        anatomy = self.anatomy
        gates = [gate.site for gate in gates_of(anatomy.graph)]
        sources = [anatomy.writes[piece.write].source for piece in self.pieces if piece.heads]
        found = [*(w.site for w in anatomy.writes), *gates, *(s for s in sources if s), *self.read_sites]
        return list(dict.fromkeys([*found, anatomy.readout.stream_site]))

    @cached_property
    def read_sites(self) -> list[Site]:
        """Where the readers' parts act."""
        return list(dict.fromkeys(part.site for reader in self.readers for part in reader.parts))

    @cached_property
    def input_sites(self) -> list[Site]:
        """Those of them that are the input of a module call."""
        parts = [part for reader in self.readers for part in reader.parts]
        return list(dict.fromkeys(part.site for part in parts if isinstance(part.read, ExpertRead)))

    @cached_property
    def wiring(self) -> Wiring:
        """The same as matrices, for the search of circuits."""
        feeds = [[writer in reader.feeds for writer in self.writers] for reader in self.readers]
        begins = [writer.kind == "embedding" for writer in self.writers]
        ends = [reader.unit is None for reader in self.readers]
        return Wiring(self.exists, *(torch.tensor(rows, dtype=torch.bool) for rows in (feeds, begins, ends)))

    def node(self, part: Part | None) -> int:
        """The value of the stream graph that a matrix reads; for the logits (None) the stream before the final norm."""
        return self.anatomy.graph.root if part is None else part.read.node


def edge_graph(module: torch.nn.Module, anatomy: Anatomy, input_ids: Int[Tensor, "1 pos"], **forward: Any) -> EdgeGraph:
    """The writers and readers of a model.

    Args:
        module: the model; it is left as it was.
        anatomy: its anatomy.
        input_ids: any short prompt; the blocks with attention are recorded on it, one run for each.
        forward: further arguments of the forward call.

    Raises:
        LevelRefusedError: if what a sublayer reads was not found, or is not seen apart.
    """
    split: dict[Unit, AttentionOperands] = {}
    for i, write in enumerate(anatomy.writes):
        if write.attention is not None and write.source is not None and write.unit not in split:
            operands = _operands(module, anatomy, i, input_ids, forward)
            if operands is not None:
                split[write.unit] = operands
    writers: dict[Unit, int] = {}
    pieces = []
    for i, write in enumerate(anatomy.writes):
        units = _heads(write) if write.unit in split and write.attention is not None else (write.unit,)
        pieces.append(Piece(i, tuple(writers.setdefault(unit, len(writers)) for unit in units)))
    readers = [r for unit in anatomy.sublayers() for r in _readers(anatomy, unit, split.get(unit))]
    return EdgeGraph(anatomy, tuple(writers), tuple(pieces), (*readers, Reader(None, "input", (), ())))


def _heads(write: Write) -> tuple[Unit, ...]:
    assert write.attention is not None and write.unit.layer is not None
    layer, nth = write.unit.layer, write.unit.nth
    return tuple(Unit.head(layer, head, nth=nth) for head in range(write.attention.n_heads))


def _operands(module, anatomy: Anatomy, index: int, ids: Tensor, forward: dict) -> AttentionOperands | None:
    """The maps from the reads to attention, if there is one for each of query, key and value."""
    try:
        found = attention_operands(module, anatomy, index, ids, **forward)
        for role in ROLES:
            found.of(role)
    except LevelRefusedError:
        return None
    return found


def _readers(anatomy: Anatomy, unit: Unit, operands: AttentionOperands | None) -> list[Reader]:
    if unit.kind == "embedding":
        return []
    reads = anatomy.readings(unit)
    if not reads:
        raise LevelRefusedError(f"No edges into {unit}", None, "what it reads of the stream was not found")
    if operands is None:
        return [Reader(unit, "input", (unit,), tuple(Part(read) for read in reads))]
    write = anatomy.writes[operands.write]
    readers = []
    for role in ROLES:
        operand, read = operands.of(role)
        feeds: dict[tuple[int, ...], list[Unit]] = {}
        for head, own in enumerate(_heads(write)):
            rows = _rows(operand, operand.head(head, write.attention.n_heads))  # type: ignore[union-attr]
            feeds.setdefault(tuple(rows.tolist()), []).append(own)
        readers += [
            Reader(own[0], role, tuple(own), (Part(anatomy.reads[read], torch.tensor(rows)),))
            for rows, own in feeds.items()
        ]
    used = [anatomy.reads[operands.reads[role]] for role in ROLES]
    rest = tuple(Part(read) for read in reads if read not in used)
    return readers + ([Reader(unit, "input", _heads(write), rest)] if rest else [])


def _rows(operand, head: int) -> Int[Tensor, " d_out"]:
    """The rows of the read's result that one head of an operand is made from."""
    width = operand.received.shape[-1]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, _ = operand.pull_back(direction.to(operand.received.device), head, operand.positions - 1)
    return torch.nonzero(found).flatten().cpu()
