"""What rounding takes, as a page: the course of what is lost along the stream, then the tables."""

import math

from mainstem.report import page as p
from mainstem.report.basis_rounding_text import caption, tables
from mainstem.report.curves import Course, courses
from mainstem.report.experiment_page import experiment_table
from mainstem.report.text import scientific
from mainstem.results.basis_rounding import RoundingSection


def rounding_section(section: RoundingSection) -> str:
    """The sections of the page."""
    return _course(section) + "".join(experiment_table(table) for table in tables(section) if table.rows)


def _course(section: RoundingSection) -> str:
    by_dtype = {row.dtype: [own for own in section.writes if own.dtype == row.dtype] for row in section.dtypes}
    names = max(([own.unit for own in rows] for rows in by_dtype.values()), key=len, default=[])
    if len(names) < 2:
        return ""
    lines = [
        Course(dtype, [math.log10(own.lost) if own.lost > 0 else math.nan for own in rows], scientific(rows[-1].lost))
        for dtype, rows in by_dtype.items()
        if len(rows) == len(names)
    ]
    drawn = courses(names, lines, "the share of each write that is lost, as a power of ten")
    return p.section("Lost of each write", p.esc(f"powers of ten; {caption(section)}"), drawn)
