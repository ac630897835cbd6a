"""Heads by a skip trigram for the terminal."""

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.trigram_text import COLUMNS, asked, cells, found_text, judged
from mainstem.results.trigram import TrigramReading


def print_trigram(console: Console, reading: TrigramReading) -> None:
    """Prints the heads, as wide as the console is."""
    r = reading
    console.print(*t.title_rows("circuits", r.model, r.provenance), sep="\n")
    console.print(t.labelled("asked", Text(asked(r), "title")))
    console.print(t.labelled("found", Text(found_text(r))))
    console.print(t.labelled("judged", Text(judged(r), "quiet")))
    console.print(t.labelled("weights", t.check_text(r.factors, "sides rebuilt")))
    table = t.lined()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("head", "weakest") else "right", no_wrap=True)
    for row in r.heads[: r.top]:
        table.add_row(
            *(Text(cell, "for" if row.head in r.found and i == 0 else "") for i, cell in enumerate(cells(row)))
        )
    console.print(t.heading("Heads", "by the product of both ratios"))
    console.print(table)
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))
