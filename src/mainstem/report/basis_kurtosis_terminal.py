"""The kurtosis section of the basis report for the terminal: the stream block by block, with bars."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_kurtosis_text import CAPTION, TITLE, summary
from mainstem.report.text import bar, plain
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow

BAR = 24


def print_kurtosis(console: Console, section: KurtosisSection) -> None:
    """Prints the states of the stream, and what sublayers read."""
    console.print(t.heading(TITLE, CAPTION))
    for kind, title in (("stream", "the stream after"), ("input", "what is read by")):
        rows = [row for row in section.points if row.kind == kind]
        if rows:
            console.print(_table(rows, title), Text(), sep="\n")
    console.print(Text(summary(section), "quiet"))


def _table(rows: list[PointRow], title: str) -> Table:
    table = t.lined()
    table.add_column(title, no_wrap=True)
    for name in ("kurtosis", "", "without first", "rotated", "of neurons"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    full = max(row.kurtosis for row in rows)
    for row in rows:
        table.add_row(
            Text(row.name.removesuffix(".input"), "title"),
            Text(plain(row.kurtosis)),
            Text(bar(row.kurtosis, full, BAR), "for"),
            Text(plain(row.without_first)),
            Text(plain(row.rotated), "quiet"),
            Text(plain(row.neuron_kurtosis)),
        )
    return table
