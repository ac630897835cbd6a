"""Dimensions taken out, for the terminal."""

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_ablations_text import CAPTION, TITLE, chosen, found, tables
from mainstem.report.experiment_terminal import experiment_table
from mainstem.results.basis_ablations import AblationSection


def print_ablations(console: Console, section: AblationSection) -> None:
    """Prints which dimensions, what that comes to, and the tables."""
    console.print(t.heading(TITLE, CAPTION))
    console.print(t.labelled("taken", Text(chosen(section))))
    console.print(t.labelled("found", Text(found(section), "title")))
    for table in tables(section):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
