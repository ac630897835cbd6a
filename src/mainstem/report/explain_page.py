"""An explanation as a page: prompt and target, certificates, the drawn stream, the lens's course, values, warnings."""

import math
from collections.abc import Sequence

from mainstem.report import page as p
from mainstem.report.curves import Course, courses
from mainstem.report.drawing import Tributary, stream
from mainstem.report.explain_text import additions, columns, explained, legend, number, score_of, values_caption
from mainstem.report.queries_page import queries
from mainstem.report.text import (
    KINDS,
    WRITERS,
    compact,
    count,
    plain,
    probability,
    scientific,
    signed,
    visible,
)
from mainstem.report.verification_page import verification_section
from mainstem.results.explanation import Certificate, Explanation, LayerRow, Token, ValueRow


def explanation_page(e: Explanation) -> str:
    """The page of an explanation."""
    against = ""
    if e.against:
        against = f" and not {', '.join(p.token(rival.token) for rival in e.against)}"
    body = [
        p.model_line("explain", e.model, e.provenance),
        f"<h1>Who wrote {p.token(e.target.token)}{against}</h1>",
        p.prompt(e.prompt["tokens"], e.position, p.token(e.target.token)),
        _facts(e),
        p.section(
            "Certificates", "what proves that this account is complete and rightly labelled", _cards(e.certificate)
        ),
        _stream(e),
        _account(e),
        _course(e),
        _values(e),
        queries(e),
        "" if e.verification is None else verification_section(e.verification, e.score),
        p.notices(e.warnings, e.notes),
    ]
    title = f"{visible(e.target.token)} explained, {e.model['name']}"
    return p.page(title, body, e.provenance, e.as_dict())


def _facts(e: Explanation) -> str:
    entries = [*_token_facts(e.target, "")]
    for step in e.steps:
        entries += _token_facts(step, f"{visible(step.token)} ")
    for rival in e.against:
        entries += _token_facts(rival, f"{visible(rival.token)} ")
    where = f"{p.token(e.prompt['tokens'][e.position])} at {e.position}"
    return p.facts([*entries, ("destination", where), ("tokens in the prompt", count(len(e.prompt["tokens"])))])


def _token_facts(token: Token, name: str) -> list[tuple[str, str]]:
    if token.rank is None:
        return [(f"{name}target", "a direction in the stream")]
    return [
        (f"{name}probability", p.esc(probability(token.probability))),
        (f"{name}log p", p.esc(plain(token.log_probability, 3))),
        (f"{name}rank", p.esc(count(token.rank))),
    ]


def _cards(c: Certificate) -> str:
    worth = "" if c.nats is None else f"; worth {scientific(c.nats)} nats of the target"
    numbers = f"relative error {scientific(c.relative_error)}, tolerance {scientific(c.tolerance)}{worth}"
    cards = [
        p.card(
            "sum", c.holds, f"{count(c.parts)} parts add up to the stream that the model computed", numbers, c.failed
        ),
        p.check_card("labels", c.labels, "units zeroed in a real run: their writes changed by their parts"),
        p.check_card("reads", c.reads, "projections recomputed from the stream that they read"),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


# --- stream and account -----------------------------------------------------------------------------------


def _logit(e: Explanation) -> str:
    """What the account is of, as HTML."""
    return explained(e, p.token)


def _stream(e: Explanation) -> str:
    known = [row for row in e.layers if row.direct is not None]
    if not known:
        return ""
    tributaries = [Tributary(row.unit, row.direct or 0.0) for row in known]
    total = e.account.get("total", math.fsum(one.value for one in tributaries))
    rest = total - math.fsum(one.value for one in tributaries)
    if abs(rest) > 0.005 * max(abs(one.value) for one in tributaries):
        tributaries.append(Tributary("biases", rest))
    key = (
        '<div class="key"><span><b class="b-for"></b>speaks for the target, from above</span>'
        '<span><b class="b-against"></b>speaks against it, from below</span>'
        "<span>the main stem is as wide as the sum so far</span></div>"
    )
    caption = f"{_logit(e)}, sublayer by sublayer; direct attribution under the frozen norm, so that widths add up"
    what = "sum" if e.target_kind in ("direction", "continuation") else "logit difference" if e.against else "logit"
    return p.section("The stream", caption, stream(tributaries, e.target.token, total, what), key)


def _account(e: Explanation) -> str:
    numbers = [value for value in e.account.values() if math.isfinite(value)]
    full = max(map(abs, numbers), default=0.0)
    left = -min([0.0, *numbers]) / full if full > 0 else 0.0
    rows = []
    for name, value in e.account.items():
        number = scientific(value) if name == "unexplained" else signed(value)
        cells = [p.cell(p.esc(WRITERS.get(name, name))), p.cell(p.esc(number), "num"), p.cell(p.bar(value, full, left))]
        rows.append(p.row(*cells, css="total" if name == "total" else ""))
    heads = [("kind of writer", ""), ("share", "num"), ("", "")]
    return p.section("Account", f"{_logit(e)} by kind of writer; the entries add up", p.table(heads, rows, "account"))


# --- course -----------------------------------------------------------------------------------------------


def _course(e: Explanation) -> str:
    names = [row.unit for row in e.layers]
    values = [row.lens_log_probability for row in e.layers if row.lens_log_probability is not None]
    if not values:
        return ""
    line = Course(visible(e.target.token), values, f"p {probability(e.target.probability)}")
    label = f"log-probability of {visible(e.target.token)} along the stream"
    caption = (
        f"the logit lens: log-probability of {p.token(e.target.token)}, in nats, if the model ended "
        "after each sublayer; recomputed norm"
    )
    heads = [("after", ""), ("log p", "num"), ("added, nats", "num"), ("", ""), ("direct", "num"), ("likeliest", "")]
    full = max((math.sqrt(abs(value)) for value in additions(e)), default=0.0)
    rows = [_layer_row(i, row, full) for i, row in enumerate(e.layers)]
    more = f"<details><summary>all {len(rows)} states</summary>{p.table(heads, rows)}</details>"
    return p.section("The lens", caption, courses(names, [line], label), more)


def _layer_row(index: int, row: LayerRow, full: float) -> str:
    value = row.log_probability_increase or 0.0
    root = math.copysign(math.sqrt(abs(value)), value)
    return p.row(
        p.cell(p.esc(row.unit), "unit"),
        p.cell(p.esc(plain(row.lens_log_probability)), "num"),
        p.cell(p.esc(signed(value)) if index else "", "num"),
        p.cell(p.bar(root, full) if index else ""),
        p.cell(p.esc(signed(row.direct)), "num"),
        p.cell(p.chips(row.top)),
    )


# --- values -----------------------------------------------------------------------------------------------


def _values(e: Explanation) -> str:
    caption = p.esc(values_caption(e))
    if not e.values:
        return p.section("Values", caption, "<p>No unit of these kinds.</p>")
    heads = [("#", "num"), ("unit", ""), ("kind", ""), ("source", ""), ("coefficient", "num")]
    heads += [(f"{name}{' ▾' if name == e.score else ''}", "num") for name in columns(e.score)]
    heads += [("promotes", ""), ("suppresses", "")]
    rows = [_value_row(i, row, e.score) for i, row in enumerate(e.values, start=1)]
    reading = f'<p class="quiet">{p.esc(legend(e.values))}.</p>'
    return p.section("Values", caption, p.table(heads, rows, "sortable"), reading)


def _value_row(rank: int, row: ValueRow, score: str) -> str:
    cells = [
        p.cell(str(rank), "num quiet", rank),
        p.cell(p.esc(row.unit), "unit"),
        p.cell(p.esc(KINDS.get(row.kind, row.kind)), "quiet"),
        p.cell("" if row.source is None else p.token(row.source)),
        p.cell(p.esc(compact(row.coefficient)), "num", row.coefficient),
    ]
    for name in columns(score):
        value = score_of(row, name, score)
        css = "num" + ("" if name != score else " pos" if (value or 0) >= 0 else " neg")
        shown = p.esc(number(value, name))
        cells.append(p.cell(f"<strong>{shown}</strong>" if name == score else shown, css, value))
    tokens: Sequence[Sequence[str]] = (row.promotes, row.suppresses)
    return p.row(*cells, *(p.cell(p.chips(several), "tokens") for several in tokens))
