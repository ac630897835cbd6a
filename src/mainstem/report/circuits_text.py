"""Circuits of a head in words: what the table for the terminal and the page both say."""

from mainstem.report.text import count, plain, scientific, visible
from mainstem.results.circuits import AskedRow, CircuitReading, NamedRatio, TableSummary

TITLES = {
    "qk": ("QK circuit", "which source a destination looks at"),
    "ov": ("OV circuit", "what a source promotes once it is looked at"),
}
COLUMNS = {"qk": ("source", "destination"), "ov": ("source", "out")}


def shown(r: CircuitReading) -> str:
    """What the tables are of."""
    through = "as they are" if r.embedding == "plain" else "each at its own scale of the head’s norm"
    return f"embeddings {through}, unembedding with the final norm’s gain; offset {r.offset}; no norm scales, no biases"


def table_text(table: TableSummary) -> str:
    """How far a table's entries are to be believed."""
    return (
        f"in units of the root mean square, {plain(table.size, 4)}; after random rotations of its factors at most "
        f"{table.rate:.0%} have any entry above {plain(table.level)}; exact within {scientific(table.slack)}, "
        f"{table.computed:.0%} of the table computed"
    )


def copying_text(r: CircuitReading) -> str:
    """Both copying scores in one sentence."""
    c = r.copying
    which = "all" if c.tokens >= round(c.top / c.chance) else "evenly spaced over the vocabulary"
    return (
        f"eigenvalues {c.eigenvalues:+.2f} (1 copies, -1 erases); of {count(c.tokens)} tokens ({which}) "
        f"{c.among_top:.1%} are "
        f"among the {c.top} they promote most (by chance {c.chance:.2%}), median rank {plain(c.median_rank, 1)}"
    )


def asked_text(asked: AskedRow) -> str:
    """The skip trigram that was asked for."""
    names = [visible(token) for token in (asked.source, asked.destination, asked.out)]
    return (
        f"[{names[0]}] ... [{names[1]}] -> [{names[2]}]: QK {plain(asked.qk)}, source {count(asked.source_rank)}. of "
        f"the destination’s; OV {plain(asked.ov)}, output {count(asked.out_rank)}. of the source’s"
    )


def named(tokens: list[NamedRatio]) -> str:
    """Tokens with their ratios."""
    return ", ".join(f"{visible(token.token)} {plain(token.ratio, 1)}" for token in tokens)
