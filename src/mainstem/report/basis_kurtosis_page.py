"""The kurtosis section of the basis report as a page: what a rotation does, courses along the stream, the table."""

from mainstem.report import page as p
from mainstem.report.basis_kurtosis_text import CAPTION, TITLE, inputs, stream, summary, verdict
from mainstem.report.curves import Course, courses
from mainstem.report.rotation_figure import rotation_figure
from mainstem.report.text import compact, sentence
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow

ROTATION = (
    "the same vector, by its two coordinates: where an axis means something, a vector can lie on it, and one "
    "coordinate is large; after a rotation nothing is lost, but no coordinate stands out. In many dimensions kurtosis "
    "measures this"
)


def kurtosis_section(section: KurtosisSection) -> str:
    """The sections of the page."""
    states, read = stream(section), inputs(section)
    parts = [
        p.section(TITLE, p.esc(CAPTION), f"<p>{p.esc(sentence(verdict(section)))}</p>", _courses(states)),
        p.section("What sublayers read", "kurtosis after the norm of each sublayer", _courses(read)) if read else "",
        p.section("What a rotation does", p.esc(ROTATION), rotation_figure()),
        p.section("All places", p.esc(summary(section)), _details(section.points)),
    ]
    return "".join(parts)


def _courses(rows: list[PointRow]) -> str:
    if len(rows) < 2:
        return ""
    columns = {
        "all": [row.kurtosis for row in rows],
        "no first": [row.without_first for row in rows],
        "rotated": [row.rotated for row in rows],
    }
    lines = [Course(name, values, compact(values[-1])) for name, values in columns.items()]
    return courses([row.name for row in rows], lines, "kurtosis along the stream, as it is and rotated")


def _details(rows: list[PointRow]) -> str:
    return f"<details><summary>all {len(rows)} places</summary>{_table(rows)}</details>"


def _table(rows: list[PointRow]) -> str:
    names = ("kurtosis", "without first", "rotated", "least", "largest", "of neurons", "without first", "max / median",
             "largest value")  # fmt: skip
    return p.table([("place", ""), *((name, "num") for name in names)], [_row(row) for row in rows], "sortable")


def _row(row: PointRow) -> str:
    numbers = (
        row.kurtosis, row.without_first, row.rotated, row.rotated_least, row.rotated_largest, row.neuron_kurtosis,
        row.neuron_kurtosis_without_first, row.max_over_median, row.largest,
    )  # fmt: skip
    return p.row(p.cell(p.esc(row.name), "unit"), *(p.cell(p.esc(compact(n)), "num", n) for n in numbers))
