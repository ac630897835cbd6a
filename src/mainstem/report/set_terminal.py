"""A command on many prompts for the terminal: means with intervals, then each prompt in a line."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import set_text as words
from mainstem.report import terminal as t
from mainstem.report.text import shortened, visible, visible_or
from mainstem.results.prompt_set import MeanRow, PromptSetReading

MOST_PROMPTS = 40


def print_prompt_set(console: Console, reading: PromptSetReading) -> None:
    """Prints what many prompts say together."""
    r = reading
    console.print(*t.title_rows(r.of, r.model, r.provenance), sep="\n")
    console.print(t.labelled("prompts", Text(words.counted_text(r))))
    console.print(t.labelled("options", Text(words.options_text(r))))
    caption = "means over prompts, intervals of 95 % by the bootstrap"
    console.print(t.heading(words.TITLES[r.of], caption), _means(r, r.rows), sep="\n")
    for line in (words.elsewhere_text(r), words.stability_text(r)):
        if line:
            console.print(Text(line, "quiet"))
    if r.outcomes:
        console.print(t.heading("The answers", words.verdicts_text(r)), _means(r, r.outcomes), sep="\n")
    console.print(t.heading("Prompts", "the last tokens of each, its answers, its own numbers"), _prompts(r), sep="\n")
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def _means(r: PromptSetReading, rows: Sequence[MeanRow]) -> Table:
    shown = list(rows[: words.MOST_ROWS])
    left_out = Text(f"the first {words.MOST_ROWS} of {len(rows)} rows") if len(rows) > words.MOST_ROWS else None
    table, units = t.lined(left_out), any(row.listed is not None for row in shown)
    table.add_column("", overflow="fold")
    for name in words.quantities(shown):
        table.add_column(words.quantity_text(name), justify="right", overflow="fold")
        table.add_column("95 %", justify="right", no_wrap=True)
    for name in ("in the top", "sources") if units else ():
        table.add_column(name, justify="right", overflow="fold")
    for row in shown:
        cells = [Text(shortened(visible_or(row.name), 40), "title")]
        for name in words.quantities(shown):
            mean = row.means.get(name)
            cells += [Text(words.mean_text(mean)), Text(words.interval_text(mean), "quiet")]
        if units:
            cells += [Text(words.listed_text(row, r)), Text(words.sources_text(row), "quiet")]
        table.add_row(*cells)
    return table


def _prompts(r: PromptSetReading) -> Table:
    left_out = Text(f"the first {MOST_PROMPTS} of {len(r.prompts)}") if len(r.prompts) > MOST_PROMPTS else None
    table = t.lined(left_out)
    for name in ("prompt", "tokens", "answers", "found"):
        table.add_column(name, overflow="fold")
    for row in r.prompts[:MOST_PROMPTS]:
        tokens = ("… " if len(row.tokens) > 6 else "") + " ".join(visible(token) for token in row.tokens[-6:])
        style = "fail" if row.failed is not None else "quiet"
        table.add_row(
            Text(visible_or(row.where), "quiet"),
            Text(tokens),
            Text(words.answers_text(row), "token"),
            Text(words.own_text(row), style),
        )
    return table
