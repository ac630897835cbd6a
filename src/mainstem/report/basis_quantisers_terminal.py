"""What quantisers do, for the terminal."""

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_quantisers_text import TITLE, caption, found, tables
from mainstem.report.experiment_terminal import experiment_table
from mainstem.results.basis_quantisers import QuantiserSection


def print_quantisers(console: Console, section: QuantiserSection) -> None:
    """Prints what is quantised, what that comes to, and the tables."""
    console.print(t.heading(TITLE, caption(section)))
    console.print(t.labelled("found", Text(found(section), "title")))
    for table in tables(section):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
