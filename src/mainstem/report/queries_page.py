"""The queries of an explanation as a section of its page."""

from mainstem.report import page as p
from mainstem.report.queries_text import CAPTION, account
from mainstem.report.text import KINDS, compact, signed
from mainstem.results.explanation import Explanation, QueryRow


def queries(e: Explanation) -> str:
    """The section; nothing where no queries were asked for."""
    if not e.query_sums and not e.query_refusals:
        return ""
    heads = [("query", ""), ("kind", ""), ("source", ""), ("share", "num"), ("coefficient", "num")]
    parts = []
    for sums in e.query_sums:
        rows = [row for row in e.queries if row.of == sums["of"]]
        through = next((row.through for row in rows if row.through is not None), None)
        way = "promotes" if through is None else f"promotes, through {through}"
        parts.append(f'<h3>{p.esc(sums["of"])}</h3><p class="quiet">{p.esc(account(sums))}.</p>')
        parts.append(p.table([*heads, (way, ""), ("suppresses", "")], [_row(row) for row in rows], "sortable"))
    parts += [f'<p class="quiet">{p.esc(one["unit"])}: {p.esc(one["reason"])}.</p>' for one in e.query_refusals]
    return p.section("Queries", p.esc(CAPTION), *parts)


def _row(row: QueryRow) -> str:
    return p.row(
        p.cell(p.esc(row.unit), "unit"),
        p.cell(p.esc(KINDS.get(row.kind, row.kind)), "quiet"),
        p.cell("" if row.source is None else p.token(row.source)),
        p.cell(p.esc(signed(row.share)), f"num {'pos' if row.share >= 0 else 'neg'}", row.share),
        p.cell(p.esc(compact(row.coefficient)), "num", row.coefficient),
        p.cell(p.chips(row.promotes), "tokens"),
        p.cell(p.chips(row.suppresses), "tokens"),
    )
