"""Composition of every pair of units of a model, from its weights, read into plain rows.

The factors are gathered a layer at a time (`mainstem.analysis.stream_weights`), all pairs are computed together
(`mainstem.analysis.composition`), once as they are and once without the shared directions, and the first pairs of each
kind are computed again one by one in float64.

Memory: n x rank x d_model float32 numbers for the n readers of each kind and as many for the writers, where all that is
within a gigabyte; else tiles of some layers, made anew for each pair of tiles, of which no more than a gigabyte is held
at a time (`mainstem.weights.composition_factors`). Beside it d_model^2 numbers three times, one layer's weights in
float64, and the tables of all pairs.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.analysis.composition import Compositions, compositions
from mainstem.analysis.composition_tiles import Pairs, all_pairs
from mainstem.analysis.false_discovery import RATE
from mainstem.analysis.stream_weights import StreamWeights
from mainstem.analysis.warnings import Warning, shared_direction_warning
from mainstem.errors import CertificateError, ChoiceError, UsageError
from mainstem.results.composition import (
    CompositionCertificate,
    CompositionReading,
    KindRow,
    PairRow,
    Shared,
)
from mainstem.results.reading import CheckSummary
from mainstem.units import Unit
from mainstem.weights.composition_factors import Gathered
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

KINDS = ("q", "k", "v", "mlp", "neuron")
"""What reads: a head's queries, keys, values, an MLP by all its input matrices, or a neuron by its gate and up rows."""

WRITERS = ("heads", "mlps", "neurons")
CERTIFIED = 5
"""How many pairs of each kind are computed again by themselves."""

TOLERANCE = 1e-4
"""Relative: compositions of float32 factors against float64."""


def composition(
    model: "Model",
    kinds: Sequence[str] = ("q", "k", "v"),
    *,
    offset: int = 0,
    writers: str = "heads",
    of: Unit | str | None = None,
    top: int = 20,
) -> CompositionReading:
    """Compositions of all pairs of a reader and a writer.

    Neurons are many, so they are asked about one head at a time: which neurons read it (kind "neuron"), or which it
    reads (writers "neurons").

    Args:
        model: the model.
        kinds: of "q", "k", "v" and "mlp"; or "neuron" alone.
        offset: for "q" and "k", how many positions the source is before the destination.
        writers: "heads", "mlps" or "neurons".
        of: the head, where neurons read or write.
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
    _check_neurons(kinds, writers, of)
    offset, weights = whole_number("offset", offset), model.weights
    weights.require_one_stream()
    names = list(dict.fromkeys([*kinds, writers]))
    gathered = Gathered(model, names, offset, None if of is None else Unit.parse(str(of)))
    tables: dict[str, tuple[Compositions, Compositions]] = {}
    shared: dict[str, Shared] = {}
    for kind in dict.fromkeys(kinds):
        made = all_pairs(gathered.side(kind), gathered.side(writers))
        tables[kind], shared[kind] = _tables(weights, kind, made), _shared(made)
    pairs = [row for kind, both in tables.items() for row in _rows(kind, both, top)]
    return CompositionReading(
        provenance=model.provenance(),
        warnings=[w.as_dict() for kind in shared for w in _warnings(kind, shared[kind])],
        model=model.summary,
        offset=offset,
        of=None if gathered.head is None else str(gathered.head),
        writers=writers,
        null=model.anatomy.sizes.d_model**-0.5,
        rate=RATE,
        kinds=[_summary(kind, *both) for kind, both in tables.items()],
        pairs=pairs,
        layers={kind: _by_layer(table) for kind, (table, _) in tables.items()},
        shared=shared,
        factors=CheckSummary(**asdict(model.weights_check)),
        certificate=_certificate(gathered, [row for kind in tables for row in _first(pairs, kind)]),
        notes=gathered.notes(),
        tables=tables,
    )


def _check_neurons(kinds: Sequence[str], writers: str, of: Unit | str | None) -> None:
    if of is not None and Unit.parse(str(of)).kind != "head":
        raise UsageError(f"{of} is no head", None, "Neurons are asked about one head, such as L9H8.")
    neurons = "neuron" in kinds or writers == "neurons"
    if neurons and of is None:
        raise UsageError(
            "Neurons compose with one head at a time",
            None,
            "Name it, as in: mainstem circuits L9H8 --composition --kind neuron.",
        )
    if of is not None and not neurons:
        what = "A head is named where neurons read or write"
        raise UsageError(what, str(of), "Take --kind neuron (who reads it), or --writers neurons (whom it reads).")
    if "neuron" in kinds and (writers != "heads" or len(set(kinds)) > 1):
        raise UsageError("Neurons that read are listed by themselves, with a head as writer", None, "Take one kind.")
    if writers == "neurons" and not set(kinds) <= {"q", "k", "v"}:
        raise UsageError("Neurons are read by a head's queries, keys or values", None, "Take kinds of q, k and v.")


def _tables(weights: StreamWeights, kind: str, made: Pairs) -> tuple[Compositions, Compositions]:
    """All pairs, and all without the shared directions."""
    order, distance = _order(weights, *(side.units for side in made.whole))
    whole = compositions(kind, *made.whole, order, distance, made.found)
    return whole, compositions(kind, *made.left, order, distance, made.rest)


def _order(weights: StreamWeights, readers: Sequence[Unit], writers: Sequence[Unit]) -> tuple[Tensor, Tensor]:
    """Of each pair which comes first, and how many layers apart they are: asked once for each pair of sublayers."""
    (rows, row), (columns, column) = _by_sublayer(readers), _by_sublayer(writers)
    order = weights.order(rows, columns)
    layers = [torch.tensor([unit.layer or 0 for unit in units]) for units in (rows, columns)]
    distance = (layers[0][:, None] - layers[1][None]).abs()
    return order[row][:, column], distance[row][:, column]


def _by_sublayer(units: Sequence[Unit]) -> tuple[list[Unit], Tensor]:
    """The distinct sublayers, and the number of each unit's own."""
    numbers: dict[Unit, int] = {}
    place = [numbers.setdefault(unit.sublayer, len(numbers)) for unit in units]
    return list(numbers), torch.tensor(place)


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
    place = torch.tensor(rows)[:, None] * layers + torch.tensor(columns)[None]
    best = torch.full((layers * layers,), -torch.inf, dtype=strength.dtype)
    best = best.scatter_reduce(0, place.flatten(), strength.flatten(), "amax").unflatten(0, (layers, layers))
    return [[None if value == -torch.inf else value for value in row] for row in best.tolist()]


def _shared(made: Pairs) -> Shared:
    count, places = made.directions.shape[1], made.directions.abs().argmax(0)
    entries = made.directions.abs().amax(0).tolist()
    weights = (made.inside * len(made.directions)).tolist()
    return Shared(count, weights, list(zip(places.tolist(), entries, strict=True)))


def _warnings(kind: str, shared: Shared) -> list[Warning]:
    if not shared.directions:
        return []
    return shared_direction_warning(kind, shared.weights[0], *shared.dimensions[0])


def _first(pairs: Sequence[PairRow], kind: str) -> list[PairRow]:
    return [row for row in pairs if row.kind == kind][:CERTIFIED]


def _certificate(gathered: Gathered, pairs: Sequence[PairRow]) -> CompositionCertificate:
    errors = [(abs(row.composition / gathered.alone(row) - 1), row) for row in pairs]
    worst, row = max(errors, key=lambda pair: pair[0], default=(0.0, None))
    if row is not None and not worst <= TOLERANCE:
        where = f"{row.kind}-composition of {row.reader} with {row.writer}"
        raise CertificateError("A pair computed alone has another composition", where, None, worst, TOLERANCE)
    return CompositionCertificate(len(pairs), worst, TOLERANCE, True)
