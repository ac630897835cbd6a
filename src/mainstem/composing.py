"""Composition of every pair of units of a model, from its weights, read into plain rows.

The factors are gathered a layer at a time (`mainstem.analysis.stream_weights`), all pairs are computed together
(`mainstem.analysis.composition`), once as they are and once without the shared directions, and the pairs that are
shown are computed again one by one in float64.

Memory: 2 x n x rank x d_model numbers in float32 for n units: the readers of one kind and the writers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.analysis.composition import (
    Compositions,
    Stack,
    compositions,
    shared_directions,
    squared,
    squared_without,
    stack,
)
from mainstem.analysis.factored import Factored
from mainstem.analysis.false_discovery import RATE
from mainstem.analysis.stream_weights import StreamWeights
from mainstem.analysis.warnings import Warning
from mainstem.composition_description import CompositionCertificate, CompositionReading, KindRow, PairRow, Shared
from mainstem.errors import CertificateError, ChoiceError, LevelRefusedError, UsageError
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

KINDS = ("q", "k", "v", "mlp")
"""What reads: a head's queries, keys, values, or an MLP by all its input matrices."""

WRITERS = ("heads", "mlps")
TOLERANCE = 1e-4
"""Relative: compositions of float32 factors against float64."""

OUTLIER = 10.0
"""How many times the share of an ordinary direction one shared direction has when it is worth a warning."""


def composition(
    model: "Model",
    kinds: Sequence[str] = ("q", "k", "v"),
    *,
    offset: int = 0,
    writers: str = "heads",
    top: int = 20,
) -> CompositionReading:
    """Compositions of all pairs of a reader and a writer.

    Args:
        model: the model.
        kinds: of "q", "k", "v" and "mlp".
        offset: for "q" and "k", how many positions the source is before the destination.
        writers: "heads" or "mlps".
        top: how many pairs of each kind to list.

    Raises:
        ChoiceError, UsageError, PositionError: if an argument is wrong.
        LevelRefusedError: if the model has no such units, or its blocks do not share one stream.
        CertificateError: if a listed pair computed alone is another number.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ChoiceError("kind of composition", kind, KINDS)
    if writers not in WRITERS:
        raise ChoiceError("kind of writer", writers, WRITERS)
    if not kinds or whole_number("top", top) < 1:
        raise UsageError("Nothing to list", None, "Give at least one kind, and a top of at least 1.")
    offset, weights = whole_number("offset", offset), model.weights
    weights.require_one_stream()
    gathered = Gathered(weights, offset)
    written = gathered.writers(writers)
    stacks = {kind: gathered.readers(kind) for kind in dict.fromkeys(kinds)}
    directions = shared_directions([written, *stacks.values()])
    tables = {kind: _tables(weights, kind, readers, written, directions) for kind, readers in stacks.items()}
    pairs = [row for kind, both in tables.items() for row in _rows(kind, both, top)]
    shared = _shared(directions, [written, *stacks.values()])
    return CompositionReading(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in _warnings(shared)],
        model=model.summary,
        offset=offset,
        writers=writers,
        null=model.anatomy.sizes.d_model**-0.5,
        rate=RATE,
        kinds=[_summary(kind, *both) for kind, both in tables.items()],
        pairs=pairs,
        layers={kind: _by_layer(table) for kind, (table, _) in tables.items()},
        shared=shared,
        certificate=_certificate(gathered, pairs),
        notes=gathered.notes(),
        tables=tables,
    )


class Gathered:
    """Stacks of readers and writers of a model, and what of it could not be had."""

    def __init__(self, weights: StreamWeights, offset: int) -> None:
        self.weights, self.offset = weights, offset
        self.missing: dict[Unit, str] = {}

    def readers(self, kind: str) -> Stack:
        """All readers of a kind."""
        if kind == "mlp":
            return self._stacked(self._mlps(), lambda unit: Factored(*_as_rows(self._input_rows(unit))).narrow()[None])
        return self._stacked(self._attentions(), lambda unit: self.reader(unit, kind).narrow())

    def writers(self, kind: str) -> Stack:
        """All writers of a kind."""
        if kind == "mlps":
            return self._stacked(
                self._mlps(), lambda unit: Factored(*_as_rows(self.weights.write(unit).T)).narrow()[None]
            )
        return self._stacked(self._attentions(), lambda unit: self.weights.ov(unit).T.narrow())

    def reader(self, unit: Unit, kind: str) -> Factored:
        """What multiplies the writer's matrix, of a head or of all of a sublayer: W_QK^T, W_QK or W_OV."""
        if kind == "v":
            return self.weights.ov(unit)
        found = self.weights.qk(unit, self.offset)
        return found.T if kind == "q" else found

    def alone(self, row: PairRow) -> float:
        """One pair's composition from its own factors, float64."""
        reader, writer = Unit.parse(row.reader), Unit.parse(row.writer)
        if row.kind == "mlp":
            left = Factored(*_as_rows(self._input_rows(reader)))
        else:
            left = self.reader(reader, row.kind)
        right = self.weights.ov(writer) if writer.kind == "head" else Factored(*_as_columns(self.weights.write(writer)))
        return float((left @ right).norm() / (left.norm() * right.norm()))

    def notes(self) -> list[str]:
        """What was left out, in sentences."""
        missing = [f"{unit} is left out: {reason}." for unit, reason in self.missing.items()]
        return [*self.weights.approximations, *missing]

    def _input_rows(self, unit: Unit) -> Tensor:
        return torch.cat(list(self.weights.reads(unit).values()))

    def _attentions(self) -> list[Unit]:
        self.weights.require_heads()
        return list(dict.fromkeys(head.sublayer for head in self.weights.heads))

    def _mlps(self) -> list[Unit]:
        found = [unit for unit in self.weights.anatomy.sublayers() if unit.place == "mlp"]
        if not found:
            raise LevelRefusedError("The model has no MLPs", None, "no sublayer of it has neurons")
        return found

    def _stacked(self, sublayers: list[Unit], rows_of) -> Stack:
        units: list[Unit] = []
        rows: list[Tensor] = []
        for sublayer in sublayers:
            try:
                made = rows_of(sublayer).float()
            except LevelRefusedError as error:
                self.missing[sublayer] = f"{error.reason or error.what}"
                continue
            heads = [head for head in self.weights.heads if head.sublayer == sublayer]
            units += heads if sublayer.place == "attn" else [sublayer]
            rows.append(made)
        if not rows:
            unit, reason = next(iter(self.missing.items()))
            raise LevelRefusedError("No composition of this kind", str(unit), reason)
        rank = max(part.shape[1] for part in rows)
        padded = [torch.nn.functional.pad(part, (0, 0, 0, rank - part.shape[1])) for part in rows]
        return stack(units, torch.cat(padded))


def _as_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [row, d_model] as a product through the smaller of its sides."""
    unit = torch.eye(min(matrix.shape), dtype=matrix.dtype, device=matrix.device)
    return (matrix, unit) if len(matrix) > matrix.shape[1] else (unit, matrix)


def _as_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(side.mT for side in reversed(_as_rows(matrix.mT)))  # type: ignore[return-value]


def _tables(
    weights: StreamWeights, kind: str, readers: Stack, writers: Stack, directions: Tensor
) -> tuple[Compositions, Compositions]:
    """All pairs, and all without the shared directions."""
    order, distance = _order(weights, readers.units, writers.units)
    found = squared(readers, writers)
    table = compositions(kind, readers, writers, order, distance, found)
    rest = squared_without(found, readers, writers, directions)
    left = (readers.without(directions), writers.without(directions))
    return table, compositions(kind, *left, order, distance, rest)


def _order(weights: StreamWeights, readers: Sequence[Unit], writers: Sequence[Unit]) -> tuple[Tensor, Tensor]:
    known: dict[tuple[Unit, Unit], int] = {}
    order = torch.zeros(len(readers), len(writers), dtype=torch.long)
    for i, reader in enumerate(readers):
        for j, writer in enumerate(writers):
            pair = reader.sublayer, writer.sublayer
            if pair not in known:
                known[pair] = weights.order(*pair)
            order[i, j] = known[pair]
    layers = [torch.tensor([unit.layer or 0 for unit in units]) for units in (readers, writers)]
    return order, (layers[0][:, None] - layers[1][None]).abs()


def _rows(kind: str, both: tuple[Compositions, Compositions], top: int) -> list[PairRow]:
    table, without = both
    return [
        PairRow(
            kind,
            str(table.readers[i]),
            str(table.writers[j]),
            *(float(column[i, j]) for column in (table.strength, table.z, table.p, table.q)),
            *(float(column[i, j]) for column in (without.strength, without.z, without.q)),
        )
        for i, j in table.top(top)
    ]


def _summary(kind: str, table: Compositions, without: Compositions) -> KindRow:
    causal, acausal = table.causal, table.acausal

    def found(rates: Tensor) -> int:
        return int((rates[causal] <= RATE).sum())

    def mean(values: Tensor) -> float:
        return float(values.double().mean()) if len(values) else 0.0

    return KindRow(
        kind=kind,
        pairs=int(causal.sum()),
        acausal=int(acausal.sum()),
        undefined=int(((table.order > 0) & ~table.defined).sum()),
        mean=mean(table.strength[causal]),
        mean_acausal=mean(table.strength[acausal]),
        beyond=mean(table.z[causal].abs() > 3),
        beyond_acausal=mean(table.z[acausal].abs() > 3),
        above=found(table.q),
        below=found(table.q_below),
        above_without=found(without.q),
        below_without=found(without.q_below),
    )


def _by_layer(table: Compositions) -> list[list[float | None]]:
    """For each pair of layers the strongest composition above the rotation's mean; None where there is no pair."""
    layers = 1 + max(unit.layer or 0 for unit in (*table.readers, *table.writers))
    rows, columns = ([unit.layer or 0 for unit in units] for units in (table.readers, table.writers))
    used = table.defined & (table.order != 0)
    strength = torch.where(used, table.strength - table.null, torch.full_like(table.strength, -torch.inf))
    best = torch.full((layers, len(columns)), -torch.inf, dtype=strength.dtype)
    best = best.index_reduce(0, torch.tensor(rows), strength, "amax")
    best = torch.full((layers, layers), -torch.inf, dtype=strength.dtype).index_reduce(
        1, torch.tensor(columns), best, "amax"
    )
    return [[None if value == -torch.inf else value for value in row] for row in best.tolist()]


def _shared(directions: Tensor, sides: Sequence[Stack]) -> Shared:
    rows = torch.cat([side.rows[side.defined].flatten(0, 1) for side in sides])
    share = (rows @ directions.to(rows)).pow(2).sum(0) / rows.pow(2).sum() * rows.shape[1]
    places = directions.abs().argmax(0)
    entries = directions.abs().amax(0).tolist()
    return Shared(directions.shape[1], share.tolist(), list(zip(places.tolist(), entries, strict=True)))


def _warnings(shared: Shared) -> list[Warning]:
    strongest = max(shared.weights, default=0.0)
    if strongest <= OUTLIER:
        return []
    place, entry = shared.dimensions[0]
    text = (
        f"One direction of the stream, which leans on dimension {place} ({entry:.2f}), has {strongest:.0f} times its "
        "share of what is read and written; compare the numbers without the shared directions."
    )
    return [Warning("one-dimension", text, round(strongest, 2))]


def _certificate(gathered: Gathered, pairs: Sequence[PairRow]) -> CompositionCertificate:
    errors = [(abs(row.composition / gathered.alone(row) - 1), row) for row in pairs]
    worst, row = max(errors, key=lambda pair: pair[0], default=(0.0, None))
    if row is not None and not worst <= TOLERANCE:
        where = f"{row.kind}-composition of {row.reader} with {row.writer}"
        raise CertificateError("A pair computed alone has another composition", where, None, worst, TOLERANCE)
    return CompositionCertificate(len(pairs), worst, TOLERANCE, True)
