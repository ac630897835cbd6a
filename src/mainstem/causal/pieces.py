"""Where the points of an anatomy are in a run: each point is one or several pieces that an edit changes.

`Entries` are entries of what is at a site: a write, what the output matrix reads, a value of the stream, what one
matrix of a sublayer receives. `Attending` is what attention receives or computes for one head. `Scale` is the scale of
a norm. `Expert` is a neuron of a routed expert, which has no place of its own: see `mainstem.causal.expert_changes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.causal.neuron_map import NeuronMap
from mainstem.errors import LevelRefusedError, UnitError
from mainstem.model.anatomy import Anatomy, AttentionCore, ExpertRead, Read
from mainstem.model.graph import SumNode
from mainstem.model.hooks import Site
from mainstem.model.norms import Norm
from mainstem.points import HeadKind, Point
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of what is at a site, or all of it; `width` is how many they are."""

    site: Site
    width: int
    entries: Int[Tensor, " entry"] | None = None


@dataclass(frozen=True, eq=False)
class Attending:
    """What attention receives or computes for one head; `source`: one column of the pattern alone."""

    core: AttentionCore
    head: int
    what: HeadKind
    source: int | None = None


@dataclass(frozen=True, eq=False)
class Scale:
    """The scale of a norm: what it norms is at `stream`, and its result at each of `results`."""

    norm: Norm
    stream: Site
    results: tuple[Site, ...]


@dataclass(frozen=True)
class Expert:
    """A neuron of a routed expert, by the number of its write."""

    write: int
    expert: int
    neuron: int


Piece = Entries | Attending | Scale | Expert


class PieceMap:
    """The pieces of any point of one anatomy."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.neurons = NeuronMap(anatomy)

    def of(self, at: Point) -> list[Piece]:
        """The pieces of a point.

        Raises:
            UnitError: if the model has no such unit, or it cannot be edited.
            LevelRefusedError: if the unit exists and cannot be had; with the reason.
        """
        if at.kind == "write":
            assert at.unit is not None
            return self._written(at.unit)
        if at.kind in ("resid_pre", "resid_mid", "resid_post", "resid_final"):
            return [Entries(self._stream(at), self.anatomy.sizes.d_model)]
        if at.kind == "input":
            return [Entries(read.input_site, self.anatomy.sizes.d_model) for read in self.reads(at)]
        if at.kind == "norm":
            return self._norms(at)
        assert at.unit is not None
        return [self._attending(at.unit, at.kind)]

    def _written(self, unit: Unit) -> list[Piece]:
        if unit.kind in ("bias", "rounding"):
            raise UnitError(f"{unit} can be read, and not edited", None, f"Edit {unit.sublayer}, or the stream.")
        if unit.kind in ("sublayer", "embedding"):
            indices = self.anatomy.writes_of(unit)
            if not indices:
                known = ", ".join(str(known) for known in self.anatomy.sublayers()[:6])
                raise UnitError(f"The model has no sublayer {unit}", None, f"It has {known}, ...")
            return [Entries(self.anatomy.writes[i].site, self.anatomy.sizes.d_model) for i in indices]
        if unit.source is not None:
            if unit.neuron is not None:
                raise UnitError(f"{unit} cannot be edited by itself", None, "Edit the neuron, or the pattern's weight.")
            head = Unit.head(unit.layer or 0, unit.head_index or 0, unit.nth)
            return [self._attending(head, "pattern", unit.source)]
        pieces: list[Piece] = []
        for index, entries in self.neurons.places(unit):
            write = self.anatomy.writes[index]
            if write.experts is not None:
                assert unit.expert is not None and unit.neuron is not None
                pieces.append(Expert(index, unit.expert, unit.neuron))
            else:
                assert write.source is not None
                pieces.append(Entries(write.source, len(entries), torch.tensor(entries)))
        return pieces

    def _stream(self, at: Point) -> Site:
        anatomy, last = self.anatomy, len(self.anatomy.blocks)
        if at.kind == "resid_final":
            return anatomy.spine_sites[-1]
        layer = (at.layer or 0) + (at.kind == "resid_post")
        if (at.layer or 0) >= last:
            raise UnitError(f"The model has no block {at.layer}", str(at), f"Blocks go from 0 to {last - 1}.")
        if at.kind == "resid_mid":
            unit = Unit.write(layer, "attn")
            nodes = [i for i, node in enumerate(anatomy.spine) if anatomy.owners[node] == unit]
            if not nodes:
                raise LevelRefusedError(f"No {at}", reason="the stream has no state between attention and MLP there")
            return anatomy.spine_sites[nodes[-1]]
        return anatomy.blocks[layer].input_site if layer < last else anatomy.spine_sites[-1]

    def reads(self, at: Point) -> list[Read | ExpertRead]:
        """The matrices, and experts, by which a point's sublayer reads the stream.

        Raises:
            UnitError, LevelRefusedError: as `of`.
        """
        assert at.unit is not None
        reads = self.anatomy.readings(at.unit)
        found = [read for read in reads if isinstance(read, ExpertRead) or read.roles != ("output_gate",)]
        if not found:
            self._written(at.unit)
            raise LevelRefusedError(f"No {at}", reason="no matrix of it is seen to read the stream")
        return found

    def _norms(self, at: Point) -> list[Piece]:
        if at.unit is None:
            norm = self.anatomy.readout.norm
            if norm is None:
                raise LevelRefusedError("No norm", reason="there is none between the stream and the unembedding")
            return [Scale(norm, self.anatomy.spine_sites[-1], (self.anatomy.readout.input_site,))]
        pieces: dict[int, Scale] = {}
        for read in self.reads(at):
            state = self._state(read.stream_node)
            if read.norm is None or state is None:
                raise LevelRefusedError(f"No {at}", reason="it reads the stream through no norm of the stream itself")
            stream = self.anatomy.spine_sites[state]
            known = pieces.get(read.node)
            results = (*(known.results if known else ()), read.input_site)
            pieces[read.node] = Scale(read.norm, stream, results)
        return list(pieces.values())

    def _state(self, node: int) -> int | None:
        """Which state of the stream a node is, itself or in another dtype; None if it is none."""
        while node not in self.anatomy.spine:
            made = self.anatomy.graph.nodes[node]
            if not isinstance(made, SumNode) or len(made.terms) != 1 or made.bias is not None:
                return None
            term = made.terms[0]
            if term.gate is not None or not isinstance(term.factor, float) or term.factor != 1.0:
                return None
            node = term.node
        return self.anatomy.spine.index(node)

    def _attending(self, unit: Unit, what: HeadKind, source: int | None = None) -> Attending:
        index, _ = self.neurons.places(unit)[0]
        core, head = self.anatomy.writes[index].attention, unit.head_index
        assert core is not None and head is not None
        if "result" not in core.layouts:
            raise LevelRefusedError(f"No {unit}.{what}", reason="attention and its output matrix are one operation")
        if not core.fused and what in ("query", "key"):
            raise LevelRefusedError(
                f"No {unit}.{what}",
                None,
                "the model computes the pattern itself, from queries and keys that are not seen as such",
                f"Edit {unit}.pattern, or open the model with attn_implementation='sdpa'.",
            )
        return Attending(core, head, what, source)


def overlapping(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    """Whether two points share a value."""
    return any(_overlap(a, b) for a in one for b in other)


def _overlap(a: Piece, b: Piece) -> bool:
    if isinstance(a, Entries) and isinstance(b, Entries) and a.site == b.site:
        if a.entries is None or b.entries is None:
            return True
        return bool(set(a.entries.tolist()) & set(b.entries.tolist()))
    if isinstance(a, Attending) and isinstance(b, Attending):
        same = a.core.site == b.core.site and a.head == b.head and a.what == b.what
        return same and (a.source is None or b.source is None or a.source == b.source)
    if isinstance(a, Scale) and isinstance(b, Scale):
        return bool(set(a.results) & set(b.results))
    return isinstance(a, Expert) and a == b
