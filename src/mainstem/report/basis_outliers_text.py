"""Outlier features in words: what the tables for the terminal and the page both say."""

from mainstem.experiments.outcome import ExperimentTable
from mainstem.report.text import NOTHING, compact, count, plain, plural, shortened, signed, visible
from mainstem.results.basis_outliers import (
    EmergenceSection,
    FeatureRow,
    MassiveRow,
    OutlierSection,
    OutlierTable,
    VarianceRow,
)

TITLE = "Outlier features"
KINDS = {
    "input": "what query, key, value, gate and up matrices read",
    "heads": "what output matrices read, in the space of heads",
    "stream": "the states of the stream, in units of each token’s root mean square",
}
"""Kinds of place in words."""

EMERGENCE = "Outliers by size of the model"


def caption(section: OutlierSection) -> str:
    """The criterion."""
    c = section.criterion
    return (
        f"one dimension with a magnitude of at least {c['magnitude']:g} in {c['layers']:.0%} of the layers and at "
        f"{c['positions']:.0%} of all positions (Dettmers et al. 2022: 6, 25 %, 6 %); a layer counts once over all "
        "that its matrices read, positions are pooled"
    )


def found(table: OutlierTable) -> str:
    """What a table comes to."""
    if not table.features:
        return f"no dimension qualifies; {compact(table.values)} such values per 2,048 tokens"
    names = ", ".join(str(row.dimension) for row in table.rows if row.qualifies)
    verb = "qualifies" if table.features == 1 else "qualify"
    return (
        f"{plural(table.features, 'dimension')} {verb} ({names}), {table.one_sided} with one sign; in up to "
        f"{table.layers_affected:.0%} of {table.layers} layers and at {table.positions_affected:.1%} of positions; "
        f"{compact(table.values)} values per 2,048 tokens"
    )


def verdict(section: OutlierSection) -> str:
    """What the published criterion comes to."""
    return found(section.table("input"))


def tables(section: OutlierSection) -> list[ExperimentTable]:
    """All tables: by kind of place, massive activations, the ranking by variance."""
    made = [_features(table) for table in section.tables]
    return [*made, _massive(section), _variance(section.variance)]


def _features(table: OutlierTable) -> ExperimentTable:
    heads = ["dimension", "qualifies", "layers", "often", "positions", "values", "sign", "quartiles"]
    return ExperimentTable(
        f"Outliers in {KINDS[table.kind]}", found(table), heads, [_feature(row) for row in table.rows]
    )


def _feature(row: FeatureRow) -> list:
    quartiles = ", ".join(plain(value, 1) for value in row.quartiles)
    mark = "yes" if row.qualifies else NOTHING
    return [
        str(row.dimension),
        mark,
        f"{row.layers:.0%}",
        f"{row.layers_often:.0%}",
        f"{row.positions:.1%}",
        count(row.count),
        sign(row),
        quartiles,
    ]


def sign(row: FeatureRow) -> str:
    """Which sign the values have."""
    if row.one_sided:
        return "+" if row.positive > 0.5 else "−"
    return f"{row.positive:.0%} +"


def _massive(section: OutlierSection) -> ExperimentTable:
    c = section.massive_criterion
    about = (
        f"single values of the stream above {c['magnitude']:g} and {count(int(c['times']))} times the median of their "
        "window (Sun et al. 2024); how many at the state that has most, and how many of these at a window’s first "
        "position"
    )
    heads = ["dimension", "from", "to", "states", "values", "first", "largest", "× median", "on", "commonest tokens"]
    return ExperimentTable("Massive activations", about, heads, [_massive_row(row) for row in section.massive])


def _massive_row(row: MassiveRow) -> list:
    where = f"{shortened(visible(row.token), 16)} at {count(row.place)}"
    tokens = "  ".join(shortened(visible(token), 12) for token in row.tokens)
    value = signed(row.value, 0)
    numbers = [str(row.states), count(row.count), count(row.firsts), value, compact(row.times)]
    return [str(row.dimension), row.first, row.last, *numbers, where, tokens]


def _variance(rows: list[VarianceRow]) -> ExperimentTable:
    about = (
        "of what sublayers read, times that of the mean dimension, a mean over places, without first positions; a "
        "ranking and no criterion: there is always a first"
    )
    cells = [[str(row.dimension), compact(row.times)] for row in rows]
    return ExperimentTable("Dimensions by variance", about, ["dimension", "× the mean variance"], cells)


def emergence_table(section: EmergenceSection) -> ExperimentTable:
    """Models by size."""
    heads = [
        "model", "parameters", "layers", "d_model", "perplexity", "features", "one sign", "of layers", "of positions",
        "per 2,048 tokens", "kurtosis",
    ]  # fmt: skip
    about = (
        "outlier features in what sublayers read, values above the threshold per 2,048 tokens, and the largest "
        "kurtosis of the stream; perplexity is in each model’s own tokens"
    )
    rows = [
        [
            visible(row.model),
            _size(row.parameters),
            str(row.n_layers),
            str(row.d_model),
            compact(row.perplexity),
            str(row.features),
            str(row.one_sided),
            f"{row.layers_affected:.0%}",
            f"{row.positions_affected:.1%}",
            compact(row.values),
            compact(row.kurtosis),
        ]
        for row in section.models
    ]
    return ExperimentTable(EMERGENCE, about, heads, rows)


def _size(parameters: int) -> str:
    """135M, 1.3B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            size = parameters / unit
            return f"{size:.0f}{name}" if size >= 10 else f"{size:.1f}{name}"
    return str(parameters)
