"""The kurtosis section of the basis report for the terminal: the stream block by block, and what its sublayers read."""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.basis_kurtosis_text import CAPTION, TITLE, inputs, stream, summary, verdict
from mainstem.report.text import bar, compact
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow

BAR = 20


def print_kurtosis(console: Console, section: KurtosisSection) -> None:
    """Prints the stream after each block, beside what the block's sublayers read."""
    console.print(t.heading(TITLE, CAPTION))
    console.print(t.labelled("found", Text(verdict(section), "title")))
    console.print(Text(), _table(section), Text(summary(section), "quiet"), sep="\n")


def _table(section: KurtosisSection) -> Table:
    """A row for each block: the last state that it leaves, and the kurtosis of each of its inputs."""
    states = [list(rows)[-1] for _, rows in groupby(stream(section), key=lambda row: row.layer)]
    read: dict[int | None, list[PointRow]] = {}
    for row in inputs(section):
        read.setdefault(row.layer, []).append(row)
    table = t.lined()
    table.add_column("after", no_wrap=True)
    for name in ("kurtosis", "", "no first", "rotated", "neurons", "max/med."):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("inputs", no_wrap=True)
    full = max(row.kurtosis for row in states)
    for row in states:
        table.add_row(
            Text(row.name, "title"),
            Text(compact(row.kurtosis)),
            Text(bar(row.kurtosis, full, BAR), "for"),
            Text(compact(row.without_first)),
            Text(compact(row.rotated), "quiet"),
            Text(compact(row.neuron_kurtosis)),
            Text(compact(row.max_over_median)),
            Text("  ".join(compact(one.kurtosis) for one in read.get(row.layer, ())), "quiet"),
        )
    return table
