"""Outlier features as a page: a map of where each dimension is large, then the tables."""

from mainstem.report import page as p
from mainstem.report.basis_outliers_text import KINDS, TITLE, caption, emergence_table, tables, verdict
from mainstem.report.experiment_page import experiment_table
from mainstem.report.heatmap import heatmap
from mainstem.results.basis_outliers import EmergenceSection, OutlierSection, OutlierTable


def outliers_section(section: OutlierSection) -> str:
    """The sections of the page."""
    drawn = [p.section(TITLE, p.esc(caption(section)), f"<p>{p.esc(verdict(section).capitalize())}.</p>")]
    drawn += [_map(table) for table in section.tables if table.rows and table.kind != "heads"]
    return "".join([*drawn, *(experiment_table(table) for table in tables(section) if table.rows)])


def emergence_section(section: EmergenceSection) -> str:
    """Models by size."""
    return experiment_table(emergence_table(section))


def _map(table: OutlierTable) -> str:
    """Dimensions by places: at what share of the positions each is above the threshold."""
    names = [f"{row.dimension}{' *' * row.qualifies}" for row in table.rows]
    values: list[list[float | None]] = [list(row.by_place) for row in table.rows]

    def said(i: int, j: int) -> str:
        return f"dimension {table.rows[i].dimension} at {table.places[j]}: {values[i][j]:.1%} of positions"

    title = f"Where dimensions are outliers: {KINDS[table.kind]}"
    places = [place.removesuffix(".input") for place in table.places]
    drawn = heatmap(names, places, values, 1.0, lambda x: f"{x or 0.0:.0%}", said, title, least="0%")
    return p.section(title, "the share of the positions of each place; * for a dimension that qualifies", drawn)
