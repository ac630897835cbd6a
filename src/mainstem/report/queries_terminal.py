"""The queries of an explanation for the terminal: for each value unit its account and the units that activate it."""

from rich.console import RenderableType
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.queries_text import CAPTION, account
from mainstem.report.text import compact, signed
from mainstem.results.explanation import Explanation, QueryRow

WIDE = 118


def queries(e: Explanation, width: int) -> list[RenderableType]:
    """The section; nothing where no queries were asked for."""
    if not e.query_sums and not e.query_refusals:
        return []
    parts: list[RenderableType] = [t.heading("Queries", CAPTION)]
    for sums in e.query_sums:
        parts.append(Text.assemble((sums["of"], "title"), "  ", (account(sums), "quiet")))
        parts.append(_table([row for row in e.queries if row.of == sums["of"]], width >= WIDE))
    parts += [Text(f"{refused['unit']}: {refused['reason']}", "quiet") for refused in e.query_refusals]
    return parts


def _table(rows: list[QueryRow], wide: bool) -> RenderableType:
    through = next((row.through for row in rows if row.through is not None), None)
    reads_as = "▲ promotes" if through is None else f"▲ promotes, through {through}"
    table = t.lined(expand=True)
    table.add_column("query", no_wrap=True, min_width=10)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("coef.", justify="right", no_wrap=True)
    table.add_column(reads_as, no_wrap=True, overflow="ellipsis", ratio=1)
    if wide:
        table.add_column("▼ suppresses", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        name = Text(row.unit)
        if row.source is not None:
            name.append(" ← ", "quiet").append(t.token_text(row.source, "quiet", 12))
        cells = [name, Text(signed(row.share)), Text(compact(row.coefficient)), t.token_list(row.promotes)]
        table.add_row(*cells, *([t.token_list(row.suppresses)] if wide else []))
    return table
