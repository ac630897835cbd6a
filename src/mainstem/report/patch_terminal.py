"""A patching sweep for the terminal: a heat map of coloured numbers, in panels where it is wide, and the largest cells.

The numbers are the result, the colours only lead the eye: nothing is lost without them. Blue moves the patched run
towards the other one, orange away from it; the palest are the smallest.
"""

import math
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mainstem.report import patch_text as words
from mainstem.report import terminal as t
from mainstem.report.text import compact, plural, shortened, visible
from mainstem.results.patch import PatchReading

CELL, WIDEST = 5, 14
MOST_ROWS = 64
FOR = ("#d5e8f0", "#9fcbdf", "#5fa6c6", "#2b7fa6", "#0f5575")
AGAINST = ("#f8e2d3", "#f0bd98", "#de8f5b", "#c4662a", "#8f3f0c")
DARK, LIGHT = "#16212c", "#ffffff"


def print_patch(console: Console, reading: PatchReading) -> None:
    """Prints a sweep, as wide as the console is."""
    r = reading
    console.print(*t.title_rows("patch", r.model, r.provenance), sep="\n")
    console.print(*_prompts(r), sep="\n")
    console.print(t.labelled("metric", Text(f"{words.measured(r)}{_answers(r)}")))
    console.print(t.labelled("grid", Text(f"{words.grid_text(r)}; {r.direction}")))
    console.print(t.heading("Heat map", words.what_is_shown(r)), *_panels(r, console.width), _legend(r), sep="\n")
    console.print(t.heading("Largest cells", "of either sign"), _top(r), sep="\n")
    console.print(Text())
    for line in (words.cells_text(r), words.stability_text(r)):
        if line:
            console.print(Text(line, "quiet"))
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def _prompts(r: PatchReading) -> list[RenderableType]:
    """Both prompts with their positions, those that differ marked in the corrupted one."""
    ends = len(r.prompt["tokens"]) - 1 if r.position < 0 else r.position
    clean, corrupted = r.prompt["tokens"], r.corrupted["tokens"]
    changed = Text()
    for place, token in enumerate(corrupted):
        if token != clean[place]:
            changed.append(f"{place} ", "quiet")
            changed.append(shortened(visible(token), 40), "against")
            changed.append("  ")
    changed.rstrip()
    label = "clean" if r.pairs == 1 else "clean 1"
    lines: list[RenderableType] = [t.labelled(label, t.prompt_tokens(clean, ends)), t.labelled("corrupted", changed)]
    if r.pairs > 1:
        lines.append(t.labelled("pairs", Text(f"{plural(r.pairs, 'pair')}; the first is shown")))
    return lines


def _answers(r: PatchReading) -> str:
    right, wrong = (" ".join(visible(token) for token in side[:6]) for side in (r.answers, r.wrong_answers))
    said = f"; answer {right}" if right else ""
    return said + (f" against {wrong}" if wrong and r.metric == "logit-difference" else "")


def _panels(r: PatchReading, width: int) -> list[RenderableType]:
    """The map in as many panels below each other as its columns need."""
    names = max(len(row) for row in r.rows)
    cell = _cell(r)
    fit = max((width - names - 1) // cell, 1)
    best = [max((abs(e) for e in row if e is not None), default=0.0) for row in r.effects]
    strongest = sorted(range(len(r.rows)), key=lambda i: -best[i])[:MOST_ROWS]
    shown = sorted(strongest)
    panels: list[RenderableType] = []
    for start in range(0, len(r.columns), fit):
        panels += [Text()] if start else []
        panels.append(_panel(r, shown, range(start, min(start + fit, len(r.columns))), names, cell))
    if len(shown) < len(r.rows):
        panels.append(Text(f"the {len(shown)} rows of {len(r.rows)} with the largest effects", "quiet"))
    return panels


def _cell(r: PatchReading) -> int:
    """How wide a column is: numbers are whole; positions and heads are short, roles and `all positions` are words."""
    numbers = max(len(words.percent(effect)) for row in r.effects for effect in row)
    named = r.roles is not None or len(r.columns) == 1
    names = min(max(len(words.short_column(column)) for column in r.columns), WIDEST) if named else 0
    return max(CELL, 1 + numbers, 1 + names)


def _panel(r: PatchReading, shown: Sequence[int], columns: range, names: int, cell: int) -> Text:
    """Some columns of the map; one line of text for each row, so that colours touch each other."""
    full = words.largest(r)
    text = Text(no_wrap=True)
    text.append(" " * (names + 1))
    for column in columns:
        text.append(shortened(words.short_column(r.columns[column]), cell - 1).rjust(cell - 1) + " ", "quiet")
    for i in shown:
        text.append(f"\n{r.rows[i].ljust(names)} ")
        for column in columns:
            effect = r.effects[i][column]
            text.append(words.percent(effect).rjust(cell - 1).ljust(cell), _style(effect, full))
    return text


def _style(effect: float | None, full: float) -> Style | str:
    """A background as strong as the effect."""
    if effect is None or not math.isfinite(effect) or abs(effect) < 0.1 * full:
        return "quiet"
    shades = FOR if effect > 0 else AGAINST
    step = min(int(abs(effect) / full * len(shades)), len(shades) - 1)
    return Style(color=LIGHT if step > 2 else DARK, bgcolor=shades[step])


def _legend(r: PatchReading) -> Text:
    """The colours from the largest against to the largest for."""
    full = words.largest(r)
    text = Text("\n")
    steps = [-full, -full / 2, 0.0, full / 2, full]
    for effect in steps:
        text.append(words.percent(effect).replace("·", "0").center(CELL + 1), _style(effect, full))
    text.append("  % of the difference between the two runs; · is under 0.5", "quiet")
    return text


def _top(r: PatchReading) -> Table:
    table = t.lined()
    table.add_column("row", no_wrap=True)
    table.add_column("column", overflow="fold")
    for name in ("effect %", r.metric, *(("95 % interval",) if r.pairs > 1 else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in r.top:
        numbers = [words.percent_exactly(cell.effect), compact(cell.value)]
        if cell.low is not None:
            numbers.append(f"{words.percent_exactly(cell.low)} … {words.percent_exactly(cell.high)}")
        style = "for" if cell.effect > 0 else "against"
        column = words.column_text(cell.column)
        table.add_row(Text(cell.row, "title"), Text(column), Text(numbers[0], style), *(Text(n) for n in numbers[1:]))
    return table
