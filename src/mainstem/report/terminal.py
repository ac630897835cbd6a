"""What all tables for the terminal share: styles, headings, the prompt's tokens, warnings, provenance.

Colours say little that words do not: without them (a pipe, NO_COLOR, a monochrome terminal) nothing is lost. Two hues
stand for and against, chosen to be told apart by every eye and read on dark and on light; red is for failures only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from mainstem.report.text import count, gaps, plural, scientific, shortened, sized, visible, visible_or
from mainstem.results.reading import CheckSummary, Provenance

THEME = Theme(
    {
        "title": "bold",
        "head": "bold color(31)",
        "for": "color(31)",
        "against": "color(166)",
        "quiet": "dim",
        "token": "bold",
        "here": "bold reverse",
        "ok": "bold color(71)",
        "fail": "bold red",
        "warn": "bold color(166)",
    }
)
LINED = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
"""Columns with a line under their heads, and nothing else."""

MOST_TOKENS = 96
LABEL = 9


def terminal(file: Any = None, width: int | None = None, colour: bool | None = None) -> Console:
    """A console for reports; markup, emoji codes and highlighting are off, because tokens may look like them.

    Args:
        file: where to write; standard output by default.
        width: columns; by default the terminal's, or 80 (COLUMNS) where there is none.
        colour: False for none, True for always; by default what the terminal and NO_COLOR say.
    """
    return Console(
        file=file, width=width, theme=THEME, markup=False, emoji=False, highlight=False, soft_wrap=False,
        no_color=colour is False, force_terminal=True if colour else None,
    )  # fmt: skip


def grid(*columns: Mapping[str, Any], expand: bool = False) -> Table:
    """A table without lines; each column is a set of rich's options."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, expand=expand)
    for options in columns:
        table.add_column(**{"overflow": "fold", **options})
    return table


def lined(caption: Text | None = None, expand: bool = False) -> Table:
    """A table with a line under its heads; add columns to it."""
    return Table(
        box=LINED, padding=(0, 1), pad_edge=False, collapse_padding=True, expand=expand, header_style="quiet",
        caption=caption, caption_justify="left", caption_style="quiet",
    )  # fmt: skip


def heading(title: str, caption: str = "") -> Group:
    """A section's title and, under it, what it shows and under which norm and score."""
    lines: list[RenderableType] = [Text(), Text(title, "head")]
    if caption:
        lines.append(Text(caption, "quiet"))
    return Group(*lines)


def title_rows(command: str, model: Mapping[str, Any], provenance: Provenance) -> list[RenderableType]:
    """The first lines: what this is, of which model, how precisely."""
    size = [", ".join(sized(model))] if sized(model) else []
    about = Text.assemble((model["name"], "title"))
    about.append("".join(f"   {part}" for part in [*size, f"{provenance.dtype} on {provenance.device}"]))
    return [Text(f"mainstem {command}", "head"), labelled("model", about)]


def labelled(label: str, value: RenderableType) -> Table:
    """A row of the header: a label and what stands behind it, wrapped under itself."""
    table = grid({"width": LABEL, "style": "quiet", "no_wrap": True}, {})
    table.add_row(label, value)
    return table


def token_text(token: str, style: str = "token", most: int = 60) -> Text:
    """A token, visibly."""
    return Text.assemble((shortened(visible(token), most), style))


def prompt_tokens(tokens: Sequence[str], position: int) -> Text:
    """All tokens with their positions, the destination marked; the middle of a very long prompt is left out."""
    line = Text()
    for place in gaps(range(len(tokens)), [position], MOST_TOKENS):
        if place is None:
            line.append("…  ", "quiet")
            continue
        line.append(f"{place} ", "quiet")
        if place == position:
            line.append(f"[{shortened(visible(tokens[place]), 40)}]", "here")
        else:
            line.append(shortened(visible(tokens[place]), 40))
        line.append("  ")
    line.rstrip()
    return line


def prompt_row(prompt: Mapping[str, Any], position: int, what: str) -> Group:
    """The tokens that the model was given, and which of them is the destination."""
    tokens = prompt["tokens"]
    where = Text(f"{plural(len(tokens), 'token')}; {what} at position {position}, ", "quiet")
    where.append_text(token_text(tokens[position], "quiet"))
    return Group(labelled("prompt", prompt_tokens(tokens, position)), labelled("", where))


def check_row(table: Table, name: str, holds: bool, text: Text, where: str | None = None) -> None:
    """A certificate's line: a tick and numbers, or where it does not hold."""
    mark = Text("✓", "ok") if holds else Text("✗", "fail")
    if not holds:
        text = Text.assemble(("does not hold", "fail"), (f" at {where}" if where else "", "fail"), "; ", text)
    table.add_row(mark, Text(name, "title"), text)


def checks_table() -> Table:
    """A table for `check_row`."""
    return grid({"width": 1}, {"width": 6}, {})


def check_text(check: CheckSummary, checked: str) -> Text:
    """What was checked, the worst error and its tolerance."""
    if not check.checked:
        return Text("nothing to check in this model", "quiet")
    return Text.assemble(
        f"{count(check.checked)} {checked}",
        (f": worst error {scientific(check.worst)}, tolerance {scientific(check.tolerance)}", "quiet"),
    )


def notices(warnings: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> list[RenderableType]:
    """Warnings with their codes, and notes; nothing if there are none."""
    if not warnings and not notes:
        return []
    table = grid({"width": 1}, {"no_wrap": True}, {})
    for warning in warnings:
        table.add_row(Text("!", "warn"), Text(warning["code"], "title"), Text(warning["text"]))
    for note in notes:
        table.add_row(Text("i", "for"), Text("note", "title"), Text(visible_or(note)))
    return [heading("Warnings" if warnings else "Notes"), table]


def provenance_line(p: Provenance) -> Padding:
    """The last line: what made this, from what, when."""
    revision = f" ({p.revision})" if p.revision else ""
    text = (
        f"mainstem {p.mainstem}, torch {p.torch}, transformers {p.transformers}; "
        f"{p.model}{revision}, seed {p.seed}, {p.date}"
    )
    return Padding(Text(text, "quiet"), (1, 0, 0, 0))


def token_list(tokens: Sequence[str]) -> Text:
    """Tokens side by side, each visible; two spaces part them."""
    return Text("  ".join(visible(token) for token in tokens), no_wrap=True, overflow="ellipsis")
