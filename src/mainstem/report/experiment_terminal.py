"""An experiment for the terminal: its tables, then its claims, what was published and what was measured."""

import math
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.experiments.outcome import Claim, Curves, Experiment, ExperimentTable
from mainstem.report import terminal as t
from mainstem.report.experiment_text import MARKS, arms, cell_text, is_number
from mainstem.report.fitting import Fitting
from mainstem.report.text import compact, plural, sparkline, visible_or

STYLES = {"reproduced": "ok", "in part": "warn", "not reproduced": "fail", "measured": "quiet"}


def print_experiment(console: Console, experiment: Experiment) -> None:
    """Prints an experiment, as wide as the console is."""
    e = experiment
    console.print(*t.title_rows(f"reproduce {e.name}", e.model, e.provenance), sep="\n")
    console.print(t.labelled("question", Text(visible_or(e.question))))
    for table in e.tables:
        if table.rows:
            console.print(
                t.heading(visible_or(table.title), visible_or(table.caption)), experiment_table(table), sep="\n"
            )
    for curves in e.figures:
        if isinstance(curves, Curves):
            console.print(
                t.heading(visible_or(curves.title), visible_or(curves.caption)), curve_table(curves), sep="\n"
            )
    console.print(t.heading("Claims", "what was published, what was measured here, and what chance does"))
    for claim in e.claims:
        console.print(*_claim(claim), sep="\n")
    for part in t.notices(e.warnings, e.notes):
        console.print(part)
    console.print(t.provenance_line(e.provenance))


def experiment_table(table: ExperimentTable) -> Fitting:
    """Rows under their heads."""
    right = [all(is_number(row[i]) for row in table.rows) for i in range(len(table.heads))]
    return Fitting(table.heads, [[cell_text(value) for value in row] for row in table.rows], right, t.lined)


def curve_table(curves: Curves) -> Table:
    """Each line small, with its ends and its extremes; of several seeds of an arm the first."""
    made = t.lined()
    made.add_column(curves.y_label, overflow="fold")
    made.add_column(f"over {curves.x_label}", no_wrap=True)
    for head in ("first", "last", "least", "most"):
        made.add_column(visible_or(head), justify="right")
    for arm, names in arms(curves.lines).items():
        values = [y for _, y in curves.lines[names[0]] if math.isfinite(y)]
        if values:
            name = arm if len(names) == 1 else f"{arm} (1 of {plural(len(names), 'seed')})"
            ends = (values[0], values[-1], min(values), max(values))
            made.add_row(Text(visible_or(name)), sparkline(values, curves.logarithmic), *map(compact, ends))
    return made


def _claim(claim: Claim) -> Sequence[RenderableType]:
    style = STYLES[claim.finding]
    title = Text.assemble((f"{MARKS[claim.finding]} {claim.finding}", style), "  ", (visible_or(claim.claim), "title"))
    table = t.grid({"width": 11, "style": "quiet", "no_wrap": True}, {})
    table.add_row("  published", Text(f"{claim.published} ({claim.source})", "quiet"))
    table.add_row("  measured", Text(visible_or(claim.measured)))
    table.add_row("  null", Text(visible_or(claim.null), "quiet"))
    return [title, table]
