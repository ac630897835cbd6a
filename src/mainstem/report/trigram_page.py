"""Heads by a skip trigram as a page."""

from mainstem.report import page as p
from mainstem.report.trigram_text import COLUMNS, asked, cells, found_text, judged
from mainstem.results.trigram import TrigramReading


def trigram_page(r: TrigramReading) -> str:
    """The page of a skip trigram."""
    kinds = ["mono" if name in ("head", "weakest") else "num" for name in COLUMNS]
    heads = [(p.esc(name), kind if kind == "num" else "") for name, kind in zip(COLUMNS, kinds, strict=True)]
    rows = [
        p.row(*(p.cell(p.esc(cell), kind) for cell, kind in zip(cells(row), kinds, strict=True)))
        for row in r.heads[: r.top]
    ]
    body = [
        p.model_line("circuits", r.model, r.provenance),
        f"<h1>{p.esc(asked(r))}</h1>",
        f'<p class="caption">{p.esc(judged(r))}.</p>',
        p.facts([("found", p.esc(found_text(r)))]),
        p.section("Heads", p.esc("by the product of both ratios"), p.table(heads, rows)),
        p.section("Certificate", "", p.check_card("weights", r.factors, "sides rebuilt")),
        p.notices(r.warnings, r.notes),
    ]
    return p.page(f"A skip trigram in {r.model['name']}", body, r.provenance, r.as_dict())
