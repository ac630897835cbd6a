"""What heads do, as a page: for each behaviour a map of all heads and the first of them, then what ablation says."""

from mainstem.report import heads_text as words
from mainstem.report import page as p
from mainstem.report.heatmap import heatmap
from mainstem.report.text import count, plain, scientific, signed
from mainstem.results.heads import BehaviourReading, HeadRow, HeadsReading

MAP_WIDTH = 540
SMALLEST = 0.005


def heads_page(r: HeadsReading) -> str:
    """The page of a model's heads."""
    body = [
        p.model_line("heads", r.model, r.provenance),
        "<h1>What each head looks at</h1>",
        f"<p>{p.esc(words.random_text(r))}.</p>",
        f"<p>{p.esc(words.sinks_text(r).capitalize())}.</p>",
        _facts(r),
        *(_behaviour(r, name) for name in dict.fromkeys(one.name for one in r.behaviours)),
        _ablations(r),
        p.section("In-context learning", p.esc(words.in_context_text(r))),
        p.notices(r.warnings, r.notes),
    ]
    return p.page(f"Heads of {r.model['name']}", body, r.provenance, r.as_dict())


def _facts(r: HeadsReading) -> str:
    found = [(words.TITLES[one.name].lower(), one) for one in r.behaviours if one.data == "random"]
    entries = [("heads", p.esc(count(r.count)))]
    entries += [(name, p.esc(count(len(one.found())))) for name, one in found]
    return p.facts(entries)


def _behaviour(r: HeadsReading, name: str) -> str:
    """One behaviour on each kind of text side by side: map above, table below."""
    sides = []
    for one in r.behaviours:
        if one.name == name:
            caption = f'<p class="caption">{p.esc(words.summary(one))}</p>'
            sides.append(f"<div><h3>on {p.esc(words.TEXTS[one.data])}</h3>{_map(one)}{caption}{_table(r, one)}</div>")
    return p.section(words.TITLES[name], p.esc(words.MEANINGS[name]), f'<div class="sides maps">{"".join(sides)}</div>')


def _map(one: BehaviourReading) -> str:
    by_place = {(row.layer, row.index): row for row in one.heads}
    layers = sorted({row.layer for row in one.heads})
    columns = range(1 + max(row.index for row in one.heads))
    chosen = [[by_place.get((layer, index)) for index in columns] for layer in layers]
    lowest = -1.0 if one.name.startswith("copying") else 0.0
    values = [[None if row is None else (row.score - lowest) / (1 - lowest) for row in line] for line in chosen]

    def said(i: int, j: int) -> str:
        row = chosen[i][j]
        return "" if row is None else f"{row.head}: {plain(row.score)}, rank {row.rank}{', found' * row.found}"

    def number(share: float | None) -> str:
        score = lowest + (1 - lowest) * (share or 0.0)
        return "·" if abs(score - lowest) < SMALLEST else f"{score:.2f}".replace("0.", ".", 1).replace("-", "−")

    names = [f"H{index}" for index in columns]
    least = plain(lowest) if lowest else "0"
    label = f"{words.TITLES[one.name]} of each head on {words.TEXTS[one.data]}, layers by heads"
    return heatmap([f"L{layer}" for layer in layers], names, values, 1.0, number, said, label, MAP_WIDTH, least)


def _table(r: HeadsReading, one: BehaviourReading) -> str:
    seen = any(row.without_sink is not None for row in one.heads)
    control = any(row.control is not None for row in one.heads)
    sink = any(row.sink is not None for row in one.heads)
    heads = [("rank", "num"), ("head", ""), ("score", "num")]
    heads += [("control", "num")] if control else []
    heads += [("null", "num")]
    heads += [("sink", "num")] if sink else []
    heads += [("without", "num"), ("rank so", "num")] if seen else []
    heads += [("q", "num")]
    return p.table(heads, [_row(row, control, sink, seen) for row in words.rows(r, one)])


def _row(row: HeadRow, control: bool, sink: bool, seen: bool) -> str:
    cells = [p.cell(str(row.rank), "num"), p.cell(p.esc(row.head), "unit")]
    cells.append(p.cell(p.esc(plain(row.score)), "num pos" if row.found else "num"))
    cells += [p.cell(p.esc(plain(row.control)), "num")] if control else []
    cells.append(p.cell(p.esc(plain(row.null)), "num"))
    cells += [p.cell(p.esc(plain(row.sink)), "num")] if sink else []
    cells += [p.cell(p.esc(plain(row.without_sink)), "num"), p.cell(str(row.rank_without_sink), "num")] if seen else []
    return p.row(*cells, p.cell(p.esc(scientific(row.q)), "num"))


def _ablations(r: HeadsReading) -> str:
    if not r.ablations:
        return ""
    heads = [
        ("heads of", ""),
        ("by", ""),
        ("repeated", "num"),
        ("first copy", "num"),
        ("random heads", "num"),
        ("", ""),
    ]
    lines = []
    for row in r.ablations:
        control = row.control.repeated
        css = "num pos" if row.repeated > max(control) else "num"
        lines.append(
            p.row(
                p.cell(f'{p.esc(row.behaviour)}<br><span class="quiet">{p.esc(", ".join(row.heads))}</span>'),
                p.cell(p.esc(row.method)),
                p.cell(p.esc(signed(row.repeated)), css),
                p.cell(p.esc(signed(row.first)), "num"),
                p.cell(p.esc(f"{signed(min(control))} … {signed(max(control))}"), "num"),
                p.cell(p.esc(words.ablation_text(row)), "quiet"),
            )
        )
    caption = (
        "by how many nats the loss of a token rises on the second copy of random tokens, and on the first; random "
        "heads: as many of the same layers, the least and the most over draws, on the second copy"
    )
    return p.section("Heads taken out together", p.esc(caption), p.table(heads, lines, "prose"))
