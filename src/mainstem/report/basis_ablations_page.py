"""Dimensions taken out, as a page: bars of what the loss does, courses along the layers, a map of heads, the tables."""

import re

from mainstem.report import basis_ablations_text as words
from mainstem.report import page as p
from mainstem.report.charts import interval_bars
from mainstem.report.curves import Course, courses
from mainstem.report.experiment_page import experiment_table
from mainstem.report.heatmap import heatmap
from mainstem.report.text import NOTHING, count
from mainstem.results.basis_ablations import AblationSection


def ablations_section(section: AblationSection) -> str:
    """The sections of the page."""
    facts = p.facts([("taken", p.esc(words.chosen(section))), ("found", p.esc(words.found(section)))])
    drawn = [p.section(words.TITLE, p.esc(words.CAPTION), facts), _bars(section), _layers(section), _heads(section)]
    return "".join([*drawn, *(experiment_table(table) for table in words.tables(section) if table.rows)])


def _bars(section: AblationSection) -> str:
    most = {what: section.control_tokens if what in words.CONTROLS else section.tokens for what in words.WHAT}
    rows = [
        (f"{run.where}, {words.WHAT[run.what]}", run.change, run.low, run.high)
        for run in section.runs
        if run.what != "none" and run.tokens == most[run.what]
    ]
    caption = (
        f"nats a token, on {count(section.tokens)} tokens with the bootstrap interval of 95 %; controls on "
        f"{count(section.control_tokens)} tokens, the mean draw with the least and the largest"
    )
    return p.section("Loss without them", p.esc(caption), interval_bars(rows, "change of the loss"))


def _layers(section: AblationSection) -> str:
    names = [row.layer for row in section.layers]
    columns = {
        "as it is": [row.top for row in section.layers],
        "zero": [row.zeroed for row in section.layers],
        "random": [row.random for row in section.layers],
    }
    if len(names) < 2:
        return ""
    lines = [Course(name, values, f"{values[-1]:.0%}") for name, values in columns.items()]
    drawn = courses(names, lines, "top-1 mass of the attention softmax by layer")
    return p.section("The attention softmax by layer", p.esc(words.PATTERNS_CAPTION), drawn)


def _heads(section: AblationSection) -> str:
    if not section.heads:
        return ""
    cells = {row.head: row for row in section.heads}
    layers = sorted({_layer(head) for head in cells}, key=lambda name: int(re.findall(r"\d+", name)[0]))
    numbers = sorted({int(head.rpartition("H")[2]) for head in cells})
    rows = [[cells.get(f"{layer}H{number}") for number in numbers] for layer in layers]
    moved = [[None if cell is None else cell.moved for cell in row] for row in rows]

    def title(i: int, j: int) -> str:
        cell = rows[i][j]
        return (
            ""
            if cell is None
            else f"{cell.head}: {cell.moved:.0%} moved, top-1 {cell.top:.0%} to {cell.top_zeroed:.0%}"
        )

    def text(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.2f}"

    drawn = heatmap(layers, [f"H{n}" for n in numbers], moved, 1.0, text, title, "weight that moves", least="0")
    caption = "how much of a head’s attention goes elsewhere with the dimensions zeroed where its layer reads"
    return p.section("Heads", p.esc(caption), drawn)


def _layer(head: str) -> str:
    return head.rpartition("H")[0]
