"""Heads by one skip trigram, as plain rows."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mainstem.results.explanation import CheckSummary, Provenance


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
class TrigramReading:
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

    provenance: Provenance
    warnings: list[dict[str, Any]]
    model: dict[str, Any]
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

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        return {"schema": "mainstem/trigram/1", "command": "circuits", **asdict(self)}

    def about(self) -> dict[str, Any]:
        """The document without what stands in the cells."""
        return {name: value for name, value in self.as_dict().items() if name != "heads"}

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each head."""
        for row in self.heads:
            yield asdict(row)
