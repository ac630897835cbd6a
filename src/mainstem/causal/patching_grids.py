"""The grids of a patching sweep: which values each cell of a table takes from the other run.

    resid            the stream that enters each block, and the final one, at each position
    attn, mlp, mixer what a sublayer writes, at each position; with a window, so many consecutive ones together
    heads            what each head gives to the output matrix, at all positions
    heads-positions  the same at each position
    neurons          single neurons (or other units made of neurons) by address, at all positions

Rows are layers, sublayers, heads or units; columns are positions, heads, or all positions together. Where positions
have roles, such as "subject", a column is a role in place of a position, and takes all its positions at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxtyping import Int
from torch import Tensor

from mainstem.causal.neuron_map import NeuronMap
from mainstem.errors import ChoiceError, LevelRefusedError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number

GridName = Literal["resid", "attn", "mlp", "mixer", "heads", "heads-positions", "neurons"]
GRIDS: tuple[GridName, ...] = get_args(GridName)
WRITES = ("attn", "mlp", "mixer")
"""The grids that a window makes sense for: the stream holds what earlier layers wrote already."""
WITHOUT_POSITIONS: tuple[GridName, ...] = ("heads", "neurons")
"""The grids whose cells take all positions, so that prompts of any lengths can be averaged."""


@dataclass(frozen=True, eq=False)
class Place:
    """Entries of what is at a site; None for all of them."""

    site: Site
    entries: Int[Tensor, " entry"] | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """What one run of a sweep takes from the other prompt: places, and at which positions."""

    places: tuple[Place, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Grid:
    """A table of cells; `cells[i]` is in row i // len(columns), None where there is no such unit.

    `overlapping` says whether neighbouring cells share places, as windows do.
    """

    name: GridName
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell | None, ...]
    overlapping: bool = False

    def label(self, index: int) -> str:
        """A cell as text."""
        row, column = divmod(index, len(self.columns))
        return f"{self.rows[row]}, {self.columns[column]}"

    @property
    def sites(self) -> list[Site]:
        """Every site that a cell changes."""
        return list(dict.fromkeys(place.site for cell in self.cells if cell for place in cell.places))


def grid(
    anatomy: Anatomy,
    name: str,
    positions: Sequence[str],
    window: int = 1,
    units: Sequence[Unit | str] = (),
    roles: Mapping[str, Sequence[int]] | None = None,
) -> Grid:
    """A grid for one model and prompt length.

    Args:
        anatomy: the model's.
        name: one of `GRIDS`.
        positions: a label for each position.
        window: for `attn`, `mlp` and `mixer`: how many consecutive sublayers a cell patches.
        units: for `neurons`: which.
        roles: names of columns with the positions that each takes at once, in place of a column for each position.

    Raises:
        ChoiceError: if there is no grid of that name.
        UsageError: if the window, the units or the roles do not fit the grid, or a role has no position.
        UnitError: if the model has no such unit.
        LevelRefusedError: if the model has none of what the grid asks for, or it cannot be taken apart.
    """
    if name not in GRIDS:
        raise ChoiceError("grid", name, GRIDS)
    if units and name != "neurons":
        raise UsageError(f"The grid {name} takes no units", None, "Leave them out, or take the grid neurons.")
    columns = (
        [(label, (at,)) for at, label in enumerate(positions)] if roles is None else _roles(name, roles, positions)
    )
    window = whole_number("window", window)
    if window != 1 and name not in WRITES:
        raise UsageError(f"The grid {name} takes no window", None, f"Windows are for {', '.join(WRITES)}.")
    if name == "resid":
        return _by_position(name, _stream(anatomy), columns)
    if name in WRITES:
        made = _by_position(name, _windows(_writes(anatomy, name), window, name), columns)
        return replace(made, overlapping=window > 1)
    every = tuple(range(len(positions)))
    if name == "neurons":
        chosen = _units(anatomy, units)
        cells = tuple(Cell(places, every) for _, places in chosen)
        return Grid(name, tuple(label for label, _ in chosen), ("all positions",), cells)
    heads = _heads(anatomy)
    if name == "heads-positions":
        rows = [(f"{layer}H{head}", (place,)) for layer, own in heads for head, place in enumerate(own)]
        return _by_position(name, rows, columns)
    most = max(len(own) for _, own in heads)
    cells = tuple(Cell((own[i],), every) if i < len(own) else None for _, own in heads for i in range(most))
    return Grid("heads", tuple(layer for layer, _ in heads), tuple(f"H{i}" for i in range(most)), cells)


Row = tuple[str, tuple[Place, ...]]
Column = tuple[str, tuple[int, ...]]


def _by_position(name: GridName, rows: Sequence[Row], columns: Sequence[Column]) -> Grid:
    cells = tuple(Cell(places, own) for _, places in rows for _, own in columns)
    return Grid(name, tuple(label for label, _ in rows), tuple(label for label, _ in columns), cells)


def _roles(name: str, roles: Mapping[str, Sequence[int]], positions: Sequence[str]) -> list[Column]:
    if name in WITHOUT_POSITIONS:
        raise UsageError(f"The grid {name} takes no roles", None, "Its cells take all positions: leave the roles out.")
    if not roles:
        raise UsageError("There is no role", None, "Name at least one, or leave roles out for a column each position.")
    columns = []
    for role, given in roles.items():
        own = tuple(sorted({whole_number("position", at) for at in given}))
        if not own or own[0] < 0 or own[-1] >= len(positions):
            raise UsageError(
                f"The role {role!r} has positions {list(own)} of {len(positions)}",
                None,
                f"Give at least one, from 0 to {len(positions) - 1}: what comes after the destination has no effect.",
            )
        columns.append((role, own))
    return columns


def _stream(anatomy: Anatomy) -> list[Row]:
    rows: list[Row] = [(f"L{block.layer}", (Place(block.input_site),)) for block in anatomy.blocks]
    return [*rows, ("final", (Place(anatomy.spine_sites[-1]),))]


def _writes(anatomy: Anatomy, place: str) -> list[Row]:
    """The sublayers of one kind in the order in which they write."""
    units = [unit for unit in anatomy.sublayers() if unit.layer is not None and unit.place == place]
    return [(str(u), tuple(Place(anatomy.writes[i].site) for i in anatomy.writes_of(u))) for u in units]


def _windows(rows: Sequence[Row], window: int, name: str) -> list[Row]:
    if not rows:
        raise LevelRefusedError(f"No grid {name}", reason="the model has no such sublayer", remedy="Take another grid.")
    if not 1 <= window <= len(rows):
        raise UsageError(f"A window of {window} does not fit {len(rows)} sublayers", None, f"Give 1 to {len(rows)}.")
    if window == 1:
        return list(rows)
    starts = range(len(rows) - window + 1)
    chosen = [rows[i : i + window] for i in starts]
    return [(f"{own[0][0]} to {own[-1][0]}", tuple(place for _, places in own for place in places)) for own in chosen]


def _heads(anatomy: Anatomy) -> list[tuple[str, list[Place]]]:
    """For each attention sublayer its name in front of a head's, and its heads."""
    found: dict[Site, tuple[str, list[Place]]] = {}
    for write in anatomy.writes:
        if write.attention is None or write.source is None or write.source in found:
            continue
        label = str(Unit.head(write.unit.layer or 0, 0, write.unit.nth)).removesuffix("H0")
        found[write.source] = label, [Place(write.source, channels) for channels in write.attention.channels]
    if not found:
        reasons = set(anatomy.refusals("heads").values())
        reason = reasons.pop() if len(reasons) == 1 else "the model has no attention that can be taken apart"
        raise LevelRefusedError("No grid of heads", reason=reason, remedy="Take resid, or what sublayers write.")
    return list(found.values())


def _units(anatomy: Anatomy, units: Sequence[Unit | str]) -> list[Row]:
    if not units:
        raise UsageError("The grid neurons needs units", None, "Name some, such as L24N1005 or L9H8.17.")
    known = NeuronMap(anatomy)
    rows: list[Row] = []
    for given in units:
        unit = Unit.parse(given) if isinstance(given, str) else given
        ablation = known.ablation([unit])
        if ablation.experts:
            raise LevelRefusedError(
                "An expert's neuron cannot be patched",
                str(unit),
                "experts are chosen token by token, so the other run may not have it",
                "Patch the whole sublayer with the grid mlp.",
            )
        rows.append((str(unit), tuple(Place(site, entries) for site, entries in ablation.entries.items())))
    return rows
