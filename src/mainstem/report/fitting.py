"""A table as wide as the terminal: no word or number is broken, and columns without room come in a table below.

Rich folds words where columns are too narrow, so that −0.042 becomes −0.0 over 42. Here cells wrap between words only;
where not even that leaves room for all columns, the first ones, which name the row, are repeated in a further table.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BETWEEN, EDGES = 2, 2
"""Spaces between two columns of `terminal.lined`, and at both ends together."""

_NUMBER = re.compile(r"[\d\s.,:%+–−±×∞e-]*")


@dataclass(frozen=True)
class Fitting:
    """A table that Rich can print.

    Attributes:
        heads: of the columns.
        rows: cells as text.
        right: which columns are set to the right.
        made: gives an empty table.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool]
    made: Callable[[], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The tables, from the top."""
        for columns in self._pieces(options.max_width):
            yield self._piece(columns, options.max_width)

    def _cells(self, column: int) -> list[str]:
        return [self.heads[column], *(row[column] for row in self.rows)]

    def _least(self, column: int, width: int) -> int:
        """As narrow as a column can be without breaking a word; one of absurd length is broken all the same."""
        words = [word for cell in self._cells(column) for word in re.split("[ \n]", cell)]
        return min(max(map(cell_len, words)), width // 2)

    def _names(self) -> int:
        """How many columns at the beginning say what a row is: those before the first one of numbers."""
        for column in range(1, len(self.heads)):
            if all(_NUMBER.fullmatch(cell) for cell in self._cells(column)[1:]):
                return column
        return 1

    def _pieces(self, width: int) -> Iterator[list[int]]:
        """Which columns each table has."""
        least = [self._least(column, width) for column in range(len(self.heads))]
        names = list(range(self._names()))
        piece = list(names)
        for column in range(len(names), len(least)):
            if piece != names and _total([least[i] for i in (*piece, column)]) > width:
                yield piece
                piece = list(names)
            piece.append(column)
        yield piece

    def _piece(self, columns: list[int], width: int) -> Table:
        table = self.made()
        for column, wide in zip(columns, self._widths(columns, width), strict=True):
            table.add_column(
                self.heads[column], justify="right" if self.right[column] else "left", overflow="fold", width=wide
            )
        for row in self.rows:
            table.add_row(*(Text(row[column]) for column in columns))
        return table

    def _widths(self, columns: list[int], width: int) -> list[int]:
        """Each as wide as its longest cell, or, where there is no room for that, the widest ones narrower."""
        widths = [max(cell_len(cell) for cell in self._cells(column)) for column in columns]
        least = [self._least(column, width) for column in columns]
        while _total(widths) > width:
            slack = [i for i, (wide, narrow) in enumerate(zip(widths, least, strict=True)) if wide > narrow]
            if not slack:
                break
            widths[max(slack, key=lambda i: widths[i])] -= 1
        return widths


def _total(widths: Sequence[int]) -> int:
    return EDGES + sum(widths) + BETWEEN * (len(widths) - 1)
