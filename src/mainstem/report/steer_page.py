"""A comparison as a page: both texts side by side, each token with its probability, and continuations."""

import math

from mainstem.report import page as p
from mainstem.report.steer_text import choosing, divergence, ending, how_written, mean_text, ratio_text
from mainstem.report.text import probability, shortened, signed, visible, visible_or
from mainstem.results.generation import Compared, Generated, Likelihood


def comparison_page(c: Compared) -> str:
    """The page of a comparison."""
    tokens = c.prompt["tokens"]
    body = [
        p.model_line("steer", c.model, c.provenance),
        "<h1>What it writes, without and with the edits</h1>",
        p.prompt(tokens, len(tokens) - 1),
        p.section("Edits", "in the order in which they are made", _edits(c)),
        p.section("Texts", p.esc(f"{choosing(c)}; each token’s probability in its title; {divergence(c)}"), _texts(c)),
        _continuations(c),
        p.notices(c.warnings, c.notes),
    ]
    title = f"Steering “{shortened(visible_or(''.join(tokens)), 60)}”, {c.model['name']}"
    return p.page(title, body, c.provenance, c.as_dict())


def _edits(c: Compared) -> str:
    if not c.edits:
        return '<p class="quiet">none</p>'
    return f'<ol class="edits">{"".join(f"<li><code>{p.esc(visible_or(edit))}</code></li>" for edit in c.edits)}</ol>'


def _texts(c: Compared) -> str:
    sides = [("without", c.plain, ""), ("with the edits", c.edited, "steered")]
    return f'<div class="sides">{"".join(_side(name, made, c.same, css) for name, made, css in sides)}</div>'


def _side(name: str, made: Generated, same: int, css: str) -> str:
    words = []
    for i, (token, log_p) in enumerate(zip(made.tokens, made.log_probabilities, strict=True)):
        shown = p.esc(visible_or(token))
        title = f"{visible(token)}: p {probability(math.exp(log_p))}"
        tag = "mark" if i >= same else "span"
        words.append(f'<{tag} title="{p.esc(title)}">{shown}</{tag}>')
    about = f"{ending(made)}; {mean_text(made)}; {how_written(made)}"
    return (
        f'<div class="card {css}"><h3>{p.esc(name)}</h3><p class="written"><bdi>{"".join(words)}</bdi></p>'
        f'<p class="numbers">{p.esc(about)}</p></div>'
    )


def _continuations(c: Compared) -> str:
    if not c.continuations:
        return ""
    heads = [("text", ""), ("p without", "num"), ("p with", "num"), ("ratio", "num"), ("nats", "num")]
    caption = "the probability of the whole text right after the prompt: its tokens’ probabilities multiplied"
    return p.section("Continuations", p.esc(caption), p.table(heads, [_likelihood(row) for row in c.continuations]))


def _likelihood(row: Likelihood) -> str:
    css = "num pos" if row.edited > row.plain else "num neg"
    return p.row(
        p.cell(p.chips(row.tokens)),
        p.cell(p.esc(probability(math.exp(row.plain))), "num"),
        p.cell(p.esc(probability(math.exp(row.edited))), "num"),
        p.cell(p.esc(ratio_text(row)), css),
        p.cell(p.esc(signed(row.edited - row.plain)), css),
    )
