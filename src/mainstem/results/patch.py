"""The result of `patch` as plain data: a grid of effects, of one pair of prompts or the means over many.

The keys of `as_dict` are a contract (schema `mainstem/patch/1`): keys may be added, never renamed. Nothing here imports
torch, so a result that was saved can be rendered without a model.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mainstem.results.reading import TabularReading

Table = list[list[float | None]]
"""A number for each row and column; None where there is no such unit."""


@dataclass(frozen=True)
class CellRow:
    """One cell; `low` and `high` are the ends of the interval of its effect, None for one pair."""

    row: str
    column: str
    value: float
    effect: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class StabilityRow:
    """How well halves of the pairs agree about cells: `half`, and `whole` for all pairs against as many others."""

    half: float
    whole: float
    splits: int


@dataclass(frozen=True)
class PatchReading(TabularReading):
    """What a patching sweep found.

    An effect is how far a cell moves the run that it patches towards the other run, in units of the metric's difference
    between the two: for `denoising` the recovery (m - m_corrupted) / (m_clean - m_corrupted), for `noising` the loss
    (m_clean - m) / (m_clean - m_corrupted). With several pairs, each m is a mean over them.

    Attributes:
        pairs: how many pairs of prompts.
        prompt, corrupted: the clean and the corrupted prompt, of several the first pair's: `text`, `tokens`, `ids`.
        answers, wrong_answers: the tokens that the metric compares, of several the first pair's.
        metric, grid, direction, window: as chosen.
        position: the destination; of several the first pair's.
        rows, columns: labels of the axes.
        values: the metric of each cell's run.
        effects: the same as an effect.
        low, high: the bootstrap interval of 95 % of each effect over pairs; None for one pair.
        clean, corrupted_value: the metric of the two unpatched runs.
        stability: how stable the effects are over pairs; None for one.
        top: the cells with the largest effects, of either sign.
        run, identical: how many cells were run, and how many were not, because both runs are bitwise equal there.
        checked, error: how many were computed again by a full forward, and the largest difference of a logit.
        roles: where columns are roles, the positions of each, of several pairs the first one's; otherwise None.
    """

    SCHEMA: ClassVar = "mainstem/patch/1"
    COMMAND: ClassVar = "patch"
    IN_CELLS: ClassVar = ("values", "effects", "low", "high")

    pairs: int
    prompt: dict[str, Any]
    corrupted: dict[str, Any]
    answers: list[str]
    wrong_answers: list[str]
    metric: str
    grid: str
    direction: str
    window: int
    position: int
    rows: list[str]
    columns: list[str]
    values: Table
    effects: Table
    low: Table | None
    high: Table | None
    clean: float
    corrupted_value: float
    stability: StabilityRow | None
    top: list[CellRow]
    run: int
    identical: int
    checked: int
    error: float
    notes: list[str] = field(default_factory=list)
    roles: dict[str, list[int]] | None = None

    def cells(self) -> list[dict[str, Any]]:
        """Every cell as a row of a table: names, the metric, the effect and its interval."""
        return [
            {
                "row": row,
                "column": column,
                "value": self.values[i][j],
                "effect": self.effects[i][j],
                "low": None if self.low is None else self.low[i][j],
                "high": None if self.high is None else self.high[i][j],
            }
            for i, row in enumerate(self.rows)
            for j, column in enumerate(self.columns)
            if self.effects[i][j] is not None
        ]
