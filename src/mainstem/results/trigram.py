"""Heads by one skip trigram, as plain rows."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from mainstem.results.reading import CheckSummary, TabularReading


@dataclass(frozen=True)
class TrigramHeadRow:
    """A skip trigram in one head.

    Attributes:
        qk, ov: its entries in units of the tables' root mean square.
        score: their product, below 0 unless both are above.
        source_rank: of the source among all sources of the destination, from 1; out_rank: of the output among all
            outputs of the source.
        p: the part of the vocabulary that scores no less in the place of one of the three tokens; the largest of three.
        weakest: the token whose part that is: "source", "destination" or "out".
        q: the false discovery rate over heads at which it passes.
    """

    head: str
    qk: float
    ov: float
    score: float
    source_rank: int
    out_rank: int
    p: float
    weakest: str
    q: float


@dataclass(frozen=True)
class TrigramReading(TabularReading):
    """Which heads make `[source] ... [destination] -> [out]`.

    Attributes:
        source, destination, out: tokens; `ids`: theirs, in this order.
        offset: destination minus source, for rotary embedding.
        rate: the false discovery rate at which a head is found.
        found: the heads with a score above 0 and a q up to it.
        heads: all heads by falling score.
        top: how many a table or a page shows.
        factors: the certificate of the factored weights, on a run of the model.
        notes: conventions, limits, and heads that could not be had.
    """

    SCHEMA: ClassVar = "mainstem/trigram/1"
    COMMAND: ClassVar = "circuits"
    IN_CELLS: ClassVar = ("heads",)

    source: str
    destination: str
    out: str
    ids: list[int]
    offset: int
    rate: float
    found: list[str]
    heads: list[TrigramHeadRow]
    top: int
    factors: CheckSummary
    notes: list[str]

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each head."""
        for row in self.heads:
            yield asdict(row)
