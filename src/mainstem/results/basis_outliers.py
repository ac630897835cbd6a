"""Two sections of the basis report as plain data: dimensions unlike the others, and how they come with size."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FeatureRow:
    """One dimension with values at or above the threshold.

    Attributes:
        dimension: which.
        qualifies: whether the criterion holds.
        layers: the share of the layers where it has such a value, be it one.
        layers_often: the share of the layers where it has them at the criterion's share of the positions.
        positions: the share of all positions, of all places pooled.
        count: how many such values.
        positive: the share of them above zero.
        one_sided: whether 99 % of them have one sign.
        quartiles: of these values, to 2.2 %.
        by_place: for each place of the table the share of positions.
    """

    dimension: int
    qualifies: bool
    layers: float
    layers_often: float
    positions: float
    count: int
    positive: float
    one_sided: bool
    quartiles: tuple[float, float, float]
    by_place: list[float]


@dataclass(frozen=True)
class OutlierTable:
    """Outlier features in one kind of place.

    Attributes:
        kind: "input" (the published one: what query, key, value, gate and up read), "heads" (what output matrices
            read, in the space of heads), or "stream" (its states, in units of each token's root mean square).
        places: their names.
        layers: how many layers they are in.
        tokens: how many tokens were seen at each.
        features: how many dimensions qualify.
        one_sided: how many of them are one-sided.
        layers_affected: the largest share of layers of those.
        positions_affected: the largest share of positions of those.
        values: values at or above the threshold in all dimensions, for each 2,048 tokens.
        rows: the dimensions with most such values, those that qualify first.
    """

    kind: str
    places: list[str]
    layers: int
    tokens: int
    features: int
    one_sided: int
    layers_affected: float
    positions_affected: float
    values: float
    rows: list[FeatureRow]


@dataclass(frozen=True)
class VarianceRow:
    """A dimension by the variance of what sublayers read in it: how many times that of the mean dimension."""

    dimension: int
    times: float


@dataclass(frozen=True)
class MassiveRow:
    """One dimension's massive activations in the stream (Sun et al. 2024).

    Attributes:
        dimension: which.
        first, last: the states of the stream where there are any, the first and the last.
        states: how many states.
        count: how many activations, at the state that has most.
        firsts: how many of these are at the first position of a window.
        value: the largest.
        times: how many times the median magnitude of its window that is.
        place: where its token is in the text.
        token: that token.
        tokens: the commonest tokens of the state that has most.
    """

    dimension: int
    first: str
    last: str
    states: int
    count: int
    firsts: int
    value: float
    times: float
    place: int
    token: str
    tokens: list[str]


@dataclass(frozen=True)
class OutlierSection:
    """Dimensions unlike the others.

    Attributes:
        criterion: `magnitude`, `layers`, `positions`.
        massive_criterion: `magnitude`, `times`.
        tables: one for each kind of place.
        variance: the dimensions of most variance in what sublayers read; a ranking, which always finds some.
        massive: massive activations, those of the largest value first.
    """

    criterion: dict[str, float]
    massive_criterion: dict[str, float]
    tables: list[OutlierTable]
    variance: list[VarianceRow]
    massive: list[MassiveRow]

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def table(self, kind: str) -> OutlierTable:
        """The table of a kind of place."""
        return next(table for table in self.tables if table.kind == kind)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of the tables."""
        for table in self.tables:
            for row in table.rows:
                place = f"{table.kind} {row.dimension}"
                low, middle, high = row.quartiles
                yield from (
                    (place, "layers", row.layers),
                    (place, "positions", row.positions),
                    (place, "count", float(row.count)),
                    (place, "positive", row.positive),
                    (place, "qualifies", float(row.qualifies)),
                    (place, "quartile 1", low),
                    (place, "quartile 2", middle),
                    (place, "quartile 3", high),
                )
        for row in self.variance:
            yield f"input {row.dimension}", "variance", row.times
        for row in self.massive:
            yield f"massive {row.dimension}", "value", row.value
            yield f"massive {row.dimension}", "times", row.times
            yield f"massive {row.dimension}", "count", float(row.count)


@dataclass(frozen=True)
class ScaleRow:
    """One model among several, in the order of their sizes.

    Attributes:
        model: its name.
        parameters: how many numbers it has.
        n_layers, d_model: its size.
        perplexity: on the same text; in its own tokens, so that vocabularies of other sizes do not compare.
        features, one_sided, layers_affected, positions_affected, values: as in `OutlierTable`, of what sublayers read.
        kurtosis: the largest of the stream's states.
    """

    model: str
    parameters: int
    n_layers: int
    d_model: int
    perplexity: float
    features: int
    one_sided: int
    layers_affected: float
    positions_affected: float
    values: float
    kurtosis: float


@dataclass(frozen=True)
class EmergenceSection:
    """How outlier features come with size: several models on one text, by size."""

    models: list[ScaleRow]

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of the table."""
        for row in self.models:
            for quantity, value in asdict(row).items():
                if isinstance(value, int | float):
                    yield row.model, quantity, float(value)
