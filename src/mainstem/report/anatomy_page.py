"""An anatomy as a page: sizes, what writes and what reads in each kind of block, the readout, levels, shapes."""

from collections.abc import Sequence

from mainstem.description import AnatomyDescription, ShapeRow, WriteRow
from mainstem.report import page as p
from mainstem.report.alike import BlockGroup, block_groups, layers_text, paths_text, shape_groups
from mainstem.report.anatomy_terminal import facts_text, norm_text, read_steps, step_text, tail_text, writes_text
from mainstem.report.text import compact, count, sizes

COLUMNS = 5


def anatomy_page(a: AnatomyDescription) -> str:
    """The page of an anatomy."""
    body = [
        p.model_line("anatomy", a.model, a.provenance),
        f"<h1>{p.esc(a.model['name'])}</h1>",
        f"<p>{p.esc(a.model['class'])}; {p.esc(facts_text(a))}.</p>",
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
    rows = []
    for write in a.writes:
        if write.layer is None:
            rows += _write_rows(write, [write.coefficient])
    for group in block_groups(a):
        rows += _group_rows(group)
    caption = "in the order of execution; blocks that are alike are shown once; matrices are [out, in]"
    return p.section("Writes and reads", p.esc(caption), p.table(heads, rows))


def _group_rows(group: BlockGroup) -> list[str]:
    alike = f" · {len(group.layers)} blocks alike" if len(group.layers) > 1 else ""
    title = (
        f'<td colspan="{COLUMNS}">{p.esc(layers_text(group.layers))}<span class="quiet">{alike} · '
        f"{p.esc(paths_text(group.paths))}</span></td>"
    )
    rows = [p.row(title, css="head")]
    for unit in dict.fromkeys(write.unit for write in group.writes):
        before = None
        for read in group.reads:
            if read.unit != unit:
                continue
            steps = read_steps(read)
            if steps != before:
                rows.append(_line(unit, "through", p.esc(steps)))
            before = steps
            norm = "" if read.head_norm is None else f", then {norm_text(read.head_norm)} by head"
            rows.append(
                _line("", "reads", p.esc(", ".join(read.roles) + norm), _matrix(read.matrix, read.bias), read.module)
            )
        for write, factors in zip(group.writes, group.factors, strict=True):
            if write.unit == unit:
                rows += _write_rows(write, factors, first=before is None)
    return rows


def _write_rows(write: WriteRow, factors: Sequence[float], first: bool = True) -> list[str]:
    what = f"<strong>{p.esc(writes_text(write))}</strong>"
    rows = [_line(write.unit if first else "", "writes", what, _matrix(write.matrix, write.bias), write.module)]
    if tail := tail_text(write, factors):
        rows.append(_line("", "through", p.esc(tail)))
    for level, reason in write.refused.items():
        rows.append(_line("", "refused", f'<span class="neg">{p.esc(f"{level}: {reason}")}</span>'))
    return rows


def _line(unit: str, verb: str, what: str, matrix: str = "", module: str = "") -> str:
    return p.row(
        p.cell(p.esc(unit), "unit"), p.cell(p.esc(verb), "quiet"), p.cell(what), p.cell(p.esc(matrix), "num"),
        p.cell(p.esc(module), "path"),
    )  # fmt: skip


def _matrix(shape: Sequence[int] | None, bias: bool) -> str:
    return "" if shape is None else sizes(shape) + (" + bias" if bias else "")


def _stream(a: AnatomyDescription) -> str:
    if not a.stream:
        return ""
    rows = [p.row(p.cell(p.esc(row.unit), "unit"), p.cell(p.esc(step_text(row.step)))) for row in a.stream]
    caption = "what happens to the stream besides plain additions"
    return p.section("On the stream itself", caption, p.table([("with", ""), ("", "")], rows))


# --- readout, levels, shapes ------------------------------------------------------------------------------


def _readout(a: AnatomyDescription) -> str:
    f = a.final
    entries = [("final norm", "none" if f.norm is None else f"{norm_text(f.norm)}, eps {f.norm.eps:.0e}")]
    if f.before is not None:
        entries.append(("projection", sizes(f.before)))
    entries.append(("unembedding", _matrix(f.unembedding, f.bias)))
    if f.scale != 1.0:
        entries.append(("scale", compact(f.scale)))
    if f.softcap is not None:
        entries.append(("softcap c", f"{compact(f.softcap)}: logits are c tanh(u / c)"))
    if f.opaque is not None:
        entries.append(("no direct attribution", f.opaque))
    listed = "".join(
        f'<div><dt>{p.esc(name)}</dt><dd class="words">{p.esc(value)}</dd></div>' for name, value in entries
    )
    return p.section("Readout", "from the stream to the logits", f'<dl class="facts">{listed}</dl>')


def _levels(a: AnatomyDescription) -> str:
    rows = []
    for level in a.levels:
        number = f"{count(level.units)}{' × sources' if level.per_source else ''}" if level.units else "none"
        reasons: dict[str, list[str]] = {}
        for refusal in level.refused:
            reasons.setdefault(refusal.reason, []).append(refusal.unit)
        why = "; ".join(f"refused at {', '.join(units)}: {reason}" for reason, units in reasons.items())
        cells = [p.cell(p.esc(level.level), "unit"), p.cell(p.esc(number), "num")]
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
        title = f'<td colspan="{COLUMNS}">{p.esc(name)}<span class="quiet">{alike}</span></td>'
        rows.append(p.row(title, css="head"))
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
