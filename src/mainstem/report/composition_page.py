"""Compositions as a page: a heat map of layers and a graph of the pairs above the null, for each kind, and a table."""

from mainstem.report import composition_text as words
from mainstem.report import page as p
from mainstem.report.drawing import WIDTH, svg
from mainstem.report.heatmap import heatmap
from mainstem.report.text import plain, signed
from mainstem.results.composition import CompositionReading, KindRow, PairRow

ROW, TOP = 26.0, 20.0


def composition_page(r: CompositionReading) -> str:
    """The page of compositions."""
    body = [
        p.model_line("circuits", r.model, r.provenance),
        "<h1>Who reads what whom wrote, from the weights</h1>",
        f'<p class="caption">{p.esc(words.what_is_shown(r))}.</p>',
        p.section("Nulls", p.esc(words.judged(r))),
        *(part for row in r.kinds for part in _kind(row, r)),
        p.section("Certificates", p.esc(words.certificate_text(r))),
        p.notices(r.warnings, r.notes),
    ]
    return p.page(f"Composition in {r.model['name']}", body, r.provenance, r.as_dict())


def _kind(row: KindRow, r: CompositionReading) -> list[str]:
    pairs = [pair for pair in r.pairs if pair.kind == row.kind]
    above = [pair for pair in pairs if pair.q <= r.rate]
    heads = [(p.esc(name), "" if i < 2 else "num") for i, name in enumerate(words.PAIR_COLUMNS)]
    lines = [
        p.row(*(p.cell(p.esc(cell), "mono" if i < 2 else "num") for i, cell in enumerate(words.pair_cells(pair))))
        for pair in pairs
    ]
    caption = "the strongest composition of each layer with each, above a random rotation’s; below the diagonal the "
    caption += "writer comes first, above it the pairs are impossible and show the null"
    return [
        p.section(
            words.title(row, r),
            p.esc(f"{words.kind_text(row, r)}. {words.shared_text(r, row.kind)}"),
            _map(r.layers[row.kind], row.kind),
            p.esc(caption),
        ),
        p.section("Above the null", "" if above else "none of the pairs listed is above the null", _graph(above)),
        p.section("Strongest pairs", "", p.table(heads, lines)),
    ]


def _map(layers: list[list[float | None]], kind: str) -> str:
    names = [f"L{i}" for i in range(len(layers))]
    full = max((abs(value) for row in layers for value in row if value is not None), default=0.0) or 1.0

    def shown(i: int, j: int) -> str:
        return f"L{i} reads L{j}: {signed(layers[i][j], 3)}"

    return heatmap(names, names, layers, full, lambda x: plain(x), shown, f"{kind}-composition by layer")


def _graph(pairs: list[PairRow]) -> str:
    """Writers on the left, readers on the right, a line for each pair, as wide as its composition."""
    if not pairs:
        return ""
    writers, readers = (
        list(dict.fromkeys(names)) for names in zip(*((a.writer, a.reader) for a in pairs), strict=True)
    )
    left, right = WIDTH * 0.3, WIDTH * 0.7
    full = max(pair.composition for pair in pairs)
    parts = []
    for pair in pairs:
        y0, y1 = (TOP + ROW * names.index(name) for names, name in ((writers, pair.writer), (readers, pair.reader)))
        middle, width = (left + right) / 2, 6 * pair.composition / full
        said = f"{pair.reader} reads {pair.writer}: {pair.composition:.3f}, z {pair.z:.0f}"
        parts.append(
            f'<path class="lead" fill="none" stroke-width="{width:.1f}" d="M{left:.1f} {y0:.1f} C{middle:.1f} {y0:.1f} '
            f'{middle:.1f} {y1:.1f} {right:.1f} {y1:.1f}"><title>{p.esc(said)}</title></path>'
        )
    for names, x, anchor in ((writers, left - 8, "end"), (readers, right + 8, "start")):
        parts += [
            f'<text class="mono" x="{x:.1f}" y="{TOP + ROW * i + 4:.1f}" text-anchor="{anchor}">{p.esc(name)}</text>'
            for i, name in enumerate(names)
        ]
    height = TOP + ROW * max(len(writers), len(readers))
    return svg(height, f"{len(pairs)} pairs above the null: writers left, readers right", parts)
