"""A reading of the lens as a page: courses of the chosen tokens, the likeliest after every sublayer, single units."""

from mainstem.report import page as p
from mainstem.report.curves import Course, Panel, course_panel, courses, sigmoid_panel, sigmoids, standalone
from mainstem.report.text import (
    KINDS,
    NORMS,
    compact,
    count,
    plain,
    probability,
    scientific,
    shortened,
    signed,
    visible,
    visible_or,
)
from mainstem.report.unit_text import null_sentence
from mainstem.results.description import CourseRow, LensReading, LikelyToken, StateRow
from mainstem.results.unit import TokenLogit, UnitReading

LINES = 5
ADDS = "before-softmax values under the frozen norm, where what sublayers add is exact"
SIGMOID = "p of each token as the unit’s before-softmax value on it grows and all others stay; frozen norm"


def lens_page(reading: LensReading) -> str:
    """The page of a reading."""
    r = reading
    body = [
        p.model_line("lens", r.model, r.provenance),
        "<h1>What each layer would answer</h1>",
        p.prompt(r.prompt["tokens"], r.position, p.token(r.states[-1].top[0].token) if r.states else ""),
        _facts(r),
        p.section("Certificate", "", _card(r)),
        _courses(r),
        _likeliest(r),
        _chosen(r),
        *(_unit(r, unit) for unit in r.units),
        p.notices(r.warnings, r.notes),
    ]
    title = f"The lens at {visible(r.prompt['tokens'][r.position])}, {r.model['name']}"
    return p.page(title, body, r.provenance, r.as_dict())


def _facts(r: LensReading) -> str:
    where = f"{p.token(r.prompt['tokens'][r.position])} at {r.position}"
    followed = ", ".join(p.token(token.token) for token in r.tokens)
    return p.facts([("read at", where), ("followed", followed), ("states", count(len(r.states)))])


def _card(r: LensReading) -> str:
    c = r.certificate
    text = (
        f"{count(c.parts)} parts add up to the stream that the model computed; the last state's log-probabilities "
        f"differ from the model's own by at most {scientific(c.last_state)}"
    )
    numbers = f"relative error {scientific(c.relative_error)}, tolerance {scientific(c.tolerance)}"
    return f'<div class="cards">{p.card("sum", c.holds, text, numbers, None)}</div>'


def _courses(r: LensReading) -> str:
    names = [state.unit for state in r.states]
    left_out = f"; the first {LINES} of {len(r.tokens)}" if len(r.tokens) > LINES else ""
    caption = f"log-probability of the followed tokens after each sublayer, in nats; {_norm(r)}{left_out}"
    parts = [courses(names, _lines(r, "log_probability"), "log-probabilities along the stream")]
    if _adds(r):
        below = f'<p class="caption">{p.esc(ADDS)}</p>'
        parts += [below, courses(names, _lines(r, "before_softmax"), "before-softmax values along the stream")]
    return p.section("Courses", p.esc(caption), *parts)


def _lines(r: LensReading, key: str) -> list[Course]:
    """The first tokens' courses of one number."""
    lines = []
    for i, token in enumerate(r.tokens[:LINES]):
        values = [getattr(state.course[i], key) for state in r.states]
        lines.append(Course(visible(token.token), values, plain(values[-1]) if values else ""))
    return lines


def _adds(r: LensReading) -> bool:
    return bool(r.states) and all(row.before_softmax is not None for row in r.states[0].course)


def lens_figure(r: LensReading) -> str:
    """The courses, and the units' sigmoids, as an SVG file that needs nothing else."""
    names = [state.unit for state in r.states]
    heading = f"log-probability after each sublayer, nats; {_norm(r)}"
    panels: list[tuple[str, Panel]] = [(heading, course_panel(names, _lines(r, "log_probability")))]
    if _adds(r):
        panels.append((ADDS, course_panel(names, _lines(r, "before_softmax"))))
    panels += [(f"{unit.unit}: {SIGMOID}", sigmoid_panel(unit.sigmoids)) for unit in r.units if unit.sigmoids]
    followed = ", ".join(visible(token.token) for token in r.tokens[:LINES])
    prompt = shortened("".join(r.prompt["tokens"][: r.position + 1]), 60)
    return standalone(f"{followed} after “{visible_or(prompt)}”, {r.model['name']}", panels)


def _norm(r: LensReading) -> str:
    return NORMS.get(r.norm, r.norm)


def _likeliest(r: LensReading) -> str:
    most = max((len(state.top) for state in r.states), default=0)
    heads = [("after", ""), ("entropy", "num"), *((f"{n}." if n > 1 else "likeliest", "") for n in range(1, most + 1))]
    rows = [_state_row(state) for state in r.states]
    caption = f"the likeliest tokens if the model ended there, with their probabilities; {_norm(r)}; entropy in nats"
    return p.section("Likeliest tokens", p.esc(caption), p.table(heads, rows))


def _state_row(state: StateRow) -> str:
    cells = [p.cell(p.esc(state.unit), "unit"), p.cell(p.esc(plain(state.entropy)), "num")]
    return p.row(*cells, *(_heat(token) for token in state.top))


def _heat(token: LikelyToken) -> str:
    """A cell as dark as its token is likely."""
    share = f"{min(max(token.probability, 0.0), 1.0) * 100:.0f}%"
    shade = f"background:linear-gradient(90deg,var(--for-soft) {share},transparent {share})"
    number = p.esc(probability(token.probability))
    return f'<td class="heat" style="{shade}"><span class="p">{number}</span>{p.token(token.token)}</td>'


def _chosen(r: LensReading) -> str:
    parts = []
    heads = [
        ("after", ""),
        ("before softmax", "num"),
        ("logit", "num"),
        ("log p", "num"),
        ("p", "num"),
        ("rank", "num"),
    ]
    for i, token in enumerate(r.tokens):
        rows = [_course_row(state, state.course[i]) for state in r.states]
        parts.append(f"<details><summary>{p.token(token.token)}</summary>{p.table(heads, rows)}</details>")
    caption = f"every state; {_norm(r)}; values before softmax under the frozen norm, where sublayers' values add up"
    return p.section("Followed tokens", p.esc(caption), *parts)


def _course_row(state: StateRow, row: CourseRow) -> str:
    numbers = (plain(row.before_softmax, 3), plain(row.logit, 3), plain(row.log_probability, 3))
    numbers += (probability(row.probability), count(row.rank))
    return p.row(p.cell(p.esc(state.unit), "unit"), *(p.cell(p.esc(number), "num") for number in numbers))


def _unit(r: LensReading, unit: UnitReading) -> str:
    """One unit: what it promotes and suppresses beside the null, and its sigmoids."""
    source = "" if unit.source is None else f", reading {p.token(unit.source)}"
    caption = (
        f"{p.esc(KINDS.get(unit.kind, unit.kind))}{source}; coefficient {p.esc(compact(unit.coefficient))}, its sign "
        f"in the logits; norm {p.esc(compact(unit.size))}; logits centred, frozen norm"
    )
    heads = [("promotes", ""), ("logit", "num"), ("suppresses", ""), ("logit", "num")]
    rows = [_pair(up, down) for up, down in zip(unit.promotes, unit.suppresses, strict=True)]
    null = f"<p>{p.esc(null_sentence(unit))}</p>"
    parts = [p.table(heads, rows), null]
    if unit.sigmoids:
        shown = unit.sigmoids[:LINES]
        parts += [f'<p class="caption">{p.esc(SIGMOID)}</p>', sigmoids(shown, unit.unit)]
    return p.section(unit.unit, caption, *parts)


def _pair(up: TokenLogit, down: TokenLogit) -> str:
    cells = [p.cell(p.token(up.token)), p.cell(p.esc(signed(up.logit)), "num")]
    return p.row(*cells, p.cell(p.token(down.token)), p.cell(p.esc(signed(down.logit)), "num"))
