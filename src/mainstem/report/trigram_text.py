"""Heads by a skip trigram in words: what the table for the terminal and the page both say."""

from mainstem.report.text import count, plain, visible
from mainstem.results.trigram import TrigramHeadRow, TrigramReading

COLUMNS = ("head", "QK", "source rank", "OV", "out rank", "product", "p", "weakest", "q")


def asked(r: TrigramReading) -> str:
    """The skip trigram."""
    source, destination, out = (visible(token) for token in (r.source, r.destination, r.out))
    return f"[{source}] ... [{destination}] -> [{out}]"


def found_text(r: TrigramReading) -> str:
    """How many heads make it."""
    named = f": {', '.join(r.found)}" if r.found else ""
    return f"{count(len(r.found))} of {count(len(r.heads))} heads at a false discovery rate of {r.rate:g}{named}"


def judged(r: TrigramReading) -> str:
    """What p and q are."""
    return (
        "rank: of the source among the destination’s, of the output among the source’s; p: each of the three tokens in "
        "turn replaced by every other, the largest part that scores no less, and whose it is (weakest); q: false "
        f"discovery rate over heads; offset {r.offset}"
    )


def cells(row: TrigramHeadRow) -> list[str]:
    """A head's cells, in the order of `COLUMNS`."""
    return [
        row.head,
        plain(row.qk),
        count(row.source_rank),
        plain(row.ov),
        count(row.out_rank),
        plain(row.score),
        f"{row.p:.2g}",
        row.weakest,
        f"{row.q:.2g}",
    ]
