"""A command on many prompts as a page: means with intervals as bars or courses, then each prompt."""

from collections.abc import Sequence

from mainstem.report import page as p
from mainstem.report import set_text as words
from mainstem.report.charts import interval_bars
from mainstem.report.curves import Course, courses
from mainstem.report.text import compact, shortened, visible_or
from mainstem.results.prompt_set import MeanRow, PromptRow, PromptSetReading

DRAWN = 25


def prompt_set_page(r: PromptSetReading) -> str:
    """The page of what many prompts say together."""
    caption = "means over prompts, intervals of 95 % by the bootstrap"
    body = [
        p.model_line(r.of, r.model, r.provenance),
        f"<h1>{p.esc(words.TITLES[r.of])}</h1>",
        p.facts([("prompts", p.esc(words.counted_text(r))), ("asked", p.esc(words.options_text(r)))]),
        p.section("Means", caption, _drawing(r) + _means(r, r.rows)),
        *(
            f'<p class="caption">{p.esc(line)}</p>'
            for line in (words.elsewhere_text(r), words.stability_text(r))
            if line
        ),
        p.section("The answers", p.esc(words.verdicts_text(r)), _means(r, r.outcomes)) if r.outcomes else "",
        p.section("Prompts", "each with its answers and its own numbers", _prompts(r)),
        p.notices(r.warnings, r.notes),
    ]
    return p.page(f"{words.TITLES[r.of]}, {r.model['name']}", body, r.provenance, r.as_dict())


def _drawing(r: PromptSetReading) -> str:
    """Courses of log-probabilities along the stream with the ends of their intervals, or a bar for each row."""
    if r.of == "lens":
        lines = []
        for name in (name for name in words.quantities(r.rows) if name.endswith("log_probability")):
            means = [row.means[name] for row in r.rows]
            lines.append(Course(words.quantity_text(name), [one.mean for one in means], compact(means[-1].mean)))
            if means[0].low is not None:
                for side, values in (("low", [one.low for one in means]), ("high", [one.high for one in means])):
                    ends = [value if value is not None else float("nan") for value in values]
                    lines.append(Course(f"{words.quantity_text(name)}, {side}", ends, compact(ends[-1])))
        return courses([row.name for row in r.rows], lines, "mean log-probabilities after each state")
    name = words.quantities(r.rows)[-1] if r.rows else ""
    bars = [
        (shortened(visible_or(row.name), 24), one.mean, one.low, one.high)
        for row in r.rows[:DRAWN]
        if (one := row.means[name]).low is not None and one.high is not None
    ]
    return interval_bars(bars, f"mean {words.quantity_text(name)}")  # type: ignore[arg-type]


def _means(r: PromptSetReading, rows: Sequence[MeanRow]) -> str:
    names, units = words.quantities(list(rows)), any(row.listed is not None for row in rows)
    heads = [("", "")]
    for name in names:
        heads += [(p.esc(words.quantity_text(name)), "num"), ("95 %", "num")]
    heads += [("in the top", "num"), ("sources", "num")] if units else []
    return p.table(heads, [_row(r, row, names, units) for row in rows])


def _row(r: PromptSetReading, row: MeanRow, names: Sequence[str], units: bool) -> str:
    cells = [p.cell(p.esc(visible_or(row.name)), "unit")]
    for name in names:
        mean = row.means.get(name)
        cells += [p.cell(p.esc(words.mean_text(mean)), "num"), p.cell(p.esc(words.interval_text(mean)), "num")]
    if units:
        cells += [p.cell(p.esc(words.listed_text(row, r)), "num"), p.cell(p.esc(words.sources_text(row)), "num")]
    return p.row(*cells)


def _prompts(r: PromptSetReading) -> str:
    heads = [("prompt", ""), ("tokens", ""), ("answers", ""), ("found", "")]
    return p.table(heads, [_prompt(row) for row in r.prompts])


def _prompt(row: PromptRow) -> str:
    text = shortened(visible_or("".join(row.tokens)), 200)
    return p.row(
        p.cell(p.esc(visible_or(row.where))),
        p.cell(p.esc(text)),
        p.cell(p.esc(words.answers_text(row))),
        p.cell(p.esc(words.own_text(row))),
    )
