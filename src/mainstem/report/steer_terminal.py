"""A comparison for the terminal: both texts side by side, what differs marked, and continuations before and after."""

import math

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.steer_text import choosing, divergence, ending, how_written, mean_text, ratio_text
from mainstem.report.text import probability, shortened, signed, visible, visible_or
from mainstem.results.generation import Compared, Generated

NARROW = 60
"""Below so many columns the two texts stand one above the other."""


def print_comparison(console: Console, compared: Compared) -> None:
    """Prints a comparison, as wide as the console is."""
    c = compared
    console.print(*t.title_rows("steer", c.model, c.provenance), sep="\n")
    console.print(t.labelled("prompt", t.prompt_tokens(c.prompt["tokens"], len(c.prompt["tokens"]) - 1)))
    for i, edit in enumerate(c.edits):
        console.print(t.labelled("edits" if i == 0 else "", Text(visible_or(edit))))
    if not c.edits:
        console.print(t.labelled("edits", Text("none", "quiet")))
    console.print(t.heading("What it writes", f"{choosing(c)}; nats"), _texts(c, console.width), sep="\n")
    console.print(Text(divergence(c), "quiet"))
    if c.continuations:
        console.print(
            t.heading("Continuations", "p of the whole text right after the prompt"), _likelihoods(c), sep="\n"
        )
    for part in t.notices(c.warnings, c.notes):
        console.print(part)
    console.print(t.provenance_line(c.provenance))


def _texts(c: Compared, width: int) -> RenderableType:
    """Without and with, beside each other where there is room."""
    sides = [("without", c.plain, ""), ("with the edits", c.edited, "against")]
    if width < NARROW:
        table = t.grid({})
        for name, made, style in sides:
            table.add_row(Text(name, "title"))
            table.add_row(_written(made, c.same, style))
            table.add_row(_about(made))
            table.add_row()
        return table
    table = t.lined(expand=True)
    for name, _, _ in sides:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(_written(made, c.same, style) for _, made, style in sides))
    table.add_row()
    table.add_row(*(_about(made) for _, made, _ in sides))
    return table


def _written(made: Generated, same: int, style: str) -> Text:
    """A text with spaces as they are; from the first difference on in bold."""
    line = Text()
    for i, token in enumerate(made.tokens):
        line.append(visible_or(token), f"bold {style}".strip() if i >= same else "")
    return line


def _about(made: Generated) -> Text:
    return Text(f"{ending(made)}; {mean_text(made)}\n{how_written(made)}", "quiet")


def _likelihoods(c: Compared) -> Table:
    table = t.lined()
    table.add_column("text", overflow="fold")
    for name in ("p without", "p with", "ratio", "nats"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in c.continuations:
        style = "for" if row.edited > row.plain else "against"
        table.add_row(
            Text(shortened(visible(row.text), 60), "token"),
            Text(probability(math.exp(row.plain))),
            Text(probability(math.exp(row.edited))),
            Text(ratio_text(row), style),
            Text(signed(row.edited - row.plain), style),
        )
    return table
