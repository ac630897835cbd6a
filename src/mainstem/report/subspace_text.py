"""A subspace reading as tables, which the terminal and the page both show."""

from collections.abc import Mapping, Sequence
from typing import Any

from mainstem.experiments.outcome import ExperimentTable
from mainstem.report.text import NOTHING, compact
from mainstem.results.subspace import SubspaceReading

MOST_ROWS = 40
"""How many rows are shown; the document has all."""


def tables(r: SubspaceReading) -> list[ExperimentTable]:
    """Its rows, its numbers, and lists of rows among its numbers."""
    plain = [[_words(name), _cell(value)] for name, value in _flat(r.facts)]
    found = [ExperimentTable("Numbers", "", ["", "value"], plain), _table("Rows", r.caption, r.rows[:MOST_ROWS])]
    lists = {name: value for name, value in r.facts.items() if isinstance(value, list) and value}
    return found + [_table(_words(name).capitalize(), "", value) for name, value in lists.items()]


def number(value: float | None) -> str:
    """A number of a heat map."""
    return NOTHING if value is None else f"{value:.2f}"


def full(values: Sequence[Sequence[float | None]]) -> float:
    """The size whose colour is the strongest: the largest, and 1 if there is none."""
    return max((abs(value) for row in values for value in row if value is not None), default=0.0) or 1.0


def _flat(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            pairs += [(f"{name} {inner}", held) for inner, held in value.items()]
        elif not isinstance(value, list):
            pairs.append((name, value))
    return pairs


def _table(title: str, caption: str, rows: Sequence[Mapping[str, Any]]) -> ExperimentTable:
    heads = list(rows[0]) if rows else []
    return ExperimentTable(title, caption, [_words(head) for head in heads], [[row[h] for h in heads] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return compact(value) if isinstance(value, float) else NOTHING if value is None else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
