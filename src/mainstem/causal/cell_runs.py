"""Cells of a grid, each a run of one prompt with some values taken from another run.

Values that are bitwise equal in both runs, as at positions before the first different token, are not patched, and a
cell that has no other is not run: its value is that of the unchanged run.

Runs are made by `mainstem.causal.replay`. A few cells, drawn at random, are computed once more by one full forward
each, and the result says how far apart they were.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import Change, Pass, copied_by_token, set_by_position
from mainstem.causal.edited import part_of
from mainstem.causal.patching_grids import Cell
from mainstem.causal.replay import Replay
from mainstem.causal.row_batches import alike
from mainstem.causal.sweep_state import SweepState
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import CertificateError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of

Progress = Callable[[int, int], None]
"""Receives how many cells are done, and how many there are."""

CHECKED = 2
"""How many cells are computed again by a full forward each."""


@dataclass(frozen=True, eq=False)
class CellRuns:
    """What the cells of one prompt gave.

    Attributes:
        values: the metric of each cell's run; NaN where there is no cell.
        run: how many cells were run, now or before an interruption.
        identical: how many were not, because both runs are bitwise equal there.
        checked: how many cells were computed again by a full forward, and `error` the largest difference of a logit.
        notes: what was computed in a slower way, and why.
    """

    values: Float[Tensor, " cell"]
    run: int
    identical: int
    checked: int
    error: float
    notes: tuple[str, ...]


def run_cells(
    replay: Replay,
    cells: Sequence[Cell | None],
    given: Mapping[Site, Float[Tensor, "pos entry"]],
    metric: LogitMetric,
    unchanged: float,
    label: Callable[[int], str],
    kept: SweepState | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> CellRuns:
    """Runs every cell.

    Args:
        replay: makes the runs.
        cells: what each takes from the other run.
        given: what that run has at the sites.
        metric: of logits at the destination.
        unchanged: the metric of the run without changes.
        label: a cell as text.
        kept: cells that are done already, and where those that are run are noted.
        progress: called after each batch.
        seed: of the cells that are checked.

    Raises:
        NotFiniteError: if a run gives NaN; names the first layer.
        CertificateError: if a cell comes out differently in a full forward of its own.
    """
    changes = {i: _changes(cell, given, replay.blocks.values) for i, cell in enumerate(cells) if cell}
    runs = {i: made for i, made in changes.items() if made}
    found, drawn = _run(replay, metric, runs, kept, progress, seed)
    values = dict.fromkeys(changes, unchanged) | found
    table = torch.tensor([values.get(i, torch.nan) for i in range(len(cells))], dtype=torch.float64)
    error = _checked(replay, label, runs, drawn)
    return CellRuns(table, len(runs), len(changes) - len(runs), len(drawn), error, tuple(replay.notes))


@torch.no_grad()
def observed(
    model: torch.nn.Module, anatomy: Anatomy, ids: Tensor, position: int, sites: Sequence[Site], forward: dict[str, Any]
) -> tuple[Float[Tensor, " d_vocab"], dict[Site, Float[Tensor, "pos entry"]]]:
    """The logits at the destination and what is at the sites, in a run of a prompt as it is."""
    prompt, ids = ids.shape[1], ids[:, : position + 1] if anatomy.causal else ids
    values: dict[Site, Tensor] = {}

    def looking(site: Site) -> tuple[Site, Tap]:
        def tap(leaves: list[Any]) -> None:
            values[site] = copied_by_token(leaves[site.slot], site, Pass(1, ids.shape[1]))[1][0]

        return site, tap

    with part_of(model, prompt), tapped(model, [looking(site) for site in sites]):
        logits = logits_of(model(input_ids=ids, **forward))
    return logits[0, position].clone(), values


def _changes(cell: Cell, given: Mapping[Site, Tensor], known: Mapping[Site, Tensor]) -> list[Change]:
    """What a cell's run changes: only positions where the two runs differ."""
    changes = []
    for place in cell.places:
        chosen = slice(None) if place.entries is None else place.entries
        new, old = given[place.site][:, chosen], known[place.site][:, chosen]
        different = (new != old).any(-1)
        positions = tuple(position for position in cell.positions if different[position])
        if positions:
            changes.append(Change(place.site, set_by_position(new), positions, place.entries))
    return changes


def _run(
    replay: Replay,
    metric: LogitMetric,
    runs: Mapping[int, list[Change]],
    kept: SweepState | None,
    progress: Progress | None,
    seed: int,
) -> tuple[dict[int, float], dict[int, Tensor]]:
    """The metric of every run, those that were kept included, and the logits of a few that were made now."""
    values = {i: value for i, value in kept.done.items() if i in runs} if kept else {}
    left = [i for i in runs if i not in values]
    order = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed)).tolist()
    sample = {left[i] for i in order[:CHECKED]}
    drawn: dict[int, Tensor] = {}
    for batch, logits in replay.logits(runs, frozenset(values)):
        found = metric(logits).double().tolist()
        values |= dict(zip(batch, found, strict=True))
        drawn |= {i: row for i, row in zip(batch, logits, strict=True) if i in sample}
        if kept:
            kept.add(batch, found)
        if progress:
            progress(len(values), len(runs))
    return values, drawn


def _checked(
    replay: Replay, label: Callable[[int], str], runs: Mapping[int, list[Change]], drawn: Mapping[int, Tensor]
) -> float:
    """The largest difference of a logit between drawn cells and full forwards of their own."""
    worst = 0.0
    for i, logits in drawn.items():
        alone = replay.alone(runs[i])
        worst = max(worst, float((logits.double() - alone.double()).abs().max()))
        if not alike(logits, alone):
            raise CertificateError(
                f"A run comes out otherwise in a full forward of its own, by {worst:.2g} in a logit",
                label(i),
                "Please report the model's class and this message.",
            )
    return worst
