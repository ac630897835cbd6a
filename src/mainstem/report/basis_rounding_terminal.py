"""What rounding takes, for the terminal."""

from rich.console import Console

from mainstem.report import terminal as t
from mainstem.report.basis_rounding_text import tables
from mainstem.report.experiment_terminal import experiment_table
from mainstem.results.basis_rounding import RoundingSection


def print_rounding(console: Console, section: RoundingSection) -> None:
    """Prints the demonstration, the stream in each dtype, and each write."""
    for table in tables(section):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
