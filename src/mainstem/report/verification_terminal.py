"""A causal verdict for the terminal: what was taken out, what the controls did, what else depends on it."""

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.text import count, plain, probability
from mainstem.report.verification_text import METHODS, VERDICTS, by_name, caption

if TYPE_CHECKING:
    from mainstem.causal.outcomes import Verification


def verification_rows(v: "Verification", score: str) -> list[RenderableType]:
    """The verdict, its tables, and notes."""
    style = "fail" if v.verdict == "not causal" else "ok"
    rows: list[RenderableType] = [
        t.heading("Verdict", caption(v, score)),
        Text(VERDICTS[v.verdict], style),
        _taken_out(v),
        _controls(v),
    ]
    if v.elsewhere:
        rows.append(_elsewhere(v))
    rows += [Text(f"i {note}", "quiet") for note in v.notes]
    return rows


def _taken_out(v: "Verification") -> Table:
    table = t.lined()
    table.add_column("taken out", no_wrap=True)
    table.add_column("units", justify="right", no_wrap=True)
    methods = list(dict.fromkeys(row.method for row in v.rows))
    for method in methods:
        table.add_column(METHODS[method], justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    nothing = [Text("nothing"), Text("0"), *[Text(probability(v.before.probability))] * len(methods)]
    table.add_row(*nothing, Text(count(round(v.before.rank))))
    for name, found in by_name(v).items():
        first = next(iter(found.values()))
        cells = [Text(probability(found[m].outcome.probability)) if m in found else Text() for m in methods]
        table.add_row(Text(name), Text(count(first.units)), *cells, Text(count(round(first.outcome.rank))))
    for row in v.kept:
        mean = [Text(probability(row.outcome.probability)) if m == "mean" else Text("") for m in methods]
        table.add_row(Text(row.name, "quiet"), Text(), *mean, Text())
    return table


def _controls(v: "Verification") -> Table:
    table = t.lined()
    table.add_column("zeroed instead", no_wrap=True)
    table.add_column("draws", justify="right", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    table.add_column("least … most", justify="right", no_wrap=True)
    table.add_column("norm", justify="right", no_wrap=True)
    table.add_column("does less", no_wrap=True)
    for control in v.controls:
        mark = Text("✓", "ok") if control.beaten else Text("✗", "fail")
        table.add_row(
            Text(control.name),
            Text(count(control.draws)),
            Text(probability(control.mean)),
            Text(f"{probability(control.min)} … {probability(control.max)}", "quiet"),
            Text(f"{plain(control.norm)}×", "quiet"),
            mark,
        )
    return table


def _elsewhere(v: "Verification") -> Table:
    table = t.lined()
    table.add_column("zeroed in other prompts", overflow="ellipsis", no_wrap=True)
    table.add_column("predicts", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    table.add_column("without", justify="right", no_wrap=True)
    for row in v.elsewhere:
        table.add_row(
            Text(row["prompt"]),
            t.token_text(row["token"], ""),
            Text(probability(row["probability"])),
            Text(probability(row["ablated_probability"])),
        )
    return table
