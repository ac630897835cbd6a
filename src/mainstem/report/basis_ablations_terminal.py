"""Dimensions taken out, for the terminal."""

from rich.console import Console
from rich.text import Text

from mainstem.report import basis_ablations_text as words
from mainstem.report import terminal as t
from mainstem.report.experiment_terminal import experiment_table
from mainstem.results.basis_ablations import AblationSection


def print_ablations(console: Console, section: AblationSection) -> None:
    """Prints which dimensions, what that comes to, and the tables."""
    console.print(t.heading(words.TITLE, words.CAPTION))
    console.print(t.labelled("taken", Text(words.chosen(section))))
    console.print(t.labelled("found", Text(words.found(section), "title")))
    for table in words.tables(section):
        if table.rows:
            console.print(t.heading(table.title, table.caption), experiment_table(table), sep="\n")
