"""Every unit's read and write matrices as the stream sees them, from the weights alone.

A head writes W_OV x_source and scores x_dest^T W_QK x_source, both kept as products of d_head columns and rows
(Elhage et al. 2021, "Attention heads are independent and additive"; columns here are vectors of the stream, as there).
The stream x is taken before the norm of the read: the norm's gain, a LayerNorm's centring and constant multipliers are
in the rows, gains of norms after the sublayer and multipliers in the columns.

Conventions. The scales of norms, 1 / rms of a run, are left out on both sides, so a score is scale(dest) scale(source)
x_dest^T W_QK x_source plus what biases add; the norms of queries and keys keep their gain and lose their scale too
(`approximations`). Attention's own scaling is in W_QK. Rotary embedding is that of the model's own run at an offset of
destination minus source. Nothing is folded or kept: a matrix is made of the model's own tensors when it is asked for,
in float64, a head or a sublayer at a time.

Cost: a run for an offset that is asked for the first time; then O(d_head^2 d_model) for a head. Limits: what the run
itself multiplies with (gates) is no weight, and such a place is refused; so are experts, whose matrices depend on the
token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.parts import carry, pull_back, scalar_of
from mainstem.analysis.scaleless import RunGates, chosen_columns, known, scaleless
from mainstem.errors import LevelRefusedError, PositionError, UnitError
from mainstem.model.anatomy import Anatomy, Read
from mainstem.model.graph import LinearMap, maps_to, writes_behind
from mainstem.run.operands import AttentionOperands
from mainstem.units import Unit

Operands = Mapping[int, AttentionOperands | LevelRefusedError]
"""By the number of a write with attention."""


@dataclass(frozen=True, eq=False)
class StreamWeights:
    """Reads and writes of one model's units.

    Attributes:
        anatomy: of the model.
        record: the operands of every attention, of a run on so many positions.
        heads: all heads whose W_OV can be had, in the order of execution.
        refusals: attention sublayers without, with the reason.
        qk_refusals: those whose heads have no W_QK, with the reason.
        approximations: what is left out where, in sentences.
    """

    anatomy: Anatomy
    record: Callable[[int], Operands]
    heads: tuple[Unit, ...]
    refusals: dict[Unit, LevelRefusedError]
    qk_refusals: dict[Unit, LevelRefusedError]
    approximations: tuple[str, ...]
    _runs: dict[int, Operands] = field(default_factory=dict, repr=False)

    # --- heads ----------------------------------------------------------------------------------------------

    def ov(self, unit: Unit | str) -> Factored:
        """W_OV [d_model, d_model]: what a head writes of what the stream holds at the source.

        Of an attention sublayer it is a stack, one for each head; and so are all that follow.

        Raises:
            UnitError: if the model has no such head; LevelRefusedError: if its weights are not to be had.
        """
        return Factored(self.outputs(unit), self.value(unit))

    def qk(self, unit: Unit | str, offset: int = 0) -> Factored:
        """W_QK [d_model, d_model]: the score is x_dest^T W_QK x_source, `offset` positions apart.

        Raises:
            PositionError: if the model allows no such offset. UnitError, LevelRefusedError: as `ov`.
        """
        return Factored(self.query(unit, offset, offset).mT, self.key(unit, 0, offset))

    def query(self, unit: Unit | str, position: int = 0, offset: int = 0) -> Float[Tensor, "*head d_head d_model"]:
        """The query's rows at a position of a run, attention's scaling in them; the run is long enough for `offset`."""
        return self._rows(unit, "query", position, offset)

    def key(self, unit: Unit | str, position: int = 0, offset: int = 0) -> Float[Tensor, "*head d_head d_model"]:
        """The key's rows at a position."""
        return self._rows(unit, "key", position, offset)

    def value(self, unit: Unit | str) -> Float[Tensor, "*head d_value d_model"]:
        """The value's rows: those of the key/value head that the head reads."""
        return self._rows(unit, "value", 0, 0)

    def outputs(self, unit: Unit | str) -> Float[Tensor, "*head d_model d_value"]:
        """The columns of W_O by which a head writes, as `write`."""
        unit, heads = self._heads(unit)
        made = torch.stack([self._head_outputs(head) for head in heads])
        return made if unit.kind == "sublayer" else made[0]

    def _rows(self, unit: Unit | str, role: str, position: int, offset: int) -> Float[Tensor, "*head d_head d_model"]:
        unit, heads = self._heads(unit)
        if role != "value" and unit.sublayer in self.qk_refusals:
            raise self.qk_refusals[unit.sublayer]
        operands = self._operands(unit, max(offset, position))
        carrying, number = operands.side(role)
        core = self.anatomy.writes[operands.write].attention
        assert core is not None
        own = [carrying.head(head.head_index or 0, core.n_heads) for head in heads]
        distinct, read = list(dict.fromkeys(own)), self.anatomy.reads[number]
        maps = carrying.unscaled().matrices(distinct, position)
        rows = {n: matrix @ self._read_rows(read, used) for n, (used, matrix) in zip(distinct, maps, strict=True)}
        made = torch.stack([rows[n] for n in own]) * (operands.scaling if role == "query" else 1.0)
        return made if unit.kind == "sublayer" else made[0]

    def _operands(self, unit: Unit, offset: int) -> AttentionOperands:
        if offset < 0:
            raise PositionError(f"The offset {offset} puts the source after the destination", str(unit))
        length = next((length for length in sorted(self._runs) if length > offset), offset + 1)
        if length not in self._runs:
            self._runs[length] = self.record(length)
            for other in [n for n in self._runs if n not in (length, min(self._runs))]:
                del self._runs[other]
        found = self._runs[length][self._attention_write(unit)]
        if isinstance(found, LevelRefusedError):
            raise found
        return found

    def _attention_write(self, unit: Unit) -> int:
        writes = self.anatomy.writes
        return next(i for i in self.anatomy.writes_of(unit.sublayer) if writes[i].attention is not None)

    def _heads(self, given: Unit | str) -> tuple[Unit, list[Unit]]:
        """The unit, a head or an attention sublayer, and its heads."""
        unit = Unit.parse(given) if isinstance(given, str) else given
        if unit.sublayer in self.refusals:
            raise self.refusals[unit.sublayer]
        known = self._by_sublayer.get(unit.sublayer, [])
        heads = known if unit == unit.sublayer else [head for head in known if head == unit]
        if not heads:
            raise self._missing(unit)
        return unit, heads

    @cached_property
    def _by_sublayer(self) -> dict[Unit, list[Unit]]:
        found: dict[Unit, list[Unit]] = {}
        for head in self.heads:
            found.setdefault(head.sublayer, []).append(head)
        return found

    def require_heads(self) -> None:
        """Raises LevelRefusedError if there is not one head."""
        if not self.heads:
            raise next(iter(self.refusals.values()), None) or self._no_attention()

    def _no_attention(self) -> LevelRefusedError:
        kinds = ", ".join(dict.fromkeys(u.place for u in self.anatomy.sublayers() if u.layer is not None))
        reason = f"its blocks have no attention that was seen; they have {kinds or 'nothing else'}"
        return LevelRefusedError("The model has no heads", None, reason, "Ask about its neurons or whole sublayers.")

    def _missing(self, unit: Unit) -> UnitError | LevelRefusedError:
        if not self.heads and not self.refusals:
            return self._no_attention()
        same = [head for head in self.heads if head.layer == unit.layer] or list(self.heads)
        there = f"Heads go from {same[0]} to {same[-1]}." if same else "None of its attention is split into heads."
        return UnitError(f"The model has no head {unit}", None, there)

    # --- reads and writes -----------------------------------------------------------------------------------

    def reads(self, unit: Unit | str) -> dict[str, Float[Tensor, "row d_model"]]:
        """By role ("gate", "up", "query" ...) the rows by which a sublayer, or one neuron of it, reads the stream.

        Raises:
            UnitError: if the model has no such unit. LevelRefusedError: if its rows are not to be had.
        """
        unit = Unit.parse(unit) if isinstance(unit, str) else unit
        if unit.neuron is not None and unit.head_index is None:
            return self._neuron_rows(unit)
        found: dict[str, list[Tensor]] = {}
        for read in self.anatomy.reads:
            if read.unit == unit:
                found.setdefault("+".join(read.roles), []).append(self._read_rows(read, slice(None)))
        if not found:
            self._require_sublayer(unit)
            raise LevelRefusedError(f"No rows that {unit} reads by", None, "no one matrix of it reads the stream")
        return {role: torch.cat(rows) for role, rows in found.items()}

    def write(self, unit: Unit | str) -> Float[Tensor, "d_model column"]:
        """The columns by which a head, a neuron or a whole sublayer writes into the stream.

        Raises:
            UnitError: if the model has no such unit. LevelRefusedError: if its columns are not to be had.
        """
        unit = Unit.parse(unit) if isinstance(unit, str) else unit
        if unit.kind == "head":
            return self.outputs(unit)
        if unit.kind in ("ffn_neuron", "expert_neuron"):
            index, place = self._neuron_write(unit)
            return self._columns(index, torch.tensor([place]))
        self._require_sublayer(unit)
        indices = [i for i in self.anatomy.writes_of(unit) if self.anatomy.writes[i].projection is not None]
        if not indices:
            raise LevelRefusedError(f"No columns that {unit} writes by", None, "it writes by no matrix that is known")
        return torch.cat([self._columns(i, slice(None)) for i in indices], 1)

    def _head_outputs(self, head: Unit) -> Float[Tensor, "d_model d_value"]:
        parts = [self._head_columns(i, head) for i in self.anatomy.writes_of(head.sublayer)]
        return torch.stack([part for part in parts if part is not None]).sum(0)

    def _head_columns(self, index: int, head: Unit) -> Float[Tensor, "d_model d_value"] | None:
        """Of one write of an attention sublayer; None where no head has a part in it."""
        write = self.anatomy.writes[index]
        core = write.attention
        if core is None or write.projection is None or head.head_index is None:
            return None
        channels = core.channels[head.head_index]
        factor = torch.ones(len(channels), dtype=torch.float64)
        for step in core.steps:
            if step.factor is not None:
                factor = factor * step.factor.detach().double().cpu()[channels]
        return self._columns(index, channels) * factor.to(write.projection.factors[0].device)

    def _columns(self, index: int, chosen: Tensor | slice) -> Float[Tensor, "d_model column"]:
        write = self.anatomy.writes[index]
        assert write.projection is not None
        columns = chosen_columns(write, chosen)
        return carry(self._tail(index, columns.device), columns.T).T

    def _tail(self, index: int, device: torch.device) -> LinearMap:
        """From a write to the stream that it is added to."""
        graph, node = self.anatomy.graph, self.anatomy.write_nodes[index]
        run = scaleless(graph, self.anatomy.sizes.d_model, device)
        for end in self.anatomy.spine:
            if end >= node and (found := maps_to(graph, end, run, RunGates(device), node)[node]) is not None:
                return known(found, str(self.anatomy.writes[index].unit))
        raise LevelRefusedError("No columns", str(self.anatomy.writes[index].unit), "it does not reach the stream")

    def _read_rows(self, read: Read, chosen: Tensor | slice) -> Float[Tensor, "row d_model"]:
        """Rows of a read's matrix, as they see the stream before the norm."""
        graph, weight = self.anatomy.graph, read.weight[chosen].detach().double()
        run = scaleless(graph, self.anatomy.sizes.d_model, weight.device)
        back = maps_to(graph, read.node, run, RunGates(weight.device), read.stream_node)[read.stream_node]
        if back is None:
            raise LevelRefusedError(f"No rows that {read.unit} reads by", None, "what it reads is not of the stream")
        return pull_back(known(back, str(read.unit)), weight.T).T

    # --- the stream between units -------------------------------------------------------------------------

    def require_one_stream(self) -> None:
        """Refuses a model whose blocks change the stream by more than a number and their writes.

        Raises:
            LevelRefusedError: where it is normed or gained on its way, so that what is written is not what is read.
        """
        graph, spine = self.anatomy.graph, self.anatomy.spine
        device = self.anatomy.readout.unembedding.device
        run, first = scaleless(graph, self.anatomy.sizes.d_model, device), self.anatomy.blocks[0].input_node
        for before, after in zip(spine, spine[1:], strict=False):
            if before < first:
                continue
            found = maps_to(graph, after, run, RunGates(device), before)[before]
            if found is None or scalar_of(found) is None:
                unit = self.anatomy.owners[after]
                reason = "the stream itself is normed, gated or multiplied by dimension on its way"
                raise LevelRefusedError("No composition between blocks", None if unit is None else str(unit), reason)

    def order(self, readers: Sequence[Unit], writers: Sequence[Unit]) -> Int[Tensor, "reader writer"]:
        """1 where a reader's sublayer reads what a writer's wrote, -1 where it is the other way round, else 0."""
        units = list(dict.fromkeys([*readers, *writers]))
        written = {unit: set(self.anatomy.writes_of(unit)) for unit in units}
        seen = {unit: self._writes_seen(unit) for unit in units}
        after = [[bool(seen[reader] & written[writer]) for writer in writers] for reader in readers]
        before = [[bool(seen[writer] & written[reader]) for writer in writers] for reader in readers]
        return torch.tensor(after).long() - torch.tensor(before).long()

    def _writes_seen(self, sublayer: Unit) -> set[int]:
        """The writes that a sublayer's reads see."""
        nodes = {read.node for read in self.anatomy.reads if read.unit == sublayer}
        return set().union(*(writes_behind(self.anatomy.graph, node) for node in nodes))

    # --- neurons --------------------------------------------------------------------------------------------

    def _neuron_write(self, unit: Unit) -> tuple[int, int]:
        for i in self.anatomy.writes_of(unit.sublayer):
            write = self.anatomy.writes[i]
            if "neurons" in write.refusals:
                raise LevelRefusedError(f"No weights of {unit}", None, write.refusals["neurons"])
            if unit.expert is not None and not unit.shared:
                raise LevelRefusedError(f"No weights of {unit}", None, "which experts run depends on the token")
            own = unit.expert if unit.shared else None
            if write.neurons and write.projection is not None and write.shared_expert == own:
                place = (unit.neuron or 0) - write.first_neuron
                if 0 <= place < write.projection.n_in:
                    return i, place
        raise UnitError(f"The model has no neuron {unit}", None, self._neurons_there(unit))

    def _neurons_there(self, unit: Unit) -> str:
        for i in self.anatomy.writes_of(unit.sublayer):
            write = self.anatomy.writes[i]
            if write.neurons and write.projection is not None:
                return f"Neurons of {unit.sublayer} go from 0 to {write.first_neuron + write.projection.n_in - 1}."
        return f"Layers go from 0 to {len(self.anatomy.blocks) - 1}; not every sublayer has neurons."

    def _neuron_rows(self, unit: Unit) -> dict[str, Float[Tensor, "row d_model"]]:
        index, place = self._neuron_write(unit)
        made = self.anatomy.writes[index].activation
        if made is None:
            raise LevelRefusedError(f"No rows that {unit} reads by", None, "its activation was not seen")
        rows = {}
        for number, column in zip(made.entries.read[place], made.entries.column[place], strict=True):
            read = self.anatomy.reads[made.reads[int(number)]]
            rows["+".join(read.roles)] = self._read_rows(read, column[None])
        return rows

    def _require_sublayer(self, unit: Unit) -> None:
        if not self.anatomy.writes_of(unit):
            known = ", ".join(str(u) for u in self.anatomy.sublayers()[:8])
            raise UnitError(f"The model has no sublayer {unit}", None, f"It has {known}, ...")
