"""The factors of compositions: readers and writers of a model as stacks of few rows, gathered a sublayer at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.analysis.composition import Stack, stack
from mainstem.analysis.factored import Factored
from mainstem.errors import LevelRefusedError
from mainstem.results.composition import PairRow
from mainstem.units import Unit
from mainstem.weights.neuron_rows import all_neuron_rows

if TYPE_CHECKING:
    from mainstem.session import Model

Rows = tuple[list[Unit], Tensor]
"""Units, and rows of each [unit, row, d_model] with its Gram matrix."""


class Gathered:
    """Stacks of readers and writers of a model, or of one head and neurons, and what of it could not be had."""

    def __init__(self, model: "Model", offset: int, head: Unit | None = None) -> None:
        self.model, self.weights, self.offset, self.head = model, model.weights, offset, head
        self.missing: dict[Unit, str] = {}
        self.notes_of_neurons: list[str] = []

    def stacks(self, kinds: Sequence[str], writers: str) -> tuple[dict[str, Stack], Stack]:
        """All readers of each kind, and all writers; the weights of a sublayer are made once for all of them."""
        rows: dict[str, dict[Unit, Rows]] = {kind: {} for kind in (*kinds, writers)}
        if {"q", "k", "v", "heads"} & rows.keys():
            self.weights.require_heads()
            for unit in [self.head] if self.head else dict.fromkeys(head.sublayer for head in self.weights.heads):
                self._add_heads(unit, rows)
        if {"mlp", "mlps"} & rows.keys():
            for unit in self._mlps():
                self._add_mlp(unit, rows)
        if {"neuron", "neurons"} & rows.keys():
            self._add_neurons(rows)
        made = {kind: self._stacked(kind, found) for kind, found in rows.items()}
        return {kind: made[kind] for kind in kinds}, made[writers]

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

    def _add_neurons(self, rows: dict[str, dict[Unit, Rows]]) -> None:
        found, notes = all_neuron_rows(self.model)
        self.notes_of_neurons = notes
        for unit, own in found.items():
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
        return [*self.weights.approximations, *missing, *self.notes_of_neurons]

    def _input_rows(self, unit: Unit) -> Tensor:
        return torch.cat(list(self.weights.reads(unit).values()))

    def _mlps(self) -> list[Unit]:
        found = [unit for unit in self.weights.anatomy.sublayers() if unit.place == "mlp"]
        if not found:
            raise LevelRefusedError("The model has no MLPs", None, "no sublayer of it has neurons")
        return found

    def _stacked(self, kind: str, rows: dict[Unit, Rows]) -> Stack:
        if not rows:
            reason = next(iter(self.missing.values()), None)
            raise LevelRefusedError(f"No composition of the kind {kind!r}", None, reason)
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
