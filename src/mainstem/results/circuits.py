"""Circuits of a head between tokens as plain rows."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from mainstem.results.reading import CheckSummary, TabularReading


@dataclass(frozen=True)
class EntryRow:
    """One entry of a table: QK from a destination to a source, OV from a source to an output.

    Attributes:
        circuit: "qk" or "ov".
        token, id: the destination, or the output.
        source, source_id: the source.
        value: the entry, above the mean source or output.
        ratio: the same in units of the table's root mean square.
    """

    circuit: str
    token: str
    id: int
    source: str
    source_id: int
    value: float
    ratio: float


@dataclass(frozen=True)
class TableSummary:
    """One table as a whole.

    Attributes:
        size: root mean square of all entries.
        level: what no entry reaches after a random rotation between the two factors, in units of `size`, but in a part
            `rate` of the rotations at most.
        rate: 0.05.
        slack: no entry that is not listed is above the last listed by more than this.
        computed: the part of the table that was computed to know so.
        one_direction: the part of its square in its first singular direction.
    """

    size: float
    level: float
    rate: float
    slack: float
    computed: float
    one_direction: float


@dataclass(frozen=True)
class NamedRatio:
    """A token with its entry in units of the table's root mean square."""

    token: str
    id: int
    ratio: float


@dataclass(frozen=True)
class TrigramRow:
    """A source with the destinations that look at it most, and the outputs it promotes most then.

    Every destination goes with every output, wanted or not, because the head factors.
    """

    source: str
    id: int
    score: float
    destinations: list[NamedRatio]
    outs: list[NamedRatio]


@dataclass(frozen=True)
class AskedRow:
    """A skip trigram that was asked for by name.

    Attributes:
        source, destination, out: tokens.
        qk, ov: their entries in units of the tables' root mean square.
        source_rank: of the source among all sources of the destination, from 1.
        out_rank: of the output among all outputs of the source, from 1.
    """

    source: str
    destination: str
    out: str
    qk: float
    ov: float
    source_rank: int
    out_rank: int


@dataclass(frozen=True)
class Copying:
    """Whether a head promotes what it looks at.

    Attributes:
        eigenvalues: sum of the eigenvalues of W_U W_OV W_E over the sum of their absolute values.
        tokens: how many were ranked, evenly spaced over the vocabulary.
        among_top: the part of them that are among the `top` outputs that they promote.
        top: 10.
        median_rank: of a token among those outputs.
        chance: what `among_top` is for a token drawn at random.
    """

    eigenvalues: float
    tokens: int
    among_top: float
    top: int
    median_rank: float
    chance: float


@dataclass(frozen=True)
class CircuitReading(TabularReading):
    """The QK and OV circuits of one head in the vocabulary.

    Attributes:
        head: its address.
        offset: destination minus source, for rotary embedding.
        embedding: "plain" or "normed".
        qk, ov: each table.
        entries: the largest of both.
        copying: by eigenvalues and by rank.
        trigrams: the sources with the strongest skip trigrams.
        asked: what was asked for by name; None if nothing was.
        factors: the certificate of the factored weights, on a run of the model.
        notes: conventions and limits.
    """

    SCHEMA: ClassVar = "mainstem/circuits/1"
    COMMAND: ClassVar = "circuits"
    IN_CELLS: ClassVar = ("entries",)

    head: str
    offset: int
    embedding: str
    qk: TableSummary
    ov: TableSummary
    entries: list[EntryRow]
    copying: Copying
    trigrams: list[TrigramRow]
    asked: AskedRow | None
    factors: CheckSummary
    notes: list[str]

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each listed entry."""
        for row in self.entries:
            yield asdict(row)
