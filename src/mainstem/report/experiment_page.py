"""An experiment as a page: claims with their findings first, then figures and tables."""

from mainstem.experiments.outcome import Claim, Curves, Experiment, ExperimentTable, Figure
from mainstem.report import page as p
from mainstem.report.charts import interval_bars
from mainstem.report.experiment_text import MARKS, cell_text, is_number
from mainstem.report.line_chart import line_chart
from mainstem.report.text import visible_or


def experiment_page(e: Experiment) -> str:
    """The page of an experiment."""
    return p.page(f"{visible_or(e.title)}, {e.model['name']}", experiment_parts(e, "h1"), e.provenance, e.as_dict())


def experiment_parts(e: Experiment, heading: str) -> list[str]:
    """What stands in a page: the title as a heading of that kind, claims, figures, tables, notes."""
    return [
        p.model_line(f"reproduce {e.name}", e.model, e.provenance),
        f"<{heading}>{words(e.title)}</{heading}>",
        f"<p>{words(e.question)}</p>",
        p.section("Claims", "what was published, what was measured here, and what chance does", _claims(e.claims)),
        *(_figure(figure) for figure in e.figures),
        *(experiment_table(table) for table in e.tables if table.rows),
        p.notices(e.warnings, e.notes),
    ]


def words(text: str) -> str:
    """Mainstem's own words with what a token in them may have brought along, for a page."""
    return p.esc(visible_or(text))


def finding_cell(claim: Claim) -> str:
    """A finding with its sign, in the colour of its kind."""
    css = {"reproduced": "pos", "in part": "", "not reproduced": "neg", "measured": "quiet"}[claim.finding]
    return p.cell(f'<strong class="{css}">{MARKS[claim.finding]} {claim.finding}</strong>', "finding")


def _claims(claims: list[Claim]) -> str:
    heads = [("claim", ""), ("finding", ""), ("published", ""), ("measured", ""), ("null", "")]
    rows = []
    for claim in claims:
        published = f'{words(claim.published)}<br><span class="quiet">{words(claim.source)}</span>'
        cells = [p.cell(words(claim.claim)), finding_cell(claim), p.cell(published), p.cell(words(claim.measured))]
        rows.append(p.row(*cells, p.cell(words(claim.null), "quiet")))
    return p.table(heads, rows, "prose")


def _figure(figure: Figure | Curves) -> str:
    if isinstance(figure, Curves):
        return p.section(visible_or(figure.title), words(figure.caption), line_chart(figure))
    bars = [(label, bar.mean, bar.low, bar.high) for label, bar in zip(figure.labels, figure.bars, strict=True)]
    return p.section(visible_or(figure.title), words(figure.caption), interval_bars(bars, figure.title))


def experiment_table(table: ExperimentTable) -> str:
    """A section with the rows under their heads."""
    numeric = [all(is_number(row[i]) for row in table.rows) for i in range(len(table.heads))]
    heads = [(words(head), "num" if number else "") for head, number in zip(table.heads, numeric, strict=True)]
    rows = [
        p.row(*(p.cell(p.esc(cell_text(v)), "num" if n else "") for v, n in zip(row, numeric, strict=True)))
        for row in table.rows
    ]
    return p.section(visible_or(table.title), words(table.caption), p.table(heads, rows))
