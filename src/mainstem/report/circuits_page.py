"""Circuits of a head as a page: copying, skip trigrams, and the strongest entries of both tables."""

from mainstem.report import page as p
from mainstem.report.circuits_text import COLUMNS, TITLES, asked_text, copying_text, named, shown, table_text
from mainstem.report.text import plain
from mainstem.results.circuits import CircuitReading


def circuits_page(r: CircuitReading) -> str:
    """The page of a head's circuits."""
    facts = [("head", p.esc(r.head)), ("copying", p.esc(copying_text(r)))]
    if r.asked is not None:
        facts.append(("asked", p.esc(asked_text(r.asked))))
    body = [
        p.model_line("circuits", r.model, r.provenance),
        f"<h1>{p.esc(r.head)} between tokens, from the weights</h1>",
        f'<p class="caption">{p.esc(shown(r))}.</p>',
        p.facts(facts),
        _trigrams(r),
        *(_entries(r, name) for name in ("qk", "ov")),
        p.section("Certificate", "", p.check_card("weights", r.factors, "sides rebuilt")),
        p.notices(r.warnings, r.notes),
    ]
    return p.page(f"Circuits of {r.head}, {r.model['name']}", body, r.provenance, r.as_dict())


def _trigrams(r: CircuitReading) -> str:
    rows = [
        p.row(p.cell(p.token(row.source)), p.cell(p.esc(named(row.destinations))), p.cell(p.esc(named(row.outs))))
        for row in r.trigrams
    ]
    caption = "[source] ... [destination] -> [out]; every destination goes with every out, because a head factors"
    return p.section(
        "Skip trigrams", p.esc(caption), p.table([("source", ""), ("destinations", ""), ("outs", "")], rows)
    )


def _entries(r: CircuitReading, name: str) -> str:
    heads = [*((column, "") for column in COLUMNS[name]), ("ratio", "num")]
    rows = [
        p.row(p.cell(p.token(row.source)), p.cell(p.token(row.token)), p.cell(p.esc(plain(row.ratio)), "num"))
        for row in r.entries
        if row.circuit == name
    ]
    title, what = TITLES[name]
    table = r.qk if name == "qk" else r.ov
    return p.section(title, p.esc(f"{what}; {table_text(table)}"), p.table(heads, rows))
