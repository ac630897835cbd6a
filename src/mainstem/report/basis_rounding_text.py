"""What rounding takes, in words: what the tables for the terminal and the page both say."""

from mainstem.experiments.outcome import ExperimentTable
from mainstem.report.text import NOTHING, compact, plural, scientific
from mainstem.results.basis_rounding import AdditionRow, DtypeRow, RoundingSection, WriteRow

TITLE = "Rounding of the stream"


def caption(section: RoundingSection) -> str:
    """What was added up."""
    what = "writes" if section.plain_sum else "changes of the stream from state to state, in place of writes"
    return (
        f"the {what} of one run on {plural(section.tokens, 'token')} added up again in each dtype, against the exact "
        "sum; means over positions but the first"
    )


def tables(section: RoundingSection) -> list[ExperimentTable]:
    """All tables, in their order; of writes those in the narrowest dtype that holds the stream."""
    return [
        ExperimentTable("Two numbers", "spacing: between neighbouring numbers at the first one", _ADDITION_HEADS,
                        [_addition(row) for row in section.additions]),
        ExperimentTable(TITLE, caption(section), _DTYPE_HEADS, [_dtype(row) for row in section.dtypes]),
        ExperimentTable("Write by write", _WRITE_CAPTION, _WRITE_HEADS, _writes(section)),
    ]  # fmt: skip


_ADDITION_HEADS = ["dtype", "sum", "gives", "spacing", ""]


def _addition(row: AdditionRow) -> list[str]:
    total = "overflow" if row.total is None else f"{row.total:,.10g}"
    spacing = NOTHING if row.spacing is None else f"{row.spacing:,g}"
    return [row.dtype, f"{row.large:,.10g} + {row.small:g}", total, spacing, "lost" if row.lost else ""]


_DTYPE_HEADS = ["dtype", "lost of a write", "vanished", "error at the end", "first position", "largest", "overflow"]


def _dtype(row: DtypeRow) -> list[str]:
    shares = [share(value) for value in (row.lost, row.vanished, row.error, row.error_first)]
    return [row.dtype, *shares, compact(row.largest), row.overflow or NOTHING]


_WRITE_CAPTION = (
    "size: of the write over the stream that it is added to; lost: of the write’s norm; vanished: the share of its "
    "coordinates whose addition changed nothing"
)
_DTYPES = ("float32", "bfloat16", "float16")
_WRITE_HEADS = ["unit", "size", *(f"lost in {dtype}" for dtype in _DTYPES), *(f"vanished in {d}" for d in _DTYPES[1:])]


def _writes(section: RoundingSection) -> list[list[str]]:
    by_unit: dict[str, dict[str, WriteRow]] = {}
    for row in section.writes:
        by_unit.setdefault(row.unit, {})[row.dtype] = row
    return [_write(unit, rows) for unit, rows in by_unit.items()]


def _write(unit: str, rows: dict[str, WriteRow]) -> list[str]:
    found = [rows.get(dtype) for dtype in _DTYPES]
    lost = [share(row and row.lost) for row in found]
    vanished = [share(row and row.vanished) for row in found[1:]]
    return [unit, share(next(iter(rows.values())).size), *lost, *vanished]


def share(value: float | None) -> str:
    """A share: in percent where it is one in a thousand at least."""
    return NOTHING if value is None else f"{value:.1%}" if value >= 1e-3 else scientific(value)
