"""An anatomy as a page: sizes, what writes and what reads in each kind of block, the readout, levels, shapes."""

from mainstem.report import anatomy_text as words
from mainstem.report import page as p
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

COLUMNS = 5


def anatomy_page(a: AnatomyDescription) -> str:
    """The page of an anatomy."""
    body = [
        p.model_line("anatomy", a.model, a.provenance),
        f"<h1>{p.esc(a.model['name'])}</h1>",
        f"<p>{p.esc(a.model['class'])}; {p.esc(words.facts_text(a))}.</p>",
        _facts(a),
        _parts(a),
        _stream(a),
        _readout(a),
        _levels(a),
        _shapes(a),
        p.notices(a.warnings, a.notes),
    ]
    return p.page(f"Anatomy of {a.model['name']}", body, a.provenance, a.as_dict())


def _facts(a: AnatomyDescription) -> str:
    entries = [("parameters", count(a.model["parameters"]))]
    for name, value in a.sizes.items():
        if value is not None:
            entries.append((name, count(value) if isinstance(value, int) else " / ".join(map(count, value))))
    return p.facts([(name, p.esc(value)) for name, value in entries])


# --- writes and reads -------------------------------------------------------------------------------------


def _parts(a: AnatomyDescription) -> str:
    heads = [("", ""), ("", ""), ("what", ""), ("matrix", "num"), ("module", "")]
    rows = [_line(line) for line in words.embedding_lines(a)]
    for group in block_groups(a):
        rows.append(_group_title(group))
        rows += [_line(line) for line in words.block_lines(group)]
    caption = "in the order of execution; blocks that are alike are shown once; matrices are [out, in]"
    return p.section("Writes and reads", p.esc(caption), p.table(heads, rows))


def _group_title(group: BlockGroup) -> str:
    alike = f" · {len(group.layers)} blocks alike" if len(group.layers) > 1 else ""
    about = f"{alike} · {paths_text(group.paths)}"
    return _head(layers_text(group.layers), about)


def _head(title: str, about: str) -> str:
    """A row that begins a group of rows."""
    return p.row(f'<td colspan="{COLUMNS}">{p.esc(title)}<span class="quiet">{p.esc(about)}</span></td>', css="head")


def _line(line: words.Line) -> str:
    what = p.esc(line.what)
    if line.verb in ("writes", "refused"):
        what = f"<strong>{what}</strong>" if line.verb == "writes" else f'<span class="neg">{what}</span>'
    return p.row(
        p.cell(p.esc(line.unit), "unit"), p.cell(p.esc(line.verb), "quiet"), p.cell(what),
        p.cell(p.esc(line.matrix), "num"), p.cell(p.esc(line.module), "path"),
    )  # fmt: skip


def _stream(a: AnatomyDescription) -> str:
    if not a.stream:
        return ""
    rows = [
        p.row(p.cell(p.esc(units_text(units)), "unit"), p.cell(p.esc(words.step_text(step, factors))))
        for units, step, factors in stream_groups(a)
    ]
    caption = "what happens to the stream besides plain additions"
    return p.section("On the stream itself", caption, p.table([("with", ""), ("", "")], rows))


# --- readout, levels, shapes ------------------------------------------------------------------------------


def _readout(a: AnatomyDescription) -> str:
    listed = "".join(
        f'<div><dt>{p.esc(name)}</dt><dd class="words">{p.esc(value)}</dd></div>'
        for name, value in words.readout_entries(a)
    )
    return p.section("Readout", "from the stream to the logits", f'<dl class="facts">{listed}</dl>')


def _levels(a: AnatomyDescription) -> str:
    rows = []
    for level in a.levels:
        why = words.refusal_text(level)
        cells = [p.cell(p.esc(level.level), "unit"), p.cell(p.esc(words.number_text(level)), "num")]
        rows.append(p.row(*cells, p.cell(p.esc(why), "neg" if why else "")))
    card = p.check_card("labels", a.labels, "units zeroed in a real run: their writes changed by their parts")
    table = p.table([("level", ""), ("units", "num"), ("", "")], rows, "account")
    return p.section("Levels", "what a run can be split into", table, f'<p></p><div class="cards">{card}</div>')


def _shapes(a: AnatomyDescription) -> str:
    if a.shapes is None or a.prompt is None:
        return ""
    rows = []
    for layers, shapes in shape_groups(a.shapes):
        name = layers_text(layers) or ("Readout" if rows else "Embedding")
        alike = f" · {len(layers)} blocks alike" if len(layers) > 1 else ""
        rows.append(_head(name, alike))
        unit = None
        for shape in shapes:
            rows.append(_shape_row(shape, shape.unit != unit))
            unit = shape.unit
    heads = [("", ""), ("tensor", ""), ("shape", ""), ("axes", ""), ("how", "")]
    caption = "every tensor of a real run of this prompt, in the order of the data's way; weights in bold"
    return p.section("Shapes", caption, p.prompt(a.prompt["tokens"], None), p.table(heads, rows))


def _shape_row(shape: ShapeRow, first: bool) -> str:
    strong = "weights" if shape.matrix else "pos" if shape.tensor == "stream" else ""
    return p.row(
        p.cell(p.esc(shape.unit or "") if first else "", "quiet"), p.cell(p.esc(shape.tensor), strong),
        p.cell(p.esc(sizes(shape.shape))), p.cell(p.esc(f"[{', '.join(shape.axes)}]"), "path"),
        p.cell(p.esc(shape.how), "quiet"),
    )  # fmt: skip
