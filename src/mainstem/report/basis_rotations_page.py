"""A rotated model beside itself, as a page: kurtosis along the stream before and after, then the tables."""

import math

from mainstem.report import page as p
from mainstem.report.basis_rotations_text import TITLE, summary, tables
from mainstem.report.curves import Course, courses
from mainstem.report.experiment_page import experiment_table
from mainstem.report.text import plain
from mainstem.results.basis_rotations import RotationSection


def rotations_section(section: RotationSection) -> str:
    """The sections of the page."""
    sentences = "".join(f"<li>{p.esc(sentence)}</li>" for sentence in summary(section))
    made = "".join(experiment_table(table) for table in tables(section) if table.rows)
    return p.section(TITLE, "", f"<ul>{sentences}</ul>", _course(section)) + made


def _course(section: RotationSection) -> str:
    rows = [row for row in section.points if row.kind == "stream"]
    if len(rows) < 2:
        return ""
    lines = [
        Course(name, [math.log10(n) if n > 0 else math.nan for n in numbers], plain(numbers[-1]))
        for name, numbers in (("before", [r.kurtosis for r in rows]), ("rotated", [r.rotated for r in rows]))
    ]
    return courses([row.name for row in rows], lines, "kurtosis of the stream, as a power of ten")
