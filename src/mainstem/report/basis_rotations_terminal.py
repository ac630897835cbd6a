"""A rotated model beside itself, for the terminal."""

from rich.console import Console
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_rotations_text import TITLE, summary, tables
from mainstem.report.experiment_terminal import experiment_table
from mainstem.results.basis_rotations import RotationSection


def print_rotations(console: Console, section: RotationSection) -> None:
    """Prints what was rotated, losses in each precision, and kurtosis before and after."""
    console.print(t.heading(TITLE, ""))
    for sentence in summary(section):
        console.print(Text(sentence))
    for table in tables(section):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
