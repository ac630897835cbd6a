"""The factors of compositions: readers and writers of a model as stacks of few rows, gathered a sublayer at a time.

All that is asked for is gathered once and held where it is within `TOGETHER`; else each side comes as tiles of some
sublayers, gathered anew whenever it is gone through. Of tiles two are held while pairs are computed, and a third while
one is scaled, so each is a third of `TOGETHER`, or one sublayer where that is more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.analysis.composition import Stack, stack
from mainstem.analysis.factored import Factored
from mainstem.errors import LevelRefusedError
from mainstem.results.composition import PairRow
from mainstem.units import Unit
from mainstem.weights.neuron_rows import neuron_rows

if TYPE_CHECKING:
    from mainstem.session import Model

HEADS = {"q", "k", "v", "heads"}
MLPS = {"mlp", "mlps"}

Rows = tuple[list[Unit], Tensor]
"""Units, and rows of each [unit, row, d_model] with its Gram matrix."""


TOGETHER = 2**30
"""Bytes of factors that may be held at once."""

TILES = 3
"""How many tiles are held at once at most."""


@dataclass(frozen=True, eq=False)
class Tiled:
    """A side of compositions: stacks that are made when it is gone through, and let go of."""

    stacks: Sequence[Callable[[], Stack | None]]
    missing: Callable[[], LevelRefusedError]

    def __iter__(self) -> Iterator[Stack]:
        """Each stack in turn.

        Raises:
            LevelRefusedError: if there is not one.
        """
        some = False
        for made in (make() for make in self.stacks):
            if made is not None:
                some = True
                yield made
            del made
        if not some:
            raise self.missing()


class Gathered:
    """Readers and writers of a model, or of one head and neurons, and what of them could not be had.

    Args:
        model: the model.
        names: of all readers and writers that will be asked for.
        offset: of queries and keys.
        head: the one that neurons are asked about.
    """

    def __init__(self, model: "Model", names: Sequence[str], offset: int, head: Unit | None = None) -> None:
        self.model, self.weights, self.offset, self.head = model, model.weights, offset, head
        self.missing: dict[Unit, str] = {}
        self.sublayers = {name: self._sublayers(name) for name in names}
        self.held: dict[str, Stack | None] | None = None
        if sum(self._bytes(name, unit) for name in names for unit in self.sublayers[name]) <= TOGETHER:
            self.held = self._gather(self.sublayers)

    def side(self, name: str) -> Tiled:
        """The readers or writers of a name."""
        if self.held is not None:
            made = self.held[name]
            return Tiled([lambda: made], lambda: self._none(name))
        tiles = self._tiles(name)
        return Tiled([lambda t=t: self._gather({name: t})[name] for t in tiles], lambda: self._none(name))

    def _sublayers(self, name: str) -> list[Unit]:
        """What is gathered one after the other, for a name."""
        if name in HEADS:
            self.weights.require_heads()
            return [self.head] if self.head else list(dict.fromkeys(head.sublayer for head in self.weights.heads))
        if name in MLPS:
            found = [unit for unit in self.weights.anatomy.sublayers() if unit.place == "mlp"]
            if not found:
                raise LevelRefusedError("The model has no MLPs", None, "no sublayer of it has neurons")
            return found
        return list(dict.fromkeys(write.unit for write in self.weights.anatomy.writes if write.neurons))

    def _bytes(self, name: str, unit: Unit) -> int:
        """What the rows of one sublayer take."""
        sizes = self.weights.anatomy.sizes
        if name in HEADS:
            d_head = max(sizes.d_head) if isinstance(sizes.d_head, tuple) else sizes.d_head or 0
            rows = d_head * (1 if unit.kind == "head" else sum(head.sublayer == unit for head in self.weights.heads))
        else:
            writes = [self.weights.anatomy.writes[i] for i in self.weights.anatomy.writes_of(unit)]
            width = sum(write.projection.n_in for write in writes if write.projection is not None)
            rows = min(width, sizes.d_model) if name in MLPS else 2 * width
        return rows * sizes.d_model * 4

    def _tiles(self, name: str) -> list[list[Unit]]:
        tiles: list[list[Unit]] = []
        held = 0
        for unit in self.sublayers[name]:
            size = self._bytes(name, unit)
            if not tiles or held + size > TOGETHER // TILES:
                tiles.append([])
                held = 0
            tiles[-1].append(unit)
            held += size
        return tiles

    def _gather(self, wanted: Mapping[str, Sequence[Unit]]) -> dict[str, Stack | None]:
        """A stack for each name; the weights of a sublayer are made once for all of them."""
        rows: dict[str, dict[Unit, Rows]] = {name: {} for name in wanted}
        for unit in dict.fromkeys(unit for units in wanted.values() for unit in units):
            names = {name for name, units in wanted.items() if unit in units}
            own = {name: rows[name] for name in names}
            if names & HEADS:
                self._add_heads(unit, own)
            if names & MLPS:
                self._add_mlp(unit, own)
            if names - HEADS - MLPS:
                self._add_neurons(unit, own)
        return {name: self._stacked(found) if found else None for name, found in rows.items()}

    def _none(self, name: str) -> LevelRefusedError:
        reason = next(iter(self.missing.values()), None)
        return LevelRefusedError(f"No composition of the kind {name!r}", None, reason)

    def _add_heads(self, unit: Unit, rows: dict[str, dict[Unit, Rows]]) -> None:
        """One head's, or those of all heads of a sublayer."""
        heads = [unit] if unit.kind == "head" else [head for head in self.weights.heads if head.sublayer == unit]

        def add(kind: str, found: Factored) -> None:
            if kind in rows:
                made = found.narrow()
                rows[kind][unit] = heads, made if made.dim() == 3 else made[None]

        if {"q", "k"} & rows.keys():
            try:
                qk = self.weights.qk(unit, self.offset).to(torch.float32)
                add("q", qk.T)
                add("k", qk)
            except LevelRefusedError as error:
                self.missing[unit] = f"queries and keys of {unit}: {error.reason or error.what}"
        if {"v", "heads"} & rows.keys():
            ov = self.weights.ov(unit).to(torch.float32)
            add("v", ov)
            add("heads", ov.T)

    def _add_mlp(self, unit: Unit, rows: dict[str, dict[Unit, Rows]]) -> None:
        try:
            if "mlp" in rows:
                rows["mlp"][unit] = [unit], _narrow(self._input_rows(unit))[None]
            if "mlps" in rows:
                rows["mlps"][unit] = [unit], _narrow(self.weights.write(unit).T)[None]
        except LevelRefusedError as error:
            self.missing[unit] = f"{unit}: {error.reason or error.what}"

    def _add_neurons(self, unit: Unit, rows: dict[str, dict[Unit, Rows]]) -> None:
        writes = self.weights.anatomy.writes
        try:
            own = neuron_rows(self.model, next(i for i in self.weights.anatomy.writes_of(unit) if writes[i].neurons))
        except LevelRefusedError as error:
            self.missing[unit] = f"{unit}: {error.reason or error.what}"
            return
        units = [own.address(i) for i in range(len(own.writing))]
        if "neuron" in rows:
            rows["neuron"][unit] = units, torch.stack([part.float() for part in own.reading.values()], 1)
        if "neurons" in rows:
            rows["neurons"][unit] = units, own.writing.float()[:, None]

    def reader(self, unit: Unit, kind: str) -> Factored:
        """What multiplies the writer's matrix, of a head or of all of a sublayer: W_QK^T, W_QK or W_OV."""
        if kind == "v":
            return self.weights.ov(unit)
        found = self.weights.qk(unit, self.offset)
        return found.T if kind == "q" else found

    def alone(self, row: PairRow) -> float:
        """One pair's composition from its own factors, float64."""
        reader, writer = Unit.parse(row.reader), Unit.parse(row.writer)
        if row.kind in ("mlp", "neuron"):
            left = Factored(*_as_rows(self._input_rows(reader)))
        else:
            left = self.reader(reader, row.kind)
        right = self.weights.ov(writer) if writer.kind == "head" else Factored(*_as_columns(self.weights.write(writer)))
        return float((left @ right).norm() / (left.norm() * right.norm()))

    def notes(self) -> list[str]:
        """What was left out, in sentences."""
        missing = [f"Left out: {reason}." for reason in self.missing.values()]
        return [*self.weights.approximations, *missing]

    def _input_rows(self, unit: Unit) -> Tensor:
        return torch.cat(list(self.weights.reads(unit).values()))

    def _stacked(self, rows: dict[Unit, Rows]) -> Stack:
        units = [unit for own, _ in rows.values() for unit in own]
        rank = max(part.shape[1] for _, part in rows.values())
        whole = torch.zeros(len(units), rank, self.weights.anatomy.sizes.d_model)
        first = 0
        for sub in list(rows):  # each is let go of as it is put in
            _, part = rows.pop(sub)
            whole[first : first + len(part), : part.shape[1]] = part
            first += len(part)
        return stack(units, whole)


def _as_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [row, d_model] as a product through the smaller of its sides."""
    unit = torch.eye(min(matrix.shape), dtype=matrix.dtype, device=matrix.device)
    return (matrix, unit) if len(matrix) > matrix.shape[1] else (unit, matrix)


def _narrow(matrix: Tensor) -> Tensor:
    """No more rows than columns, with the same Gram matrix."""
    return matrix if len(matrix) <= matrix.shape[1] else torch.linalg.qr(matrix.float(), mode="r").R


def _as_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(side.mT for side in reversed(_as_rows(matrix.mT)))  # type: ignore[return-value]
