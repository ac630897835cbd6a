"""Compositions for the terminal: each kind as a whole, then its strongest pairs."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import composition_text as words
from mainstem.report import terminal as t
from mainstem.results.composition import CompositionReading


def print_composition(console: Console, reading: CompositionReading) -> None:
    """Prints compositions, as wide as the console is."""
    r = reading
    console.print(*t.title_rows("circuits", r.model, r.provenance), sep="\n")
    console.print(t.labelled("shown", Text(words.what_is_shown(r))))
    console.print(t.labelled("judged", Text(words.judged(r), "quiet")))
    console.print(t.labelled("checked", Text(words.certificate_text(r), "quiet")))
    for row in r.kinds:
        console.print(t.heading(words.title(row, r), f"{words.kind_text(row, r)}. {words.shared_text(r, row.kind)}"))
        console.print(_pairs(r, row.kind))
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def _pairs(r: CompositionReading, kind: str) -> Table:
    table = t.lined()
    for i, name in enumerate(words.PAIR_COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for row in r.pairs:
        if row.kind == kind:
            style = "for" if row.q <= r.rate else ""
            table.add_row(*(Text(cell, style if i == 4 else "") for i, cell in enumerate(words.pair_cells(row))))
    return table
