"""The frame of every HTML page, and its small parts: escaped text, tokens, cards, tables, notices, provenance.

A page is one file: style and script are inside it, a policy in its head forbids it to fetch anything, and without the
script it says the same. All text from a model or a user goes through `esc`. The result's JSON document is embedded, so
that a page that was saved can be read by a program, too.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from mainstem.report.text import SPACE, count, finite, gaps, scientific, sized, visible
from mainstem.results.reading import CheckSummary, Provenance

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
MOST_TOKENS = 400


def esc(text: object) -> str:
    """Text that may stand anywhere in a page."""
    return escape(str(text), quote=True)


def page(title: str, body: Iterable[str], provenance: Provenance, document: Mapping[str, Any]) -> str:
    """A whole page around its sections."""
    here = files("mainstem.report")
    names = ("figure.css", "page.css", "page.js")
    colours, sheet, script = (here.joinpath(name).read_text(encoding="utf-8") for name in names)
    # In a script element only "<" can end it or open a comment; JSON may write it as an escape.
    data = json.dumps(finite(dict(document)), ensure_ascii=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{esc(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="mainstem {esc(provenance.mainstem)}">',
            f"<title>{esc(title)}</title>",
            f"<style>\n{colours}{sheet}</style>",
            "</head>",
            "<body>",
            '<main id="top">',
            *body,
            footer(provenance),
            "</main>",
            f'<script type="application/json" id="document">{data}</script>',
            f"<script>\n{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def section(title: str, caption: str, *parts: str) -> str:
    """A section with its title and what it shows."""
    head = f"<h2>{esc(title)}</h2>" + (f'<p class="caption">{caption}</p>' if caption else "")
    return f"<section>{head}{''.join(parts)}</section>"


def token(text: str, classes: str = "") -> str:
    """A token, visibly: its spaces greyed, its direction of writing kept to itself."""
    shown = esc(visible(text)).replace(SPACE, f"<i>{SPACE}</i>")
    return f'<bdi class="tok {classes}">{shown}</bdi>' if classes else f'<bdi class="tok">{shown}</bdi>'


def chips(tokens: Sequence[str]) -> str:
    """Tokens side by side."""
    return " ".join(token(one, "chip") for one in tokens)


def prompt(tokens: Sequence[str], position: int | None, answer: str = "") -> str:
    """The prompt's tokens with their positions, the destination marked, and what follows it."""
    items = []
    keep = [] if position is None else [position]
    for place in gaps(range(len(tokens)), keep, MOST_TOKENS):
        if place is None:
            items.append('<li class="arrow">…</li>')
            continue
        here = ' class="here" aria-current="true"' if place == position else ""
        items.append(f'<li{here}><span class="n">{place}</span>{token(tokens[place])}</li>')
        if place == position and answer:
            items.append(f'<li class="arrow" aria-hidden="true">→</li><li class="answer">{answer}</li>')
    return f'<ul class="prompt">{"".join(items)}</ul>'


def facts(entries: Iterable[tuple[str, str]]) -> str:
    """A row of numbers with their names; values are HTML."""
    return f'<dl class="facts">{"".join(f"<div><dt>{esc(n)}</dt><dd>{v}</dd></div>" for n, v in entries)}</dl>'


def card(name: str, holds: bool, text: str, numbers: str, where: str | None) -> str:
    """A certificate: a tick, what was compared, and the numbers; or where it does not hold."""
    mark = "✓" if holds else "✗"
    failed = "" if holds else f"<p><strong>does not hold{f' at {esc(where)}' if where else ''}</strong></p>"
    return (
        f'<div class="card{"" if holds else " broken"}"><h3><span class="mark">{mark}</span>{esc(name)}</h3>{failed}'
        f'<p>{esc(text)}</p><p class="numbers">{esc(numbers)}</p></div>'
    )


def check_card(name: str, check: CheckSummary, checked: str) -> str:
    """A certificate that compares several things."""
    if not check.checked:
        return card(name, check.holds, "nothing to check in this model", "", check.where)
    numbers = f"worst relative error {scientific(check.worst)}, tolerance {scientific(check.tolerance)}"
    return card(name, check.holds, f"{count(check.checked)} {checked}", numbers, check.where)


def bar(value: float, full: float, left: float = 1.0) -> str:
    """A bar around a middle: to the right for, to the left against.

    Args:
        value: what is drawn.
        full: the value of a bar as long as the right side.
        left: how long the left side is, as a part of the right one.
    """
    side = 1.0 if value >= 0 else left
    share = 0.0 if not full > 0 or not side > 0 else min(abs(value) / full / side, 1.0) * 100
    width = f'style="width:{share:.1f}%"'
    against, towards = ("", f'<span class="r" {width}></span>')
    if value < 0:
        against, towards = f'<span class="l" {width}></span>', ""
    room = "" if left == 1.0 else f' style="--l:{left:.3f}fr"'
    return (
        f'<div class="bar" aria-hidden="true"{room}>{against or "<span></span>"}<span class="axis"></span>'
        f"{towards or '<span></span>'}</div>"
    )


def table(heads: Sequence[tuple[str, str]], rows: Iterable[str], css: str = "") -> str:
    """A table of the class `css`; heads are (HTML, class), rows are whole `tr` elements."""
    cells = "".join(_head(html, own, css == "sortable") for html, own in heads)
    kind = f' class="{css}"' if css else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _head(html: str, css: str, sortable: bool) -> str:
    inside = f'<button type="button">{html}</button>' if sortable and html else html
    return f'<th scope="col" class="{css}">{inside}</th>' if css else f'<th scope="col">{inside}</th>'


def cell(html: str, css: str = "", sort: object = None) -> str:
    """A table's cell; `sort` is what it is sorted by."""
    key = "" if sort is None else f' data-sort="{esc(sort)}"'
    return f'<td class="{css}"{key}>{html}</td>' if css else f"<td{key}>{html}</td>"


def row(*cells: str, css: str = "") -> str:
    """A table's row."""
    return f'<tr class="{css}">{"".join(cells)}</tr>' if css else f"<tr>{''.join(cells)}</tr>"


def notices(warnings: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Warnings with their codes, and notes; nothing if there are none."""
    if not warnings and not notes:
        return ""
    items = [f"<li><code>{esc(w['code'])}</code><span>{esc(w['text'])}</span></li>" for w in warnings]
    items += [f'<li class="note"><code>note</code><span>{esc(note)}</span></li>' for note in notes]
    caption = "what a reader of these numbers should know" if warnings else ""
    return section("Warnings" if warnings else "Notes", caption, f'<ul class="notices">{"".join(items)}</ul>')


def model_line(command: str, model: Mapping[str, Any], p: Provenance) -> str:
    """The line above the title: what this is, of which model, how precisely."""
    words = [f"mainstem {command}", model["name"], *sized(model)]
    return f'<p class="kicker">{esc(" · ".join([*words, f"{p.dtype} on {p.device}"]))}</p>'


def footer(p: Provenance) -> str:
    """What made the page, from what, and when."""
    entries = {name: ", ".join(map(str, v)) if isinstance(v, list) else v for name, v in asdict(p).items()}
    listed = "".join(
        f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in entries.items() if value is not None
    )
    return f"<footer><strong>Provenance</strong><dl>{listed}</dl></footer>"
