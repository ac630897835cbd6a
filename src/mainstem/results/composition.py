"""Compositions as plain rows: pairs above the null, what each kind looks like as a whole, and how it was judged."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mainstem.results.reading import CheckSummary, TabularReading

if TYPE_CHECKING:
    from mainstem.analysis.composition import Compositions


@dataclass(frozen=True)
class PairRow:
    """One reader with one writer.

    Attributes:
        composition: of the two.
        z: its square above a random rotation's mean, in standard deviations.
        p, q: against acausal pairs as many layers apart, and the false discovery rate at which it is above them.
        composition_without, z_without, q_without: the same without the shared directions.
    """

    kind: str
    reader: str
    writer: str
    composition: float
    z: float
    p: float
    q: float
    composition_without: float
    z_without: float
    q_without: float


@dataclass(frozen=True)
class KindRow:
    """All pairs of one kind.

    Attributes:
        pairs, acausal: how many of each there are.
        undefined: causal pairs with a norm of 0.
        mean, mean_acausal: of the composition.
        beyond, beyond_acausal: the parts with |z| above 3, which a random rotation hardly ever has.
        above, below: causal pairs above and below the acausal ones at the false discovery rate.
        above_without, below_without: the same without the shared directions.
    """

    kind: str
    pairs: int
    acausal: int
    undefined: int
    mean: float
    mean_acausal: float
    beyond: float
    beyond_acausal: float
    above: int
    below: int
    above_without: int
    below_without: int


@dataclass(frozen=True)
class Shared:
    """The directions that many units read or write alike.

    Attributes:
        directions: how many.
        weights: how much of the mean Gram matrix each has, times d_model: 1 for a direction like any other.
        dimensions: the dimension of the stream that each leans on most, and its entry there.
    """

    directions: int
    weights: list[float]
    dimensions: list[tuple[int, float]]


@dataclass(frozen=True)
class CompositionCertificate:
    """The first pairs of each kind, recomputed one by one from their factored matrices in float64."""

    pairs: int
    worst: float
    tolerance: float
    holds: bool


@dataclass(frozen=True)
class CompositionReading(TabularReading):
    """Who reads what whom wrote, from the weights.

    Attributes:
        offset: of Q- and K-composition's W_QK, destination minus source.
        writers: "heads" or "mlps".
        of: the head whose neurons are listed, if neurons read or write.
        null: 1 / sqrt(d_model), what a random rotation gives.
        rate: the false discovery rate up to which a pair is above the null.
        kinds: a row for each kind.
        pairs: of each kind the pairs above the null, then the others, each by z.
        layers: for each kind the strongest composition above `null` of each layer with each: row reader, column writer.
        shared: for each kind the directions that the repetition leaves out.
        factors: the certificate of the factored weights, on a run of the model.
        certificate: of the pairs.
        notes: what could not be had, and what is left out.
        tables: by kind all pairs, and all without the shared directions; not in the document.
    """

    SCHEMA: ClassVar = "mainstem/composition/1"
    COMMAND: ClassVar = "circuits"
    IN_CELLS: ClassVar = ("pairs", "layers")

    offset: int
    of: str | None
    writers: str
    null: float
    rate: float
    kinds: list[KindRow]
    pairs: list[PairRow]
    layers: dict[str, list[list[float | None]]]
    shared: dict[str, Shared]
    factors: CheckSummary
    certificate: CompositionCertificate
    notes: list[str]
    tables: "dict[str, tuple[Compositions, Compositions]]" = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        document = super(CompositionReading, replace(self, tables={})).as_dict()  # tables are large, and never in it
        del document["tables"]
        return document

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each pair whose writer and reader are in different layers, causal or not."""
        for kind, (table, without) in self.tables.items():
            columns = {
                "composition": table.strength, "z": table.z, "p": table.p, "q": table.q,
                "composition_without": without.strength, "z_without": without.z, "q_without": without.q,
            }  # fmt: skip
            values = {name: column.tolist() for name, column in columns.items()}
            order, defined = table.order.tolist(), table.defined.tolist()
            readers, writers = ([str(unit) for unit in units] for units in (table.readers, table.writers))
            for i, reader in enumerate(readers):
                for j, writer in enumerate(writers):
                    if order[i][j] and defined[i][j]:
                        own = {name: column[i][j] for name, column in values.items()}
                        yield {"kind": kind, "reader": reader, "writer": writer, "causal": order[i][j] > 0, **own}
