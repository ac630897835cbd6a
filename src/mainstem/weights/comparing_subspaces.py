"""The overlap of what units read and write, from their weights, beside random subspaces.

A side is written UNIT.SIDE, and several are joined by `+`: L3H2.write, L9H8.key, L3H2.write+L3H5.write.

    write    what a head, a neuron or a sublayer writes: the columns of W_OV, of W_down
    query, key, value    what a head, or all heads of an attention, read: the rows of W_QK from either side, of W_OV
    gate, up, input      the rows by which a neuron or an MLP reads, by role
    read     all rows by which a neuron or a sublayer reads

The columns and rows are those of `mainstem.analysis.stream_weights`, before the norm, its gain in them.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.stream_weights import StreamWeights
from mainstem.analysis.subspace import DRAWS, LEVEL, Overlap, Span, overlap, span
from mainstem.analysis.warnings import Warning
from mainstem.errors import ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.results.subspace import Bar, Map, SubspaceReading
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

SIDES = ("write", "query", "key", "value", "gate", "up", "input", "read")
ENERGY = 0.99
"""The share of the squared norm that a side's subspace holds by default."""

OUTLIER = 0.25
"""From which share of an overlap one dimension of the stream is worth a warning."""


def compare_subspaces(
    model: "Model",
    first: str,
    second: str,
    *,
    rank: int | None = None,
    energy: float | None = None,
    offset: int = 0,
    draws: int = DRAWS,
) -> SubspaceReading:
    """How two sides, or two sets of sides, overlap.

    Args:
        model: the model.
        first: sides of units, as this module writes them.
        second: the others.
        rank: how many directions of each to take.
        energy: the share of the squared norm to hold instead; 0.99 if neither is given.
        offset: for queries and keys, how many positions the source is before the destination.
        draws: how many random subspaces to draw.

    Raises:
        UnitError, ChoiceError, UsageError, PositionError: if a side is no side, or an argument is wrong.
        LevelRefusedError: if the weights of a unit are not to be had.
    """
    if whole_number("draws", draws) < 1:
        raise UsageError("A null needs draws", None, "Give 1 or more.")
    if rank is None and energy is None:
        energy = ENERGY
    sides = [Side(model.weights, text, offset) for text in (first, second)]
    spans = [span(torch.cat(side.rows), rank, energy) for side in sides]
    found = overlap(spans[0], spans[1], draws, model.seed)
    facts = {
        **{name: _side(side, made) for name, side, made in zip(("first", "second"), sides, spans, strict=True)},
        "offset": offset,
        "level": LEVEL,
        "overlap": {name: value for name, value in asdict(found).items() if name != "angles"},
    }
    return _compared(model, f"{sides[0]} and {sides[1]}", found, facts, _pairs(sides, rank, energy))


def _compared(model: "Model", title: str, found: Overlap, facts: dict[str, Any], maps: list[Map]) -> SubspaceReading:
    return SubspaceReading(
        subject="overlap",
        title=title,
        verdict=found.verdict,
        provenance=model.provenance(),
        warnings=[warning.as_dict() for warning in _warnings(found)],
        model=model.summary,
        facts=facts,
        rows=[_angle(number, angle) for number, angle in enumerate(found.angles)],
        caption="principal angles, the smallest first",
        bars=_bars(found),
        bars_unit="times what is expected of random subspaces; lines are 2 standard deviations",
        maps=maps,
        notes=list(model.weights.approximations),
    )


class Side:
    """Sides of some units, and their rows in the stream.

    Raises:
        UnitError, ChoiceError, LevelRefusedError: if there is no such side. UsageError: if its matrix is zero.
    """

    def __init__(self, weights: StreamWeights, text: str, offset: int) -> None:
        self.parts = [_parsed(part) for part in text.split("+")]
        self.rows = [_rows(weights, unit, side, offset) for unit, side in self.parts]

    @property
    def names(self) -> list[str]:
        """The address of each."""
        return [f"{unit}.{side}" for unit, side in self.parts]

    def __str__(self) -> str:
        return "+".join(self.names)


def _parsed(text: str) -> tuple[Unit, str]:
    address, _, side = text.strip().rpartition(".")
    if side not in SIDES:
        example = f"Write UNIT.SIDE, such as L3H2.write; sides are {', '.join(SIDES)}."
        if not address or side[:1].isdigit() or side in ("attn", "mlp", "mixer"):
            raise UnitError(f"{text.strip()!r} names no side of a unit", None, example)
        raise ChoiceError("side", side, SIDES)
    return Unit.parse(address), side


def _rows(weights: StreamWeights, unit: Unit, side: str, offset: int) -> Float[Tensor, "row d_model"]:
    """What the side reads or writes, as rows with the spectrum of its matrix."""
    if side == "write" and unit.kind != "head":
        found = weights.write(unit).mT
    elif side in ("write", "value"):
        matrix = weights.ov(unit)
        found = matrix.T.narrow() if side == "write" else matrix.narrow()
    elif side in ("query", "key"):
        matrix = weights.qk(unit, offset)
        found = matrix.T.narrow() if side == "query" else matrix.narrow()
    elif unit.kind == "head":
        raise UnitError(f"A head has no side {side!r}", str(unit), "Heads have write, query, key and value.")
    else:
        found = _reading(weights.reads(unit), unit, side)
    found = found.flatten(0, -2)
    if not bool(found.any()):
        raise UsageError(f"{unit}.{side} spans no subspace", "its matrix is zero", "Name another unit or side.")
    return found


def _reading(rows: dict[str, Tensor], unit: Unit, side: str) -> Float[Tensor, "row d_model"]:
    if side == "read":
        return torch.cat(list(rows.values()))
    if side not in rows:
        raise LevelRefusedError(f"{unit} has no {side}", None, f"it reads by {', '.join(rows)}")
    return rows[side]


def _side(side: Side, made: Span) -> dict:
    return {"units": side.names, "directions": len(made), "energy": made.energy, "rank": made.rank}


def _angle(number: int, angle: float) -> dict:
    return {"number": number, "degrees": angle, "cosine": float(torch.tensor(angle).deg2rad().cos())}


def _bars(found: Overlap) -> list[Bar]:
    scale, weighted = found.expected, found.weighted_expected
    spread, weighted_spread = 2 * found.spread / scale, 2 * found.weighted_spread / weighted
    own, own_weighted = found.overlap / scale, found.weighted / weighted
    return [
        Bar("overlap", own, own, own),
        Bar("of random subspaces", 1.0, 1 - spread, 1 + spread),
        Bar("weighted overlap", own_weighted, own_weighted, own_weighted),
        Bar("of the same spectra turned", 1.0, 1 - weighted_spread, 1 + weighted_spread),
    ]


def _pairs(sides: Sequence[Side], rank: int | None, energy: float | None) -> list[Map]:
    """Of sets, each unit with each: the overlap above chance over the smaller size."""
    if all(len(side.parts) == 1 for side in sides):
        return []
    made = [[span(rows, rank, energy) for rows in side.rows] for side in sides]
    values: list[list[float | None]] = [[_above(one, other) for other in made[1]] for one in made[0]]
    caption = "overlap less what random subspaces have, over the smaller of the two sizes"
    return [Map("Unit by unit", caption, sides[0].names, sides[1].names, values)]


def _above(first: Span, second: Span) -> float:
    own = float((first.directions @ second.directions.T).square().sum())
    expected = len(first) * len(second) / first.directions.shape[1]
    return (own - expected) / min(len(first), len(second))


def _warnings(found: Overlap) -> list[Warning]:
    if found.dimension_share < OUTLIER or found.verdict != "shared":
        return []
    text = f"Dimension {found.dimension} of the stream alone gives {found.dimension_share:.0%} of the overlap."
    return [Warning("one-dimension", text, round(found.dimension_share, 4))]
