"""The logit lens for the terminal: after each sublayer the likeliest tokens, and the course of the chosen ones."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.text import (
    KINDS,
    NORMS,
    compact,
    count,
    plain,
    probability,
    scientific,
    shortened,
    signed,
    visible,
)
from mainstem.report.unit_text import null_sentence
from mainstem.results.description import CourseRow, LensReading, StateRow
from mainstem.results.unit import UnitReading

TOP_WIDTH = 17
COURSE_WIDTH = 43
UNIT_WIDTH = 12


def print_lens(console: Console, reading: LensReading) -> None:
    """Prints a reading of the lens, as wide as the console is."""
    console.print(*t.title_rows("lens", reading.model, reading.provenance), sep="\n")
    console.print(t.prompt_row(reading.prompt, reading.position, "the stream is read"))
    names = Text("  ").join(t.token_text(token.token) for token in reading.tokens)
    console.print(t.labelled("tokens", names))
    console.print(t.heading("Certificate"), _certificate(reading), sep="\n")
    for part in _tables(reading, console.width):
        console.print(part)
    for unit in reading.units:
        console.print(*_unit(unit), sep="\n")
    for part in t.notices(reading.warnings, reading.notes):
        console.print(part)
    console.print(t.provenance_line(reading.provenance))


def _unit(unit: UnitReading) -> list[RenderableType]:
    """One unit: tokens beside the null, and what it does to the followed tokens."""
    source = "" if unit.source is None else f", reading {visible(unit.source)}"
    caption = (
        f"{KINDS.get(unit.kind, unit.kind)}{source}; coefficient {compact(unit.coefficient)}, its sign in the logits; "
        f"norm {compact(unit.size)}; logits centred, frozen norm"
    )
    table = t.lined()
    for name in ("promotes", "suppresses"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=20)
        table.add_column("logit", justify="right", no_wrap=True)
    for up, down in zip(unit.promotes, unit.suppresses, strict=True):
        table.add_row(visible(up.token), signed(up.logit), visible(down.token), signed(down.logit))
    lines = [Text(null_sentence(unit), "quiet")]
    for s in unit.sigmoids:
        lines.append(
            Text.assemble(
                (visible(s.token), "title"),
                f": p {probability(s.before)} without it, {probability(s.probability)} with it",
                (f" (by its own value {plain(s.value)} alone {probability(s.alone)})", "quiet"),
            )
        )
    return [t.heading(unit.unit, caption), table, *lines]


def _certificate(reading: LensReading) -> Table:
    c, table = reading.certificate, t.checks_table()
    text = Text.assemble(
        f"{count(c.parts)} parts add up to the stream",
        (f": error {scientific(c.relative_error)}, tolerance {scientific(c.tolerance)}; the last state's ", "quiet"),
        (f"log-probabilities differ from the model's own by at most {scientific(c.last_state)}", "quiet"),
    )
    t.check_row(table, "sum", c.holds, text)
    return table


def _tables(reading: LensReading, width: int) -> list[RenderableType]:
    """Everything side by side where there is room; else the chosen tokens in tables of their own."""
    caption = (
        f"after each sublayer, under the {NORMS.get(reading.norm, reading.norm)}; before softmax: under the "
        "frozen norm, where sublayers' values add up"
    )
    one = width - UNIT_WIDTH - COURSE_WIDTH * len(reading.tokens)
    if one >= 2 * TOP_WIDTH:
        return [t.heading("Lens", caption), _table(reading, range(len(reading.tokens)), one // TOP_WIDTH)]
    parts = [t.heading("Likeliest tokens", caption), _table(reading, (), (width - UNIT_WIDTH) // TOP_WIDTH)]
    fit = max((width - UNIT_WIDTH) // COURSE_WIDTH, 1)
    for start in range(0, len(reading.tokens), fit):
        chosen = range(start, min(start + fit, len(reading.tokens)))
        names = ", ".join(visible(reading.tokens[i].token) for i in chosen)
        parts += [t.heading(f"Course of {names}"), _table(reading, chosen, 0)]
    return parts


def _table(reading: LensReading, chosen: Sequence[int], likeliest: int) -> Table:
    table = t.lined()
    table.add_column("after", no_wrap=True)
    for i in chosen:
        name = shortened(visible(reading.tokens[i].token), 12)
        table.add_column(Text(f"{name}\nbef. softmax"), justify="right", no_wrap=True)
        for what in ("logit", "log p", "p", "rank"):
            table.add_column(Text(f"\n{what}"), justify="right", no_wrap=True)
    shown = min(likeliest, max((len(state.top) for state in reading.states), default=0))
    for place in range(shown):
        above = "\n" if chosen else ""
        table.add_column(above + ("likeliest" if place == 0 else ""), no_wrap=True, overflow="ellipsis", max_width=11)
        table.add_column(above + ("p" if place == 0 else ""), justify="right", no_wrap=True)
    for state in reading.states:
        table.add_row(*_cells(state, [state.course[i] for i in chosen], shown))
    return table


def _cells(state: StateRow, course: Sequence[CourseRow], shown: int) -> list[Text]:
    cells = [Text(state.unit)]
    for row in course:
        style = "title" if row.rank == 1 else ""
        cells += [Text(plain(row.before_softmax)), Text(plain(row.logit))]
        cells += [Text(plain(row.log_probability)), Text(probability(row.probability), style)]
        cells.append(Text(count(row.rank), style))
    for token in state.top[:shown]:
        style = "title" if token.probability >= 0.5 else "" if token.probability >= 0.1 else "quiet"
        cells += [Text(visible(token.token), style), Text(probability(token.probability), style)]
    return cells
