"""An explanation for the terminal: prompt, target, certificates, account, layers, values, warnings, in this order.

The answer (values) stands near the end, because that is what is still on the screen when the command is done.
"""

import math
import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.report.explain_text import additions, columns, explained, legend, number, score_of, values_caption
from mainstem.report.queries_terminal import queries
from mainstem.report.text import (
    KINDS,
    WRITERS,
    compact,
    count,
    diverging,
    plain,
    probability,
    scientific,
    signed,
)
from mainstem.report.verification_terminal import verification_rows
from mainstem.results.explanation import Certificate, Explanation, LayerRow, Token, ValueRow

WIDE = 118
ACCOUNT_HALF = 12


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Prints an explanation, as wide as the console is."""
    e = explanation
    console.print(*t.title_rows("explain", e.model, e.provenance), sep="\n")
    console.print(t.prompt_row(e.prompt, e.position, "the prediction explained stands"))
    console.print(*_target(e), sep="\n")
    console.print(t.heading("Certificates"), _certificates(e.certificate), sep="\n")
    console.print(*_account(e), sep="\n")
    console.print(*_layers(e, console.width), sep="\n")
    console.print(*_values(e, console.width), sep="\n")
    console.print(*queries(e, console.width), sep="\n")
    if e.verification is not None:
        console.print(*verification_rows(e.verification, e.score), sep="\n")
    for part in t.notices(e.warnings, e.notes):
        console.print(part)
    console.print(t.provenance_line(e.provenance))


# --- header -----------------------------------------------------------------------------------------------


def _target(e: Explanation) -> list[RenderableType]:
    rows: list[RenderableType] = [t.labelled("target", _token_line(e.target))]
    rows += [t.labelled("by token" if i == 0 else "", _token_line(step)) for i, step in enumerate(e.steps)]
    rows += [t.labelled("against" if i == 0 else "", _token_line(rival)) for i, rival in enumerate(e.against)]
    return rows


def _token_line(token: Token) -> Text:
    line = t.token_text(token.token)
    if token.probability is None or token.rank is None:
        return line.append("   a direction in the stream", "quiet")
    line.append("   p ", "quiet").append(probability(token.probability))
    line.append("   log p ", "quiet").append(plain(token.log_probability, 3))
    line.append("   rank ", "quiet").append(count(token.rank))
    line.append(f"   id:{token.id}", "quiet")
    return line


def _certificates(c: Certificate) -> Table:
    table = t.checks_table()
    worth = "" if c.nats is None else f", worth {scientific(c.nats)} nats of the target"
    text = Text.assemble(
        f"{count(c.parts)} parts add up to the stream",
        (f": error {scientific(c.relative_error)}, tolerance {scientific(c.tolerance)}{worth}", "quiet"),
    )
    t.check_row(table, "sum", c.holds, text, c.failed)
    checked = "units zeroed in a real run: their writes changed by their parts"
    t.check_row(table, "labels", c.labels.holds, t.check_text(c.labels, checked), c.labels.where)
    checked = "projections recomputed from the stream they read"
    t.check_row(table, "reads", c.reads.holds, t.check_text(c.reads, checked), c.reads.where)
    return table


# --- account ----------------------------------------------------------------------------------------------


def _account(e: Explanation) -> list[RenderableType]:
    what = explained(e)
    numbers = [value for value in e.account.values() if math.isfinite(value)]
    full = max(map(abs, numbers), default=0.0)
    left = math.ceil(ACCOUNT_HALF * -min([0.0, *numbers]) / full) if full > 0 else 0
    table = t.grid({"no_wrap": True}, {"justify": "right", "no_wrap": True}, {"no_wrap": True})
    for name, value in e.account.items():
        style = "title" if name == "total" else ""
        number = scientific(value) if name == "unexplained" else signed(value)
        table.add_row(Text(WRITERS.get(name, name), style), Text(number, style), _account_bar(value, full, left))
    return [t.heading("Account", f"{what}, by kind of writer; direct, frozen norm; the entries add up"), table]


def _account_bar(value: float, full: float, left: int) -> Text:
    """A bar around a middle, with as much room on the left as the negative entries need."""
    against, towards = diverging(value, full, ACCOUNT_HALF)
    return Text.assemble((against[ACCOUNT_HALF - left :], "against"), ("│", "quiet"), (towards, "for"))


def _two_sided(value: float, full: float, half: int) -> Text:
    left, right = diverging(value, full, half)
    return Text.assemble((left, "against"), ("│", "quiet"), (right, "for"))


# --- layers -----------------------------------------------------------------------------------------------


def _layers(e: Explanation, width: int) -> list[RenderableType]:
    caption = (
        "log p of the target along the stream and what each sublayer adds to it, in nats; recomputed norm; "
        "bars on a square-root scale"
    )
    names = list(dict.fromkeys(name for row in e.layers for layer, name in [place_of(row.unit)] if layer is not None))
    half = 4 if len(names) > 2 or width < 90 else 6
    wide = width >= WIDE - 18 and len(names) <= 2
    table = t.lined()
    table.add_column("block", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, width=2 * half + 1)
        if wide:
            table.add_column("direct", justify="right", no_wrap=True)
    table.add_column("log p", justify="right", no_wrap=True)
    table.add_column("likeliest", no_wrap=True, overflow="ellipsis", ratio=1)
    if e.target_kind == "direction":
        caption = "what each sublayer adds along the direction; bars on a square-root scale"
    full = max((math.sqrt(abs(value)) for value in additions(e)), default=0.0)
    for block in _by_block(e.layers):
        table.add_row(*_block_cells(block, names, full, half, wide))
    return [t.heading("Layers", caption), table]


def place_of(unit: str) -> tuple[int | None, str]:
    """(5, "attn") of L5.attn; (None, "embed") of embed."""
    found = re.match(r"L(\d+)\.(.+)$", unit)
    return (int(found[1]), found[2]) if found else (None, unit)


def _by_block(layers: Sequence[LayerRow]) -> list[list[LayerRow]]:
    """Rows of one block together; each embedding by itself."""
    blocks: list[list[LayerRow]] = []
    for row in layers:
        layer, _ = place_of(row.unit)
        if layer is not None and blocks and place_of(blocks[-1][-1].unit)[0] == layer:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return blocks


def _block_cells(block: list[LayerRow], names: Sequence[str], full: float, half: int, wide: bool) -> list[Text]:
    last = block[-1]
    layer, first = place_of(block[0].unit)
    cells = [Text(first if layer is None else f"L{layer}")]
    by_name = {place_of(row.unit)[1]: row for row in block} if layer is not None else {}
    for name in names:
        row = by_name.get(name)
        if row is None:
            cells += [Text()] * (3 if wide else 2)
            continue
        value = row.direct or 0.0 if row.log_probability_increase is None else row.log_probability_increase
        root = math.copysign(math.sqrt(abs(value)), value)
        cells += [Text(signed(value)), _two_sided(root, full, half)]
        if wide:
            cells.append(Text(signed(row.direct), "quiet"))
    cells.append(Text(plain(last.lens_log_probability)))
    cells.append(t.token_text(last.top[0], "") if last.top else Text())
    return cells


# --- values -----------------------------------------------------------------------------------------------


def _values(e: Explanation, width: int) -> list[RenderableType]:
    first = t.heading("Values", values_caption(e))
    if not e.values:
        return [first, Text("no unit of these kinds", "quiet")]
    wide = width >= WIDE
    with_source = wide and any(row.source is not None for row in e.values)
    table = t.lined(expand=True)
    table.add_column("", justify="right", no_wrap=True, style="quiet")
    table.add_column("unit", no_wrap=True)
    if wide:
        table.add_column("kind", no_wrap=True, style="quiet")
    if with_source:
        table.add_column("source", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("coef.", justify="right", no_wrap=True)
    for score in columns(e.score, wide):
        mark = "▾" if score == e.score else ""
        table.add_column(f"{mark}{score}", justify="right", no_wrap=True)
    if wide:
        table.add_column("promotes", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("suppresses", no_wrap=True, overflow="ellipsis", ratio=1)
    else:
        table.add_column("▲ promotes ▼ suppresses", no_wrap=True, overflow="ellipsis", ratio=1)
    for i, row in enumerate(e.values, start=1):
        table.add_row(*_value_cells(i, row, e.score, wide, with_source))
    return [first, table, Text(legend(e.values), "quiet")]


def _value_cells(rank: int, row: ValueRow, score: str, wide: bool, with_source: bool) -> list[RenderableType]:
    cells: list[RenderableType] = [Text(str(rank)), Text(row.unit, "title")]
    source = Text() if row.source is None else t.token_text(row.source, "", 24)
    if wide:
        cells.append(Text(KINDS.get(row.kind, row.kind)))
    elif row.source is not None:
        cells[1] = Group(Text(row.unit, "title"), Text.assemble(("← ", "quiet"), source))
    if with_source:
        cells.append(source)
    cells.append(Text(compact(row.coefficient)))
    for name in columns(score, wide):
        value = score_of(row, name, score)
        style = "" if name != score else "for" if (value or 0) >= 0 else "against"
        cells.append(Text(number(value, name), style))
    up, down = t.token_list(row.promotes), t.token_list(row.suppresses)
    if wide:
        return [*cells, up, down]
    return [*cells, Group(Text.assemble(("▲ ", "for"), up), Text.assemble(("▼ ", "against"), down))]
