"""The kurtosis section of the basis report as a page: courses along the stream, then the table."""

from mainstem.report import page as p
from mainstem.report.basis_kurtosis_text import CAPTION, TITLE, summary
from mainstem.report.text import plain
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow


def kurtosis_section(section: KurtosisSection) -> str:
    """The section."""
    return p.section(TITLE, p.esc(CAPTION), _table(section.points), f'<p class="caption">{p.esc(summary(section))}</p>')


def _table(rows: list[PointRow]) -> str:
    heads = [("place", ""), ("kurtosis", "num"), ("without first", "num"), ("rotated", "num"), ("of neurons", "num")]
    return p.table(heads, [_row(row) for row in rows], "sortable")


def _row(row: PointRow) -> str:
    numbers = (row.kurtosis, row.without_first, row.rotated, row.neuron_kurtosis)
    return p.row(p.cell(p.esc(row.name), "unit"), *(p.cell(p.esc(plain(n)), "num", n) for n in numbers))
