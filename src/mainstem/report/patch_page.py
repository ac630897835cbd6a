"""A patching sweep as a page: both prompts, the heat map, the largest cells."""

from mainstem.report import page as p
from mainstem.report import patch_text as words
from mainstem.report.heatmap import heatmap
from mainstem.report.text import compact, count, shortened, visible, visible_or
from mainstem.results.patch import CellRow, PatchReading

TITLES = {"denoising": "Where clean values bring the answer back", "noising": "Where corrupted values take it away"}


def patch_page(r: PatchReading) -> str:
    """The page of a sweep."""
    body = [
        p.model_line("patch", r.model, r.provenance),
        f"<h1>{TITLES[r.direction]}</h1>",
        *_prompts(r),
        _facts(r),
        p.section("Heat map", p.esc(f"{words.what_is_shown(r)}; {words.grid_text(r)}"), _map(r)),
        p.section("Largest cells", "of either sign", _top(r)),
        *(f'<p class="caption">{p.esc(line)}</p>' for line in (words.cells_text(r), words.stability_text(r)) if line),
        p.notices(r.warnings, r.notes),
    ]
    title = f"Patching {r.grid}, “{shortened(visible_or(''.join(r.prompt['tokens'])), 60)}”, {r.model['name']}"
    return p.page(title, body, r.provenance, r.as_dict())


def _prompts(r: PatchReading) -> list[str]:
    which = "" if r.pairs == 1 else f", the first of {count(r.pairs)} pairs"
    return [
        f'<p class="caption">clean{which}</p>',
        p.prompt(r.prompt["tokens"], r.position, p.chips(r.answers)),
        '<p class="caption">corrupted</p>',
        p.prompt(r.corrupted["tokens"], r.position),
    ]


def _facts(r: PatchReading) -> str:
    rows = [("metric", p.esc(r.metric)), ("clean", p.esc(compact(r.clean)))]
    rows += [("corrupted", p.esc(compact(r.corrupted_value))), ("cells", p.esc(count(r.run + r.identical)))]
    if r.wrong_answers and r.metric == "logit-difference":
        rows.append(("against", p.chips(r.wrong_answers)))
    return p.facts(rows)


def _map(r: PatchReading) -> str:
    def title(i: int, j: int) -> str:
        ends = ""
        if r.low is not None and r.high is not None:
            ends = f" [{words.percent_exactly(r.low[i][j])}, {words.percent_exactly(r.high[i][j])}]"
        where = f"{r.rows[i]}, {words.column_text(r.columns[j])}"
        return f"{where}: {words.percent_exactly(r.effects[i][j])} %{ends}; {r.metric} {compact(r.values[i][j])}"

    columns = [words.column_text(column) for column in r.columns]
    return heatmap(
        r.rows,
        columns,
        r.effects,
        words.largest(r),
        words.percent,
        title,
        f"{words.what_is_shown(r)}; {words.measured(r)}",
    )


def _top(r: PatchReading) -> str:
    heads = [("row", ""), ("column", ""), ("effect %", "num"), (p.esc(r.metric), "num")]
    heads += [("95 % interval", "num")] if r.pairs > 1 else []
    return p.table(heads, [_row(cell) for cell in r.top])


def _row(cell: CellRow) -> str:
    css = "num pos" if cell.effect > 0 else "num neg"
    place, space, token = cell.column.partition(" ")
    column = f"{p.esc(place)} {p.token(token)}" if space and place.isdigit() else p.esc(visible(cell.column))
    cells = [p.cell(p.esc(cell.row), "unit"), p.cell(column), p.cell(p.esc(words.percent_exactly(cell.effect)), css)]
    cells.append(p.cell(p.esc(compact(cell.value)), "num"))
    if cell.low is not None:
        cells.append(p.cell(p.esc(f"{words.percent_exactly(cell.low)} … {words.percent_exactly(cell.high)}"), "num"))
    return p.row(*cells)
