"""A subspace reading for the terminal: the verdict, then numbers and rows."""

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.experiment_terminal import experiment_table
from mainstem.report.subspace_text import tables
from mainstem.report.text import visible_or
from mainstem.results.subspace import SubspaceReading


def print_subspace(console: Console, r: SubspaceReading) -> None:
    """Prints a reading, as wide as the console is."""
    console.print(*t.title_rows("subspace", r.model, r.provenance), sep="\n")
    console.print(t.labelled(r.subject, Text(visible_or(r.title))))
    console.print(t.labelled("verdict", Text(r.verdict, "title")))
    for table in tables(r):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))
