"""Causal tracing: at which positions and layers the clean run's states bring the answer back to a corrupted run.

    clean       the prompt as it is
    corrupted   another prompt of as many tokens (the default, which stays among what the model knows), or the same one
                with Gaussian noise on the embeddings of its subject, `noise` standard deviations of all entries that
                the embedding writes for the prompt; the mean over several draws
    restored    the corrupted run with the clean run's value at one position, of the stream after a block, or of what
                attention or MLPs write in a window of layers around it

(Meng et al. 2022, "Locating and editing factual associations in GPT", section 2; there noise of 3 standard deviations,
10 draws and windows of 10 layers. Replaced tokens: Zhang and Nanda 2024, "Towards best practices of activation
patching".) The indirect effect of a state is the metric of the restored run minus that of the corrupted one.

Each corrupted run is a prompt of its own, whose cells are run as those of a patching sweep are (noise is an edit that
holds meanwhile), so cells at which both runs are bitwise equal are not run, and a few cells are checked by a full
forward each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.cell_runs import CellRuns, observed, run_cells
from mainstem.causal.edited import edited
from mainstem.causal.edited_rows import EditedRows, Row
from mainstem.causal.edits import Edit
from mainstem.causal.knockouts import windows
from mainstem.causal.patching_grids import Cell, Place
from mainstem.causal.pieces import Entries, PieceMap
from mainstem.causal.replay import DEFAULT_MEMORY, Replay
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import ChoiceError, LevelRefusedError, PositionError, UsageError
from mainstem.model.hooks import Site
from mainstem.points import Point
from mainstem.units import Unit

KINDS = ("resid", "attn", "mlp")


@dataclass(frozen=True, eq=False)
class CausalTrace:
    """The metric of restored runs.

    Attributes:
        restored: for each kind of state; NaN where a layer has none.
        clean, corrupted: the metric of these runs; the latter a mean over draws.
        layers: the number of each block.
        window: how many layers `attn` and `mlp` are restored in.
        corruption: how the prompt was corrupted, in words.
        metric: its name.
        position: the destination, counted from 0.
        run: how many cells were run, over all draws; the others are bitwise equal in both runs.
        checked: how many cells were computed again by a full forward, and `error` the largest difference of a logit.
        notes: what was computed in a slower way, and why.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    restored: dict[str, Float[Tensor, "layer pos"]]
    clean: float
    corrupted: float
    layers: tuple[int, ...]
    window: int
    corruption: str
    metric: str
    position: int
    run: int
    checked: int
    error: float
    notes: tuple[str, ...] = ()
    provenance: Any = None

    @property
    def total_effect(self) -> float:
        """Clean minus corrupted."""
        return self.clean - self.corrupted

    def indirect_effects(self, kind: str) -> Float[Tensor, "layer pos"]:
        """Restored minus corrupted.

        Raises:
            ChoiceError: if the kind was not restored.
        """
        if kind not in self.restored:
            raise ChoiceError("kind of state", kind, tuple(self.restored))
        return self.restored[kind] - self.corrupted


def replaced(ids: Int[Tensor, " pos"]) -> list[Row]:
    """The corrupted run: another prompt."""
    return [Row(ids)]


def noised(rows: EditedRows, subject: Sequence[int], noise: float, draws: int, seed: int) -> list[Row]:
    """The corrupted runs: noise on the embeddings of some positions, the same for the same seed.

    Raises:
        UsageError: if there is no subject, no draw or no noise.
        PositionError: if the subject is outside the prompt.
    """
    if not subject or draws < 1 or not noise > 0:
        raise UsageError("Noise needs the subject's positions, a size above 0 and one draw at least", None)
    if outside := [place for place in subject if not 0 <= place < len(rows.ids)]:
        raise PositionError(f"Position {outside[0]} is outside the prompt", "the subject")
    at = Point("write", Unit.parse("embed"))
    site = _site(PieceMap(rows.anatomy), at)
    written = rows.values([site])[site].double()
    generator = torch.Generator().manual_seed(seed)
    size = noise * float(written.std())
    made = []
    for _ in range(draws):
        added = size * torch.randn(written.shape, generator=generator, dtype=torch.float64)
        made.append(Row(edits=[Edit.add(at, added[place], positions=place) for place in dict.fromkeys(subject)]))
    return made


def trace_causes(
    rows: EditedRows,
    corrupted: Sequence[Row],
    metric: LogitMetric,
    kinds: Sequence[str] = KINDS,
    window: int = 1,
    corruption: str = "",
    name: str = "metric",
    memory: int = DEFAULT_MEMORY,
) -> CausalTrace:
    """Restores every state of some kinds.

    Args:
        rows: makes runs of the clean prompt.
        corrupted: the corrupted runs, by `replaced` or `noised`.
        metric: from logits to numbers.
        kinds: of states: `resid`, `attn`, `mlp`.
        window: how many layers `attn` and `mlp` are restored in at once.
        corruption: how the prompt was corrupted, in words.
        name: of the metric.
        memory: the bytes that the runs may take beside the model.

    Raises:
        ChoiceError: if there is no such kind.
        LevelRefusedError: if no layer has such a state.
        UsageError: if there is no kind, a window holds nothing, or the memory is too small.
        NotFiniteError: if a run gives NaN; names the first layer.
        CertificateError: if a cell comes out differently in a full forward of its own.
    """
    if not kinds:
        raise UsageError("No kind of state to restore", None, f"Name one or more of {', '.join(KINDS)}.")
    layers = tuple(block.layer for block in rows.anatomy.blocks)
    tables = {kind: _table(rows, kind, layers, 1 if kind == "resid" else window) for kind in kinds}
    cells = [cell for table in tables.values() for cell in table]
    places = range(len(cells) // len(tables) // len(layers))
    labels = [f"{kind} L{layer}, position {place}" for kind in tables for layer in layers for place in places]
    sites = list(dict.fromkeys(place.site for cell in cells if cell for place in cell.places))
    clean, given = observed(rows.model, rows.anatomy, rows.ids[None], rows.position, sites, rows.forward)

    def run(row: Row) -> tuple[float, CellRuns]:
        ids = (rows.ids if row.ids is None else row.ids)[None]
        reserved = sum(value.nbytes for value in given.values())
        with edited(rows.model, rows.anatomy, row.edits, rows.inputs_of):
            replay = Replay(rows.model, rows.anatomy, ids, rows.position, sites, memory, reserved, **rows.forward)
            unchanged = float(metric(replay.clean[None]))
            return unchanged, run_cells(replay, cells, given, metric, unchanged, labels.__getitem__)

    base, made = zip(*map(run, corrupted), strict=True)
    values = torch.stack([one.values for one in made]).mean(0).view(len(tables), len(layers), -1)
    return CausalTrace(
        restored=dict(zip(tables, values, strict=True)),
        clean=float(metric(clean[None])),
        corrupted=fmean(base),
        layers=layers,
        window=window,
        corruption=corruption,
        metric=name,
        position=rows.position,
        run=sum(one.run for one in made),
        checked=sum(one.checked for one in made),
        error=max(one.error for one in made),
        notes=tuple(dict.fromkeys(note for one in made for note in one.notes)),
    )


def _table(rows: EditedRows, kind: str, layers: Sequence[int], window: int) -> list[Cell | None]:
    """For each layer and position what is restored there; None where a layer has no such state."""
    own = _sites(rows, kind)
    positions = range(rows.position + 1 if rows.anatomy.causal else len(rows.ids))
    cells: list[Cell | None] = []
    for layer, around in zip(layers, windows(layers, window), strict=True):
        places = tuple(Place(own[near]) for near in around if near in own)
        cells += [Cell(places, (at,)) if layer in own else None for at in positions]
    return cells


def _sites(rows: EditedRows, kind: str) -> dict[int, Site]:
    """Where the states of a kind are, by layer."""
    if kind not in KINDS:
        raise ChoiceError("kind of state", kind, KINDS)
    anatomy, pieces = rows.anatomy, PieceMap(rows.anatomy)
    points: dict[int, Point] = {}
    for block in anatomy.blocks:
        unit = Unit.write(block.layer, kind) if kind != "resid" else None
        if unit is None:
            points[block.layer] = Point("resid_post", layer=block.layer)
        elif anatomy.writes_of(unit):
            points[block.layer] = Point("write", unit)
    if not points:
        raise LevelRefusedError(f"No {kind} to restore", reason="no layer of this model has one")
    return {layer: _site(pieces, at) for layer, at in points.items()}


def _site(pieces: PieceMap, at: Point) -> Site:
    found = pieces.of(at)
    if len(found) > 1 or not isinstance(found[0], Entries):
        raise LevelRefusedError(f"No {at} to restore", reason="it is written in several pieces")
    return found[0].site
