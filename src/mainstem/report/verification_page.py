"""A causal verdict as a section of a page."""

from typing import TYPE_CHECKING

from mainstem.report import page as p
from mainstem.report.text import count, plain, probability
from mainstem.report.verification_text import METHODS, VERDICTS, by_name, caption

if TYPE_CHECKING:
    from mainstem.causal.outcomes import Verification


def verification_section(v: "Verification", score: str) -> str:
    """The verdict, its tables, and notes."""
    css = "neg" if v.verdict == "not causal" else "pos"
    parts = [f'<p class="{css}"><strong>{p.esc(VERDICTS[v.verdict])}</strong></p>', _taken_out(v), _controls(v)]
    if v.elsewhere:
        parts.append(_elsewhere(v))
    parts += [f'<p class="quiet">{p.esc(note)}.</p>' for note in v.notes]
    return p.section("Verdict", p.esc(caption(v, score)), *parts)


def _taken_out(v: "Verification") -> str:
    methods = list(dict.fromkeys(row.method for row in v.rows))
    heads = [("taken out", ""), ("units", "num"), *[(METHODS[m], "num") for m in methods], ("rank", "num")]
    before = p.cell(probability(v.before.probability), "num")
    rank = p.cell(count(round(v.before.rank)), "num")
    rows = [p.row(p.cell("nothing"), p.cell("0", "num"), *[before] * len(methods), rank)]
    for name, found in by_name(v).items():
        first = next(iter(found.values()))
        cells = [p.cell(probability(found[m].outcome.probability) if m in found else "", "num") for m in methods]
        last = p.cell(count(round(first.outcome.rank)), "num")
        rows.append(p.row(p.cell(p.esc(name)), p.cell(count(first.units), "num"), *cells, last))
    for row in v.kept:
        cells = [p.cell(probability(row.outcome.probability) if m == "mean" else "", "num") for m in methods]
        rows.append(p.row(p.cell(p.esc(row.name), "quiet"), p.cell(""), *cells, p.cell("")))
    return p.table(heads, rows)


def _controls(v: "Verification") -> str:
    heads = [
        ("zeroed instead", ""),
        ("draws", "num"),
        ("p", "num"),
        ("least … most", "num"),
        ("norm", "num"),
        ("", ""),
    ]
    rows = []
    for control in v.controls:
        mark = '<span class="pos">✓ does less</span>' if control.beaten else '<span class="neg">✗ does as much</span>'
        cells = [
            p.cell(p.esc(control.name)),
            p.cell(count(control.draws), "num"),
            p.cell(probability(control.mean), "num"),
            p.cell(f"{probability(control.min)} … {probability(control.max)}", "num quiet"),
            p.cell(f"{plain(control.norm)}×", "num quiet"),
            p.cell(mark),
        ]
        rows.append(p.row(*cells))
    return p.table(heads, rows)


def _elsewhere(v: "Verification") -> str:
    heads = [("zeroed in other prompts", ""), ("predicts", ""), ("p", "num"), ("without", "num")]
    rows = [
        p.row(
            p.cell(p.esc(row["prompt"])),
            p.cell(p.token(row["token"])),
            p.cell(probability(row["probability"]), "num"),
            p.cell(probability(row["ablated_probability"]), "num"),
        )
        for row in v.elsewhere
    ]
    return p.table(heads, rows)
