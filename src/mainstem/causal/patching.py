"""Patching sweeps: for each cell of a grid, one run with the cell's values taken from a run of another prompt.

    denoising   clean values into the corrupted run: what is enough to bring the answer back
    noising     corrupted values into the clean run: what is needed for it

A cell's value is the metric of its run; its recovery is (m - m_corrupted) / (m_clean - m_corrupted) in both directions
(Wang et al. 2022, "Interpretability in the Wild"; Heimersheim and Nanda 2024, "How to use and interpret activation
patching": report both directions; windows of layers inflate effects).

Runs are made, and checked, by `mainstem.causal.cell_runs`.

Limits: prompts of equal length, one destination, one value for all neurons of an expert layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.cell_runs import Progress, observed, run_cells
from mainstem.causal.metrics import Metric, metric_name, normalised
from mainstem.causal.patching_grids import Grid
from mainstem.causal.replay import DEFAULT_MEMORY, Replay
from mainstem.causal.sweep_state import SweepState
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import ChoiceError, MetricError, PromptError
from mainstem.model.anatomy import Anatomy

Direction = Literal["denoising", "noising"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

WINDOWS = (
    "Windows of layers overlap and inflate effects: neighbouring cells share layers, and their effects do not add up."
)


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep found.

    Attributes:
        grid: the grid's name.
        direction: whose values were put into which run.
        metric: its name.
        rows, columns: labels of the axes of `values`.
        values: the metric of each cell's run; NaN where there is no such unit.
        clean, corrupted: the metric of the two unpatched runs.
        position: the destination, counted from 0.
        run: how many cells were run, now or before an interruption.
        identical: how many were not, because both runs are bitwise equal there.
        checked: how many cells were computed again by a full forward, and `error` the largest difference of a logit.
        notes: what was computed in a slower way, and why.
        warnings: what to keep in mind when reading it.
        provenance: versions, model, dtype, seed and date, where a session made the sweep.
    """

    grid: str
    direction: Direction
    metric: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Float[Tensor, "row column"]
    clean: float
    corrupted: float
    position: int
    run: int
    identical: int
    checked: int
    error: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    provenance: Any = None

    @property
    def recovery(self) -> Float[Tensor, "row column"]:
        """0 where the metric is that of the corrupted run, 1 where it is that of the clean one."""
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Row, column and recovery of the cells that change most from the unpatched run."""
        moved = self.recovery if self.direction == "denoising" else 1 - self.recovery
        found = moved.nan_to_num(nan=-torch.inf).flatten().argsort(descending=True, stable=True)[:count].tolist()
        places = [divmod(i, len(self.columns)) for i in found]
        return [(self.rows[row], self.columns[column], float(self.recovery[row, column])) for row, column in places]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two prompts and what is measured on them.

    Attributes:
        clean, corrupted: [1, pos] their token ids, as many for both.
        position: the destination, counted from 0.
        metric: from logits at the destination, [run, d_vocab], to a number for each run.
    """

    clean: Int[Tensor, "1 pos"]
    corrupted: Int[Tensor, "1 pos"]
    position: int
    metric: LogitMetric

    def __post_init__(self) -> None:
        if self.clean.shape != self.corrupted.shape:
            long, short = self.clean.shape[1], self.corrupted.shape[1]
            raise PromptError(
                f"The clean prompt has {long} tokens and the corrupted one {short}",
                None,
                "Replace tokens one for one, so that each position has its counterpart: `mainstem` shows the tokens of "
                "a prompt with `explain`.",
            )
        if torch.equal(self.clean, self.corrupted):
            raise PromptError("The two prompts are the same", None, "Replace at least one token of the clean prompt.")

    @property
    def metric_name(self) -> str:
        """The metric's name, or that of the function."""
        return metric_name(self.metric)


def sweep(
    model: torch.nn.Module,
    anatomy: Anatomy,
    pair: Pair,
    grid: Grid,
    direction: Direction = "denoising",
    memory: int = DEFAULT_MEMORY,
    state: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    **forward: Any,
) -> Sweep:
    """Runs every cell of a grid.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        pair: the prompts and the metric.
        grid: the cells, made for the positions up to the destination (for all, where the model is not causal).
        direction: `denoising` or `noising`.
        memory: the bytes that the sweep may take beside the model.
        state: a file to keep finished cells in, and to go on from.
        identity: what else a state file has to agree on, such as the model's name.
        progress: called after each batch.
        seed: of the cells that are checked.
        forward: further arguments of the forward call.

    Raises:
        ChoiceError: if there is no such direction.
        MetricError: if the metric is the same on both prompts, or not finite.
        NotFiniteError: if a run gives NaN; names the first layer.
        UsageError: if the memory is too small, or the state file is of another sweep.
        CertificateError: if a cell comes out differently in a full forward of its own.
    """
    if direction not in DIRECTIONS:
        raise ChoiceError("direction", direction, DIRECTIONS)
    denoising = direction == "denoising"
    base, source = (pair.corrupted, pair.clean) if denoising else (pair.clean, pair.corrupted)
    other, given = observed(model, anatomy, source, pair.position, grid.sites, forward)
    reserved = sum(value.nbytes for value in given.values())
    replay = Replay(model, anatomy, base, pair.position, grid.sites, memory, reserved, **forward)
    clean, corrupted = _measured(pair, *((other, replay.clean) if denoising else (replay.clean, other)))
    kept = None
    if state is not None:
        asked = {**(identity or {}), **_identity(pair, grid, direction)}
        kept = SweepState(state, asked, {"clean": clean, "corrupted": corrupted})
    unchanged = corrupted if denoising else clean
    made = run_cells(replay, grid.cells, given, pair.metric, unchanged, grid.label, kept, progress, seed)
    return Sweep(
        grid=grid.name,
        direction=direction,
        metric=pair.metric_name,
        rows=grid.rows,
        columns=grid.columns,
        values=made.values.view(len(grid.rows), len(grid.columns)),
        clean=clean,
        corrupted=corrupted,
        position=pair.position,
        run=made.run,
        identical=made.identical,
        checked=made.checked,
        error=made.error,
        notes=made.notes,
        warnings=(WINDOWS,) if grid.overlapping else (),
    )


def _measured(pair: Pair, clean: Tensor, corrupted: Tensor) -> tuple[float, float]:
    """The metric on the two unpatched runs; refused where rounding cannot tell them apart."""
    if isinstance(pair.metric, Metric):
        recovery = normalised(pair.metric, clean, corrupted)
        return recovery.clean, recovery.corrupted
    high, low = pair.metric(torch.stack([clean, corrupted])).double().tolist()
    if not abs(high - low) > 8 * torch.finfo(clean.dtype).eps * max(abs(high), abs(low)):
        raise MetricError(
            f"The metric is {high:.6g} on the clean run and {low:.6g} on the corrupted one, so there is no recovery",
            pair.metric_name,
            "Change the corrupted prompt or the metric.",
        )
    return high, low


def _identity(pair: Pair, grid: Grid, direction: Direction) -> dict[str, Any]:
    """What a state file has to agree on."""
    metric = pair.metric
    answers = [list(metric.answers), list(metric.wrong_answers)] if isinstance(metric, Metric) else None
    return {
        "clean prompt": pair.clean[0].tolist(),
        "corrupted prompt": pair.corrupted[0].tolist(),
        "destination": pair.position,
        "metric": [pair.metric_name, answers],
        "grid": [grid.name, list(grid.rows), len(grid.columns)],
        "direction": direction,
    }
