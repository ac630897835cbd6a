"""Circuits of a head for the terminal: copying, skip trigrams, and the strongest entries of both tables."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.circuits_text import COLUMNS, TITLES, asked_text, copying_text, named, shown, table_text
from mainstem.report.text import plain, visible
from mainstem.results.circuits import CircuitReading


def print_circuits(console: Console, reading: CircuitReading) -> None:
    """Prints the circuits of a head, as wide as the console is."""
    r = reading
    console.print(*t.title_rows("circuits", r.model, r.provenance), sep="\n")
    console.print(t.labelled("head", Text(r.head, "title")))
    console.print(t.labelled("tables", Text(shown(r), "quiet")))
    console.print(t.labelled("copying", Text(copying_text(r))))
    if r.asked is not None:
        console.print(t.labelled("asked", Text(asked_text(r.asked))))
    console.print(t.labelled("weights", t.check_text(r.factors, "sides rebuilt")))
    console.print(t.heading("Skip trigrams", "[source] ... [destination] -> [out]; every destination with every out"))
    console.print(_trigrams(r))
    for name, table in (("qk", r.qk), ("ov", r.ov)):
        console.print(t.heading(f"{TITLES[name][0]}: {TITLES[name][1]}", table_text(table)))
        console.print(_entries(r, name))
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def _trigrams(r: CircuitReading) -> Table:
    table = t.lined()
    table.add_column("source", no_wrap=True)
    table.add_column("destinations", overflow="fold")
    table.add_column("outs", overflow="fold")
    for row in r.trigrams:
        table.add_row(Text(visible(row.source), "token"), Text(named(row.destinations)), Text(named(row.outs)))
    return table


def _entries(r: CircuitReading, name: str) -> Table:
    table = t.lined()
    for column in COLUMNS[name]:
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("ratio", justify="right", no_wrap=True)
    for row in r.entries:
        if row.circuit == name:
            cells = [Text(visible(token), "token") for token in (row.source, row.token)]
            table.add_row(*cells, Text(plain(row.ratio)))
    return table
