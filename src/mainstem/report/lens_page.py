"""A reading of the lens as a page: the chosen tokens' courses, and the likeliest tokens after every sublayer."""

from mainstem.description import CourseRow, LensReading, LikelyToken, StateRow
from mainstem.report import page as p
from mainstem.report.drawing import Course, courses
from mainstem.report.text import NORMS, count, plain, probability, scientific, visible

LINES = 5


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
    lines = []
    for i, token in enumerate(r.tokens[:LINES]):
        values = [state.course[i].log_probability for state in r.states]
        lines.append(Course(token.token, values, plain(values[-1]) if values else ""))
    names = [state.unit for state in r.states]
    left_out = f"; the first {LINES} of {len(r.tokens)}" if len(r.tokens) > LINES else ""
    caption = f"log-probability of the followed tokens after each sublayer, in nats; {_norm(r)}{left_out}"
    return p.section("Courses", p.esc(caption), courses(names, lines, "log-probabilities along the stream"))


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
    heads = [("after", ""), ("before softmax", "num"), ("logit", "num"), ("log p", "num"), ("rank", "num")]
    for i, token in enumerate(r.tokens):
        rows = [_course_row(state, state.course[i]) for state in r.states]
        parts.append(f"<details><summary>{p.token(token.token)}</summary>{p.table(heads, rows)}</details>")
    caption = f"every state; {_norm(r)}; values before softmax under the frozen norm, where sublayers' values add up"
    return p.section("Followed tokens", p.esc(caption), *parts)


def _course_row(state: StateRow, row: CourseRow) -> str:
    numbers = (plain(row.before_softmax, 3), plain(row.logit, 3), plain(row.log_probability, 3), count(row.rank))
    return p.row(p.cell(p.esc(state.unit), "unit"), *(p.cell(p.esc(number), "num") for number in numbers))
