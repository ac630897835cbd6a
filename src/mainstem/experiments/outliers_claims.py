"""What the outlier case claims, and its tables and figures, from what was run (see `outliers`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem.analysis.intervals import Interval
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, Figure, finding
from mainstem.results.basis_ablations import AblationRow, AblationSection, ControlVerdict
from mainstem.results.basis_outliers import OutlierSection
from mainstem.results.basis_quantisers import AS_IT_IS, FULL, CloserRow, QuantiserRow, QuantiserSection

if TYPE_CHECKING:
    from mainstem.session import Model

SOURCE = "Dettmers et al., LLM.int8(), 2022"
FEW = 10
"""The most outlier features that the paper finds in any model it measures is seven."""

TIMES = 100
"""How many times more than controls the outliers must raise the perplexity for the claim to hold."""

HALF = 0.6
"""What may be left of a number that is said to fall by about half."""

RUINED = 2.0
"""How many times as large the perplexity of a ruined model is, at least."""

ORDER = ("absmax", "row-wise", "vector-wise", "llm.int8")
"""The order in which the paper's table improves."""

Maybe = AblationSection | None


@dataclass(frozen=True)
class Found:
    """What was run.

    Attributes:
        outliers: in the model's own basis.
        turned: how many features the same vectors have in a random basis.
        ablated: without the outlier features; None where the criterion finds none.
        varied: without the most varied dimensions at attention's inputs.
        quantised: the paper's quantisers, in both bases.
    """

    outliers: OutlierSection
    turned: int
    ablated: Maybe
    varied: AblationSection
    quantised: QuantiserSection


def assemble(model: "Model", found: Found) -> Experiment:
    """The result of the case."""
    ablated = found.ablated or found.varied
    named = {"outlier features": found.ablated, "most varied": found.varied}
    sets = {name: section for name, section in named.items() if section is not None}
    return Experiment(
        name="outliers",
        title="Outlier features, what they do, and what int8 makes of them",
        question="Are a few dimensions of the stream unlike all others, does the model need them, and do eight bits "
        "fail on them?",
        provenance=model.provenance(),
        model=model.summary,
        claims=[
            few(found.outliers, found.turned, model.summary["d_model"]),
            one_sided(found.outliers),
            less_certain(ablated),
            *(needed(name, section) for name, section in sets.items()),
            constant(ablated),
            ordered(found.quantised),
            decomposed(found.quantised),
            cured(found.quantised),
        ],
        tables=[_features(found.outliers), *(_ablations(*item) for item in sets.items()), _quantisers(found.quantised)],
        figures=[_figure(found.quantised, basis) for basis in dict.fromkeys(row.basis for row in found.quantised.rows)],
        notes=[
            "The first ablation is of each layer by itself, with regular values sent on; the perplexities are of runs "
            "in which the altered states go on. The published numbers are one of each.",
            *([] if found.ablated else ["The criterion finds no feature; what is said of ablations is of the most "
              "varied dimensions."]),
        ],
    )  # fmt: skip


def few(own: OutlierSection, turned: int, d_model: int) -> Claim:
    """Whether the criterion finds a few features, and none after a rotation."""
    table = own.table("input")
    names = ", ".join(f"{row.dimension} ({row.layers:.0%} of layers, {row.positions:.0%} of positions)"
                      for row in table.rows if row.qualifies)  # fmt: skip
    return Claim(
        "A few dimensions are large in many layers and at many positions.",
        f"{SOURCE}, section 4, Table 4",
        "1 to 7 features in models of 117 M to 13 B parameters; 25 % of layers in GPT-2 117M, all from 6.7 B on",
        f"{table.features} of {d_model}: {names or 'none'}",
        f"of the same vectors in a random basis: {turned}",
        finding(1 <= table.features <= FEW and turned == 0, table.features > turned),
        {"features": table.features, "turned": turned},
    )


def one_sided(own: OutlierSection) -> Claim:
    """Whether they have one sign."""
    table = own.table("input")
    quartiles = "; ".join(f"{row.dimension}: {', '.join(f'{value:.0f}' for value in row.quartiles)}"
                          for row in table.rows if row.qualifies)  # fmt: skip
    return Claim(
        "They are one-sided: a feature's large values have one sign.",
        f"{SOURCE}, Table 4",
        "most are; quartiles (-8, -7, -6) in GPT-2 117M",
        f"{table.one_sided} of {table.features}" + (f"; quartiles {quartiles}" if quartiles else ""),
        "half of the values of each sign would be two-sided",
        finding(table.features > 0 and table.one_sided == table.features, 2 * table.one_sided > table.features),
        {"one_sided": table.one_sided},
    )


def less_certain(section: AblationSection) -> Claim:
    """Whether attention's top-1 mass falls without them, and hardly without random dimensions."""
    rows = {row.what: row for row in section.patterns}
    if not {"none", "zero", "random"} <= set(rows):
        return Claim(*_TOP_MASS, "no attention could be taken apart", "", "not reproduced")
    none, zero, random = rows["none"], rows["zero"], rows["random"]
    return Claim(
        *_TOP_MASS,
        f"{none.top:.1%} to {zero.top:.1%} without {_listed(section)}, each layer by itself",
        f"random dimensions: {random.top:.1%} ({random.low:.1%} to {random.high:.1%} over {random.draws} draws)",
        finding(zero.top <= HALF * none.top and zero.top < random.low, zero.top < random.low),
        {"none": none.top, "zero": zero.top, "random": random.top},
    )


_TOP_MASS = (
    "Without them attention's top-1 softmax mass falls by about half.",
    f"{SOURCE}, section 4",
    "about 40 % to 20 %; random dimensions: 0.02 to 0.3 %",
)


def needed(name: str, section: AblationSection) -> Claim:
    """Whether the perplexity rises much more than without random or norm-matched dimensions."""
    run = _run(section, "attention", "zero")
    verdicts = [verdict for verdict in section.verdicts if verdict.where == "attention"]
    passed = bool(verdicts) and all(_many(verdict) for verdict in verdicts)
    beaten = bool(verdicts) and all(verdict.beats for verdict in verdicts)
    controls = "; ".join(
        f"{row.what.replace('_', ' ')}: {row.ratio - 1:+.2%} ({row.draws} draws)"
        for row in section.runs
        if row.where == "attention" and row.draws > 1
    )
    every = _run(section, "everywhere", "zero")
    return Claim(
        f"Zeroing them at attention's inputs ruins the model ({name}: {_listed(section)}).",
        f"{SOURCE}, section 4",
        "perplexity up by 600 to 1,000 %; random dimensions 0.1 %",
        f"perplexity {run.perplexity / run.ratio:.1f} to {run.perplexity:,.1f} ({run.ratio - 1:+.0%}); zeroed "
        f"wherever the stream is read, {every.ratio - 1:+.0%}",
        controls,
        finding(run.ratio >= RUINED and run.low > 0 and passed, run.low > 0 and beaten),
        {"ratio": run.ratio, "times": {verdict.control: verdict.times for verdict in verdicts}},
    )


def _many(verdict: ControlVerdict) -> bool:
    """Whether the rise is `TIMES` that of the control, or the control's is none at all."""
    return verdict.beats and (verdict.times is None or verdict.times >= TIMES)


def constant(section: AblationSection) -> Claim:
    """Whether a constant in their place does little."""
    zero, mean, by_place = (_run(section, "attention", what) for what in ("zero", "mean", "mean_by_place"))
    best = min(mean.change, by_place.change)
    return Claim(
        "A constant in their place does what they do.",
        "Sun et al., Massive Activations, 2024",
        "zeroing four activations ruins the model, setting them to their means changes nothing",
        f"at their means {mean.ratio - 1:+.2%}, with a mean of its own for a window's first position "
        f"{by_place.ratio - 1:+.2%}",
        f"zero: {zero.ratio - 1:+.0%}",
        finding(zero.low > 0 and best < 0.05 * zero.change, zero.low > 0 and best < 0.5 * zero.change),
        {"mean": mean.ratio, "mean_by_place": by_place.ratio, "zero": zero.ratio},
    )


def ordered(section: QuantiserSection) -> Claim:
    """Whether the quantisers come in the paper's order of perplexity."""
    rows = {row.quantiser: row for row in section.rows if row.basis == AS_IT_IS}
    perplexities = [rows[name].perplexity for name in ORDER]
    falling = all(a > b for a, b in zip(perplexities, perplexities[1:], strict=False))
    return Claim(
        "The finer the scales, the smaller the harm: absmax, row-wise, vector-wise, LLM.int8().",
        f"{SOURCE}, Table 1",
        "at 13 B: 19.08, 16.49, 16.48, 12.45 (32 bits: 12.45); at 125 M vector-wise is worse than row-wise",
        ", ".join(f"{name} {rows[name].perplexity:.2f}" for name in ORDER),
        f"full precision: {rows[FULL].perplexity:.2f}",
        finding(falling, perplexities[0] > perplexities[-1]),
        {name: rows[name].perplexity for name in ORDER},
    )


def decomposed(section: QuantiserSection) -> Claim:
    """Whether LLM.int8() is closer to full precision than each quantiser without decomposition."""
    pairs = [pair for pair in section.closer if pair.first == ORDER[-1]]
    won = [pair for pair in pairs if pair.closer == pair.first]
    return Claim(
        "With outliers in floating point, int8 is closer to full precision than any of the five without.",
        f"{SOURCE}, section 3.2, Table 1",
        "no degradation up to 13 B, where the others lose 1 to 7 in perplexity",
        f"closer than {len(won)} of {len(pairs)}, KL in nats a token: {_differences(pairs)}",
        "an interval that holds 0",
        finding(bool(pairs) and len(won) == len(pairs), bool(won)),
        {pair.second: pair.difference for pair in pairs},
    )


def cured(section: QuantiserSection) -> Claim:
    """Whether a rotation before quantisation helps the quantisers that take nothing out."""
    pairs = [pair for pair in section.closer if pair.first.startswith(f"{pair.second}, ")]
    plain = [pair for pair in pairs if "+" not in pair.second and pair.second != ORDER[-1]]
    won = [pair for pair in plain if pair.closer == pair.first]
    rest = [pair for pair in pairs if pair not in plain]
    return Claim(
        "A rotation of the stream before quantisation helps.",
        "Ashkboos et al., QuaRot, 2024",
        "outliers vanish, and 4 bits nearly suffice",
        f"{len(won)} of {len(plain)} quantisers without decomposition come closer, KL in nats a token: "
        f"{_differences(plain)}",
        f"with decomposition: {_differences(rest)}" if rest else "an interval that holds 0",
        finding(bool(plain) and len(won) == len(plain), bool(won)),
        {pair.first: pair.difference for pair in pairs},
    )


def _differences(pairs: Sequence[CloserRow]) -> str:
    return "; ".join(f"{pair.second} {pair.difference:+.4f} [{pair.low:+.4f}, {pair.high:+.4f}]" for pair in pairs)


def _run(section: AblationSection, where: str, what: str) -> AblationRow:
    """The run on the whole text."""
    return max((row for row in section.runs if (row.where, row.what) == (where, what)), key=lambda row: row.tokens)


def _listed(section: AblationSection) -> str:
    dimensions = [str(row.dimension) for row in section.dimensions]
    return f"dimension{'s' * (len(dimensions) > 1)} {', '.join(dimensions)}"


def _features(own: OutlierSection) -> ExperimentTable:
    table = own.table("input")
    return ExperimentTable(
        "Dimensions with large values",
        f"over what query, key, value, gate and up matrices read, {table.tokens:,} tokens each",
        ["dimension", "qualifies", "layers", "positions", "values", "positive", "quartiles"],
        [
            [row.dimension, "yes" if row.qualifies else "no", row.layers, row.positions, row.count, row.positive,
             ", ".join(f"{value:.1f}" for value in row.quartiles)]
            for row in table.rows
        ],
    )  # fmt: skip


def _ablations(name: str, section: AblationSection) -> ExperimentTable:
    return ExperimentTable(
        f"Taken out: {name}",
        f"{_listed(section)}; of controls the mean over draws, the least and the largest",
        ["where", "what", "draws", "tokens", "perplexity", "change of the loss", "likeliest token changed"],
        [
            [row.where, row.what.replace("_", " "), row.draws, row.tokens, row.perplexity,
             Interval(row.change, row.low, row.high), row.flips]
            for row in section.runs
        ],
    )  # fmt: skip


def _quantisers(section: QuantiserSection) -> ExperimentTable:
    return ExperimentTable(
        "Quantisers",
        "against full precision, token by token; intervals over tokens",
        ["basis", "quantiser", "perplexity", "change of the loss", "KL", "likeliest token changed"],
        [
            [row.basis, row.quantiser, row.perplexity, Interval(row.change, row.low, row.high), _kl(row), row.flips]
            for row in section.rows
        ],
    )


def _figure(section: QuantiserSection, basis: str) -> Figure:
    rows = [row for row in section.rows if row.basis == basis and row.quantiser != FULL]
    return Figure(
        f"KL to full precision, the model {basis}", [row.quantiser for row in rows], [_kl(row) for row in rows], "nats"
    )


def _kl(row: QuantiserRow) -> Interval:
    return Interval(row.kl, row.kl_low, row.kl_high)
