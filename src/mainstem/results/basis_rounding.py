"""A section of the basis report as plain data: what rounding takes from what is added to the stream."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mainstem.results.reading import numbers


@dataclass(frozen=True)
class AdditionRow:
    """One sum in a dtype.

    Attributes:
        dtype: such as "float32".
        large, small: what is added.
        total: what comes out; None where it overflows.
        lost: whether adding the small number changed nothing.
        spacing: the distance between neighbouring numbers at the large one; None where it overflows.
    """

    dtype: str
    large: float
    small: float
    total: float | None
    lost: bool
    spacing: float | None


@dataclass(frozen=True)
class DtypeRow:
    """The whole stream added up in a dtype, means over positions but the first; None where it overflows.

    Attributes:
        lost: of each write relative to its norm, a mean over writes.
        vanished: the share of the writes' coordinates whose addition changed nothing.
        error: of the last state, relative to its norm; `error_first`: at the first position.
        largest: the largest magnitude of any coordinate on the way, exactly.
        overflow: the unit whose write leaves the dtype's range; None: none does.
    """

    dtype: str
    lost: float | None
    vanished: float | None
    error: float | None
    error_first: float | None
    largest: float
    overflow: str | None


@dataclass(frozen=True)
class WriteRow:
    """One write added in a dtype: means over positions but the first, and the first position's.

    Attributes:
        unit: who wrote; size: the norm of the write over that of the stream it is added to.
        lost, lost_first: what did not arrive, relative to the write's norm.
        vanished: the share of its coordinates whose addition changed nothing.
        error, error_first: of the state after it against the exact sum, relative.
    """

    dtype: str
    unit: str
    size: float
    lost: float
    lost_first: float
    vanished: float
    error: float
    error_first: float


@dataclass(frozen=True)
class RoundingSection:
    """What rounding takes.

    Attributes:
        tokens: how long the prompt is.
        additions: the demonstration on two numbers.
        dtypes: the stream in each dtype; writes: each write in each.
        plain_sum: whether the stream is a plain sum of what is written; else changes of the stream stand for writes.
    """

    tokens: int
    additions: list[AdditionRow]
    dtypes: list[DtypeRow]
    writes: list[WriteRow]
    plain_sum: bool

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of its tables."""
        for row in (*self.dtypes, *self.writes):
            place = row.dtype if isinstance(row, DtypeRow) else f"{row.unit} in {row.dtype}"
            yield from numbers(place, row)
