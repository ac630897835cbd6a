"""Compositions for the terminal: each kind as a whole, then its strongest pairs."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.composition_text import (
    PAIR_COLUMNS,
    certificate_text,
    judged,
    kind_text,
    pair_cells,
    shared_text,
    title,
    what_is_shown,
)
from mainstem.results.composition import CompositionReading


def print_composition(console: Console, reading: CompositionReading) -> None:
    """Prints compositions, as wide as the console is."""
    r = reading
    console.print(*t.title_rows("circuits", r.model, r.provenance), sep="\n")
    console.print(t.labelled("shown", Text(what_is_shown(r))))
    console.print(t.labelled("judged", Text(judged(r), "quiet")))
    console.print(t.labelled("checked", Text(certificate_text(r), "quiet")))
    for row in r.kinds:
        console.print(t.heading(title(row, r), f"{kind_text(row, r)}. {shared_text(r, row.kind)}"))
        console.print(_pairs(r, row.kind))
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def _pairs(r: CompositionReading, kind: str) -> Table:
    table = t.lined()
    for i, name in enumerate(PAIR_COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for row in r.pairs:
        if row.kind == kind:
            style = "for" if row.q <= r.rate else ""
            table.add_row(*(Text(cell, style if i == 4 else "") for i, cell in enumerate(pair_cells(row))))
    return table
