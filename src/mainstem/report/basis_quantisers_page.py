"""What quantisers do, as a page: bars of how far each is from full precision, errors along the layers, the tables."""

import math

from mainstem.report import page as p
from mainstem.report.basis_quantisers_text import TITLE, caption, found, tables
from mainstem.report.charts import interval_bars
from mainstem.report.curves import Course, courses
from mainstem.report.experiment_page import experiment_table
from mainstem.report.text import plural
from mainstem.results.basis_quantisers import AS_IT_IS, FULL, LayerErrorRow, QuantiserRow, QuantiserSection, named

LINES = 8
"""As many quantisers are drawn along the layers; the table has all."""


def quantisers_section(section: QuantiserSection) -> str:
    """The sections of the page."""
    drawn = [p.section(TITLE, p.esc(caption(section)), p.facts([("found", p.esc(found(section)))]))]
    drawn += [_bars(section, text["name"]) for text in section.texts]
    drawn += [_errors(section), *(experiment_table(table) for table in tables(section) if table.rows)]
    return "".join(drawn)


def _bars(section: QuantiserSection, text: str) -> str:
    rows = [
        (_label(row), row.kl, row.kl_low, row.kl_high)
        for row in section.rows
        if row.text == text and row.quantiser != FULL
    ]
    title = f"KL to full precision on {text}"
    return p.section(p.esc(title), "nats a token, with its bootstrap interval of 95 %", interval_bars(rows, title))


def _label(row: QuantiserRow) -> str:
    return row.quantiser if row.basis == AS_IT_IS else f"{row.basis}: {row.quantiser}"


def _errors(section: QuantiserSection) -> str:
    """The mean error of each sublayer's products along the model, on a scale of powers of ten."""
    by_quantiser: dict[str, dict[str, list[float]]] = {}
    for row in section.layers:
        own = by_quantiser.setdefault(named(row.quantiser, row.basis), {})
        own.setdefault(_sublayer(row), []).append(row.relative_error)
    names = max((list(own) for own in by_quantiser.values()), key=len, default=[])
    if len(names) < 2:
        return ""
    lines = []
    for name, own in list(by_quantiser.items())[:LINES]:
        means = [sum(own[place]) / len(own[place]) for place in names if place in own]
        if len(means) == len(names):
            lines.append(Course(name, [math.log10(m) if m > 0 else math.nan for m in means], f"{means[-1]:.1%}"))
    drawn = courses(names, lines, "relative error of each sublayer's products, as a power of ten", 340.0)
    tokens = plural(section.layer_tokens, "token")
    about = f"powers of ten; ||quantised - full|| / ||full||, the mean of each sublayer’s products, on {tokens}"
    return p.section("Errors along the layers", p.esc(about), drawn)


def _sublayer(row: LayerErrorRow) -> str:
    return row.layer.partition(" ")[0]
