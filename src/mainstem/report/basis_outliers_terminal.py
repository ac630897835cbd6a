"""Outlier features for the terminal."""

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_outliers_text import TITLE, caption, emergence_table, tables, verdict
from mainstem.report.experiment_terminal import experiment_table
from mainstem.results.basis_outliers import EmergenceSection, OutlierSection


def print_outliers(console: Console, section: OutlierSection) -> None:
    """Prints what the criterion finds, and the tables."""
    console.print(t.heading(TITLE, caption(section)))
    console.print(t.labelled("found", Text(verdict(section), "title")))
    for table in tables(section):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")


def print_emergence(console: Console, section: EmergenceSection) -> None:
    """Prints models by size."""
    table = emergence_table(section)
    console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
