"""A subspace reading as a page: the verdict, its figures, numbers and rows."""

from mainstem.report import page as p
from mainstem.report.charts import interval_bars
from mainstem.report.experiment_page import experiment_table
from mainstem.report.heatmap import heatmap
from mainstem.report.subspace_text import full, number, tables
from mainstem.results.subspace import Map, SubspaceReading


def subspace_page(r: SubspaceReading) -> str:
    """The page of a reading."""
    body = [
        p.model_line("subspace", r.model, r.provenance),
        f"<h1>{p.esc(r.title)}</h1>",
        f"<p>Verdict: <strong>{p.esc(r.verdict)}</strong></p>",
        _bars(r),
        *(_map(one) for one in r.maps),
        *(experiment_table(table) for table in tables(r) if table.rows),
        p.notices(r.warnings, r.notes),
    ]
    return p.page(f"{r.title}, {r.model['name']}", body, r.provenance, r.as_dict())


def _bars(r: SubspaceReading) -> str:
    rows = [(bar.name, bar.mean, bar.low, bar.high) for bar in r.bars]
    return p.section("Beside chance", p.esc(r.bars_unit), interval_bars(rows, r.title)) if rows else ""


def _map(one: Map) -> str:
    def title(i: int, j: int) -> str:
        return f"{one.rows[i]}, {one.columns[j]}: {number(one.values[i][j])}"

    drawn = heatmap(one.rows, one.columns, one.values, full(one.values), number, title, one.title)
    return p.section(one.title, p.esc(one.caption), drawn)
