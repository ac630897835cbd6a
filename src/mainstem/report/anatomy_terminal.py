"""An anatomy for the terminal: sizes, blocks (alike ones once), readout, levels, and the trace of shapes."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.report import anatomy_text as words
from mainstem.report import terminal as t
from mainstem.report.alike import (
    BlockGroup,
    block_groups,
    layers_text,
    paths_text,
    shape_groups,
    stream_groups,
    units_text,
)
from mainstem.report.text import count, sizes
from mainstem.results.description import AnatomyDescription, ShapeRow

WIDE = 100


def print_anatomy(console: Console, anatomy: AnatomyDescription) -> None:
    """Prints an anatomy, as wide as the console is."""
    a = anatomy
    console.print(*t.title_rows("anatomy", a.model, a.provenance), sep="\n")
    console.print(t.labelled("class", Text(f"{a.model['class']}, {count(a.model['parameters'])} parameters")))
    console.print(t.labelled("sizes", Text(words.sizes_text(a.sizes))))
    console.print(t.labelled("stream", Text(words.facts_text(a))))
    for part in [*_blocks(a, console.width), *_readout(a), *_levels(a)]:
        console.print(part)
    if a.shapes is not None:
        for part in _shapes(a, console.width):
            console.print(part)
    for part in t.notices(a.warnings, a.notes):
        console.print(part)
    console.print(t.provenance_line(a.provenance))


# --- blocks -----------------------------------------------------------------------------------------------


def _blocks(a: AnatomyDescription, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [t.heading("Writes and reads", "in the order of execution; alike blocks once")]
    parts.append(_lines(words.embedding_lines(a), width))
    for group in block_groups(a):
        parts += [Text(), _group_title(group), _lines(words.block_lines(group), width)]
    if a.stream:
        parts += [t.heading("On the stream itself", "what happens to it besides plain additions"), _stream(a)]
    return parts


def _group_title(group: BlockGroup) -> Text:
    line = Text.assemble((layers_text(group.layers), "title"))
    if len(group.layers) > 1:
        line.append(f"   {len(group.layers)} blocks alike", "quiet")
    line.append(f"   {paths_text(group.paths)}", "quiet")
    return line


def _lines(lines: Sequence[words.Line], room: int) -> Table:
    # What is read or written gets a width of its own, so that only the modules' names are folded where room is short.
    width = min(max((len(line.what) for line in lines), default=1), max(room // 2 - 6, 20))
    fixed = {"no_wrap": True}
    table = t.grid(fixed, {**fixed, "style": "quiet"}, {"width": width}, fixed, {"style": "quiet"})
    for line in lines:
        style = {"writes": "title", "refused": "against", "through": "quiet"}.get(line.verb, "")
        table.add_row(Text(line.unit, "title"), line.verb, Text(line.what, style), line.matrix, Text(line.module))
    return table


def _stream(a: AnatomyDescription) -> Table:
    table = t.grid({}, {"ratio": 1})
    for units, step, factors in stream_groups(a):
        table.add_row(Text(f"with {units_text(units)}"), Text(words.step_text(step, factors), "quiet"))
    return table


# --- readout and levels -----------------------------------------------------------------------------------


def _readout(a: AnatomyDescription) -> list[RenderableType]:
    table = t.grid({"no_wrap": True}, {})
    for name, value in words.readout_entries(a):
        table.add_row(name, Text(value, "against" if value == a.final.opaque else ""))
    return [t.heading("Readout", "from the stream to the logits"), table]


def _levels(a: AnatomyDescription) -> list[RenderableType]:
    table = t.grid({"width": 1}, {"no_wrap": True}, {"justify": "right", "no_wrap": True}, {})
    for level in a.levels:
        mark = Text("✗", "against") if level.refused else Text(" ") if level.units == 0 else Text("✓", "ok")
        table.add_row(
            mark, Text(level.level, "title"), Text(words.number_text(level)), Text(words.refusal_text(level), "quiet")
        )
    labels = t.checks_table()
    t.check_row(
        labels, "labels", a.labels.holds,
        t.check_text(a.labels, "units zeroed in a real run: their writes changed by their parts"), a.labels.where,
    )  # fmt: skip
    return [t.heading("Levels", "units that a run can be split into"), table, t.heading("Certificate"), labels]


# --- shapes -----------------------------------------------------------------------------------------------


def _shapes(a: AnatomyDescription, width: int) -> list[RenderableType]:
    assert a.prompt is not None and a.shapes is not None
    parts: list[RenderableType] = [
        t.heading("Shapes", "every tensor of a real run, in the order of the data's way; weights in bold"),
        t.labelled("prompt", t.prompt_tokens(a.prompt["tokens"], -1)),
    ]
    for layers, rows in shape_groups(a.shapes):
        if layers:
            alike = f"   {len(layers)} blocks alike" if len(layers) > 1 else ""
            parts += [Text(), Text.assemble((layers_text(layers), "title"), (alike, "quiet"))]
        else:
            parts.append(Text())
        wide, unit = width >= WIDE, None
        table = t.grid(
            {"no_wrap": True, "style": "quiet", "min_width": 5}, {"no_wrap": True}, {"no_wrap": True},
            {"style": "quiet"}, {"style": "quiet"},
        )  # fmt: skip
        for row in rows:
            table.add_row(*_shape_cells(row, row.unit != unit, wide))
            unit = row.unit
        parts.append(table)
    return parts


def _shape_cells(row: ShapeRow, first: bool, wide: bool) -> list[RenderableType]:
    style = "title" if row.matrix else "for" if row.tensor == "stream" else ""
    cells = [Text(row.unit or "" if first else ""), Text(row.tensor, style), Text(sizes(row.shape), style)]
    axes = Text(f"[{', '.join(row.axes)}]")
    if wide:
        return [*cells, axes, Text(row.how)]
    return [*cells, axes if row.matrix else Text.assemble(axes, "\n", (row.how, "italic"))]
