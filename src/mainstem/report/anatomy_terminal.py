"""An anatomy for the terminal: sizes, blocks (alike ones once), readout, levels, and the trace of shapes."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mainstem.description import AnatomyDescription, NormRow, ReadRow, ShapeRow, StepRow, WriteRow
from mainstem.report import terminal as t
from mainstem.report.alike import BlockGroup, block_groups, layers_text, paths_text, shape_groups
from mainstem.report.text import compact, count, plural, sizes, span

WIDE = 100


def print_anatomy(console: Console, anatomy: AnatomyDescription) -> None:
    """Prints an anatomy, as wide as the console is."""
    a = anatomy
    console.print(*t.title_rows("anatomy", a.model, a.provenance), sep="\n")
    console.print(t.labelled("class", Text(f"{a.model['class']}, {count(a.model['parameters'])} parameters")))
    console.print(t.labelled("sizes", Text(sizes_text(a.sizes))))
    console.print(t.labelled("stream", Text(facts_text(a))))
    for part in [*_blocks(a), *_readout(a), *_levels(a)]:
        console.print(part)
    if a.shapes is not None:
        for part in _shapes(a, console.width):
            console.print(part)
    for part in t.notices(a.warnings, a.notes):
        console.print(part)
    console.print(t.provenance_line(a.provenance))


def sizes_text(values: dict[str, Any]) -> str:
    """All sizes that the model has, by the field's names; layer by layer where they differ."""
    shown = []
    for name, value in values.items():
        if value is not None and name != "n_layers":
            text = count(value) if isinstance(value, int) else "/".join(count(n) for n in value)
            shown.append(f"{name}={text}")
    return ", ".join(shown)


def facts_text(a: AnatomyDescription) -> str:
    """Embeddings, causality and positions in a sentence."""
    tied = "embedding and unembedding are one matrix" if a.tied else "embedding and unembedding are two matrices"
    causal = "causal" if a.causal else "not causal: attends both ways"
    return f"{tied}; {causal}; positions are {a.positions}"


# --- blocks -----------------------------------------------------------------------------------------------


def _blocks(a: AnatomyDescription) -> list[RenderableType]:
    parts: list[RenderableType] = [t.heading("Writes and reads", "in the order of execution; alike blocks once")]
    table = _parts_table()
    for write in a.writes:
        if write.layer is None:
            _add_write(table, write, [write.coefficient])
    parts += [table]
    for group in block_groups(a):
        parts += [Text(), _group_title(group), _group_table(group)]
    if a.stream:
        parts += [t.heading("On the stream itself", "what happens to it besides plain additions"), _stream(a)]
    return parts


def _group_title(group: BlockGroup) -> Text:
    line = Text.assemble((layers_text(group.layers), "title"))
    if len(group.layers) > 1:
        line.append(f"   {len(group.layers)} blocks alike", "quiet")
    line.append(f"   {paths_text(group.paths)}", "quiet")
    return line


def _parts_table() -> Table:
    last = {"overflow": "ellipsis", "no_wrap": True, "style": "quiet"}
    return t.grid({"no_wrap": True, "min_width": 5}, {"no_wrap": True, "style": "quiet"}, {}, {"no_wrap": True}, last)


def _group_table(group: BlockGroup) -> Table:
    """The data's way through each sublayer: norm, reads, write, and what the write passes before the addition."""
    table = _parts_table()
    for unit in dict.fromkeys(write.unit for write in group.writes):
        before = None
        for read in group.reads:
            if read.unit == unit:
                steps = read_steps(read)
                if steps != before:
                    table.add_row(Text(unit, "title"), "through", Text(steps, "quiet"))
                before = steps
                roles = ", ".join(read.roles)
                norm = "" if read.head_norm is None else f", then {norm_text(read.head_norm)} by head"
                table.add_row("", "reads", roles + norm, _matrix(read.matrix, read.bias), Text(read.module))
        for write, factors in zip(group.writes, group.factors, strict=True):
            if write.unit == unit:
                _add_write(table, write, factors, first=before is None)
    return table


def _matrix(shape: Sequence[int] | None, bias: bool) -> str:
    return "" if shape is None else sizes(shape) + (" + bias" if bias else "")


def read_steps(read: ReadRow) -> str:
    """What stands between the stream and what reads it."""
    steps = ([norm_text(read.norm)] if read.norm is not None else []) + [step_text(step) for step in read.factors]
    return ", ".join(steps) or "nothing: the stream as it is"


def tail_text(write: WriteRow, factors: Sequence[float]) -> str:
    """What a write passes before it is added: norms, gates, factors; empty for a plain addition."""
    tail = [step_text(step) for step in write.tail if step.kind != "factor" or step.dimensions is not None]
    if any(factor != 1.0 for factor in factors):
        tail.append(f"× {span(factors)}")
    return ", ".join(tail)


def _add_write(table: Table, write: WriteRow, factors: Sequence[float], first: bool = True) -> None:
    unit = Text(write.unit if first else "", "title")
    what = Text(writes_text(write), "title")
    table.add_row(unit, "writes", what, _matrix(write.matrix, write.bias), Text(write.module))
    if tail := tail_text(write, factors):
        table.add_row("", "through", Text(tail, "quiet"))
    for level, reason in write.refused.items():
        table.add_row("", "refused", Text(f"{level}: {reason}", "against"))


def writes_text(write: WriteRow) -> str:
    """What a write is a sum of."""
    if write.heads is not None:
        h = write.heads
        shared = "" if h.n_key_value_heads == h.n_heads else f" ({h.n_key_value_heads} key/value)"
        return f"{plural(h.n_heads, 'head')} of {h.d_head}{shared}"
    if write.experts:
        return "a sum over experts"
    if write.neurons is not None:
        expert = "" if write.shared_expert is None else f" of shared expert {write.shared_expert}"
        return plural(write.neurons, "neuron") + expert
    return "as a whole" if write.layer is not None else "a row for each token" if write.unit == "embed" else "a row"


def norm_text(norm: NormRow) -> str:
    """rms norm (gain 0.42 … 1.58)."""
    inside = [f"gain {span(norm.gain)}"] if norm.gain is not None else []
    inside += ["bias"] if norm.bias else []
    return f"{norm.kind} norm" + (f" ({', '.join(inside)})" if inside else "")


def step_text(step: StepRow) -> str:
    """A step of a tail in words."""
    if step.norm is not None:
        return norm_text(step.norm)
    if step.gate is not None:
        return f"a gate at {step.gate}"
    if step.dimensions is not None:
        return f"a factor per dimension ({span(step.dimensions)})"
    return f"× {compact(step.factor)}"


def _stream(a: AnatomyDescription) -> Table:
    table = t.grid({"no_wrap": True}, {})
    steps: dict[tuple[str, str], list[str]] = {}
    for row in a.stream:
        place = row.unit.partition(".")[2] or row.unit
        steps.setdefault((place, step_text(row.step)), []).append(row.unit)
    for (_, text), units in steps.items():
        where = units[0] if len(units) == 1 else f"{units[0]} … {units[-1]}"
        table.add_row(Text(f"with {where}"), Text(text, "quiet"))
    return table


# --- readout and levels -----------------------------------------------------------------------------------


def _readout(a: AnatomyDescription) -> list[RenderableType]:
    f, table = a.final, t.grid({"no_wrap": True}, {})
    if f.norm is not None:
        table.add_row("final norm", Text(f"{norm_text(f.norm)}, eps {f.norm.eps:.0e}"))
    else:
        table.add_row("final norm", Text("none"))
    if f.before is not None:
        table.add_row("projection", Text(sizes(f.before)))
    table.add_row("unembedding", Text(sizes(f.unembedding) + (" + bias" if f.bias else "")))
    if f.scale != 1.0:
        table.add_row("scale", Text(compact(f.scale)))
    if f.softcap is not None:
        table.add_row("softcap", Text(f"{compact(f.softcap)}: logits are c tanh(u / c)"))
    if f.opaque is not None:
        table.add_row("no direct attribution", Text(f.opaque, "against"))
    return [t.heading("Readout", "from the stream to the logits"), table]


def _levels(a: AnatomyDescription) -> list[RenderableType]:
    table = t.grid({"width": 1}, {"no_wrap": True}, {"justify": "right", "no_wrap": True}, {})
    for level in a.levels:
        mark = Text("✗", "against") if level.refused else Text("✓", "ok") if level.units else Text(" ")
        number = f"{count(level.units)}{' × sources' if level.per_source else ''}" if level.units else "none"
        reasons: dict[str, list[str]] = {}
        for refusal in level.refused:
            reasons.setdefault(refusal.reason, []).append(refusal.unit)
        why = "; ".join(f"refused at {_units_text(units)}: {reason}" for reason, units in reasons.items())
        table.add_row(mark, Text(level.level, "title"), Text(number), Text(why, "quiet"))
    labels = t.checks_table()
    t.check_row(
        labels, "labels", a.labels.holds,
        t.check_text(a.labels, "units zeroed in a real run: their writes changed by their parts"), a.labels.where,
    )  # fmt: skip
    return [t.heading("Levels", "units that a run can be split into"), table, t.heading("Certificate"), labels]


def _units_text(units: Sequence[str]) -> str:
    return ", ".join(units) if len(units) <= 3 else f"{units[0]}, {units[1]} … {units[-1]} ({len(units)} sublayers)"


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
