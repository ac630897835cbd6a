"""What the case of induction in the wild claims, and its tables and figures, from what was run (see `induction`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem.analysis.intervals import Interval
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, Figure, finding
from mainstem.results.heads import AblationRow, HeadsReading, InContext

if TYPE_CHECKING:
    from mainstem.session import Model

OLSSON = "Olsson et al., In-context Learning and Induction Heads, 2022"
ELHAGE = "Elhage et al., A Mathematical Framework for Transformer Circuits, 2021"
TEN = 10.0
SEVERAL = 3
LISTED = 12


@dataclass(frozen=True)
class Composed:
    """K-composition of previous-token heads into induction heads.

    Attributes:
        pairs: reader and writer.
        numbers: for each pair the composition, its z and its false discovery rate against acausal pairs.
        mean: of z over the pairs.
        drawn: the same for other writers of the same layers, for each draw.
        null: what a random rotation gives.
        passing: the part of all causal pairs of the model that pass at 5 %.
    """

    pairs: list[tuple[str, str]]
    numbers: list[list[float]]
    mean: float
    drawn: list[float]
    null: float
    passing: float

    @property
    def p(self) -> float:
        """How often other writers of the same layers compose as much."""
        return (1 + sum(one >= self.mean for one in self.drawn)) / (1 + len(self.drawn))

    @property
    def above(self) -> int:
        """How many pairs are above the acausal ones."""
        return sum(q <= 0.05 for _, _, q in self.numbers)


@dataclass(frozen=True)
class Continued:
    """The example: the probability of the second half of a name, with the name before and with another one.

    `without` is with the induction heads at their means over text, `random` with as many others of the same layers.
    Probabilities near 1 hardly grow, so that what the earlier name adds is counted in log-odds.
    """

    text: str
    answer: str
    probability: float
    other: float
    without: float
    random: list[float]

    @property
    def gain(self) -> float:
        """What the earlier name adds to the log-odds."""
        return _log_odds(self.probability) - _log_odds(self.other)

    @property
    def lost(self) -> float:
        """What of it is lost without the heads."""
        return _log_odds(self.probability) - _log_odds(self.without)


def _log_odds(p: float) -> float:
    p = min(max(p, 1e-12), 1 - 1e-12)
    return math.log(p / (1 - p))


def assemble(
    model: "Model",
    reading: HeadsReading,
    ablations: Sequence[AblationRow],
    without: InContext | None,
    composed: Composed | str,
    continued: Continued | None,
) -> Experiment:
    """The result of the case."""
    own = [row for row in ablations if row.behaviour == "prefix"]
    claims = [there(reading), taken_out(own), in_context(reading.in_context), learning_without(without)]
    claims += [composition(composed), feeding(ablations), *([continuation(continued)] if continued else [])]
    notes = [] if continued else ["The example [Pot][ters] was left out: the tokenizer does not part the name so."]
    return Experiment(
        name="induction-in-the-wild",
        title="Induction heads in the wild",
        question="which heads continue what was there before, and what is lost without them",
        provenance=model.provenance(),
        model=model.summary,
        claims=claims,
        tables=[
            _heads(reading),
            _ablations(ablations),
            *([_pairs(composed)] if isinstance(composed, Composed) else []),
        ],
        figures=[
            Figure("Loss on repeated tokens without heads; of random heads the least and the most", *_bars(ablations))
        ],
        warnings=reading.warnings,
        notes=[*notes, *reading.notes],
    )


def there(r: HeadsReading) -> Claim:
    """Whether several heads match prefixes."""
    prefix, legacy = r.get("prefix"), r.get("legacy")
    found = prefix.heads[: len(prefix.found())]
    named = ", ".join(f"{row.head} {row.score:.2f}" for row in prefix.heads if row.found)
    sure = sum(row.found for row in prefix.heads)
    return Claim(
        "Several heads look at the token after earlier copies of the present one.",
        OLSSON,
        "induction heads in models of all sizes with two layers or more",
        f"{sure} of {r.count} heads have a prefix-matching score of 0.3 or more above the control: {named or 'none'}; "
        f"at the published wording's offset, before the copy, the largest is {legacy.heads[0].score:.2f}",
        f"the same heads on unrepeated tokens: at most {max((row.control or 0.0 for row in found), default=0.0):.2f}; "
        f"at 22 other offsets, all heads: 95 % below {prefix.null['q95']:.2f}, the largest "
        f"{prefix.null['largest']:.2f}",
        finding(sure >= SEVERAL, sure > 0),
        {"heads": prefix.found(), "largest": prefix.heads[0].score},
    )


def taken_out(rows: Sequence[AblationRow]) -> Claim:
    """Whether the heads found matter ten times more than random heads of their layers, judged at their means.

    By the other methods they have to matter more than in every draw of random heads.
    """
    ratios = {row.method: row.ratio for row in rows}
    beyond = bool(rows) and all(row.repeated > max(row.control.repeated) for row in rows)
    mean = ratios.get("mean") or 0.0
    return Claim(
        "With them at their means the loss on repeated tokens rises, ten times more than with random heads of "
        "their layers.",
        OLSSON,
        "their knock-out removes most of in-context learning in small models",
        "; ".join(
            f"{row.method}: {row.repeated:+.2f} nats (first copy {row.first:+.2f}), {_times(row)}" for row in rows
        )
        or "no head was found",
        "; ".join(
            f"{row.method}: {min(row.control.repeated):+.2f} to {max(row.control.repeated):+.2f} over "
            f"{len(row.control.repeated)} draws"
            for row in rows
        )
        or "none drawn",
        finding(beyond and mean >= TEN, beyond),
        {"ratios": ratios},
    )


def _times(row: AblationRow) -> str:
    return "random heads change nothing" if row.ratio is None else f"{row.ratio:.1f} times the mean of random heads"


def in_context(made: InContext | None) -> Claim:
    """Whether more context helps."""
    return Claim(
        "The in-context-learning score is negative: later tokens have a lower loss.",
        OLSSON,
        "about −0.4 nats between tokens 50 and 500",
        "not measured: the context is too short"
        if made is None
        else f"{made.mean:+.2f} nats [{made.low:+.2f}, {made.high:+.2f}] between about {made.early} and {made.late} "
        f"tokens of context (50 and 500 of 512 scaled to {made.context}), over the same {made.tokens} tokens",
        "an interval over tokens that holds 0",
        finding(made is not None and made.high < 0, made is not None and made.mean < 0),
        {} if made is None else {"score": made.mean, "early": made.early, "late": made.late},
    )


def learning_without(made: InContext | None) -> Claim:
    """Whether the score is weaker without the induction heads."""
    measured = "no head was found" if made is None else f"{made.without:+.2f} nats without, {made.mean:+.2f} with them"
    weaker = made is not None and made.without is not None and made.without > made.mean
    return Claim(
        "Without the induction heads there is less in-context learning on text.",
        OLSSON,
        "shown for small models without MLPs; in larger ones only as a correlation",
        measured,
        "the interval of the score itself" if made is None else f"[{made.low:+.2f}, {made.high:+.2f}]",
        finding(weaker and made is not None and (made.without or 0.0) > made.high, weaker),
        {} if made is None else {"with": made.mean, "without": made.without},
    )


def composition(made: Composed | str) -> Claim:
    """Whether induction heads read what previous-token heads write, more than from other heads of those layers."""
    claim, published = (
        "Induction heads read previous-token heads' writes: K-composition above the null.",
        "one such pair",
    )
    if isinstance(made, str):
        return Claim(claim, ELHAGE, published, f"not measured: {made}", "none", "measured")
    drawn = sorted(made.drawn)
    strongest = max(range(len(made.pairs)), key=lambda i: made.numbers[i][1])
    reader, writer = made.pairs[strongest]
    strength, z, q = made.numbers[strongest]
    return Claim(
        claim,
        ELHAGE,
        f"{published} in a two-layer model",
        f"mean z {made.mean:.1f} over {len(made.pairs)} pairs, p {made.p:.3f}; {made.above} of them above the acausal "
        f"pairs at a false discovery rate of 5 %; the strongest {writer} into {reader}: {strength:.3f} against "
        f"{made.null:.3f} of a random rotation, z {z:.1f}, q {q:.2g}",
        f"{len(drawn)} draws of other writers of the same layers: mean z {sum(drawn) / len(drawn):.1f}, 95 % below "
        f"{drawn[int(0.95 * len(drawn))]:.1f}; of all causal pairs {made.passing:.1%} are above the acausal ones",
        finding(made.p <= 0.05, made.above > made.passing * len(made.pairs)),
        {"p": made.p, "mean": made.mean, "above": made.above, "pairs": len(made.pairs)},
    )


def feeding(rows: Sequence[AblationRow]) -> Claim:
    """Whether repeated tokens need the previous-token heads, too."""
    own = next((row for row in rows if row.behaviour == "previous"), None)
    if own is None:
        return Claim("Repeated tokens need previous-token heads.", OLSSON, "", "no head was found", "none", "measured")
    return Claim(
        "Repeated tokens need the previous-token heads.",
        OLSSON,
        "induction is a circuit of two heads",
        f"{own.repeated:+.2f} nats on repeated tokens without {', '.join(own.heads)}, "
        f"{own.first:+.2f} on the first copy",
        f"random heads of their layers: {min(own.control.repeated):+.2f} to {max(own.control.repeated):+.2f}",
        finding(own.repeated > max(own.control.repeated)),
        {"ratio": own.ratio},
    )


def continuation(made: Continued) -> Claim:
    """Whether a name is continued as it was before, through the induction heads."""
    beyond = bool(made.random) and made.without < min(made.random)
    return Claim(
        "[Pot][ters] ... [Pot] → [ters].",
        ELHAGE,
        "an example of what induction heads do",
        f"p({made.answer}) is {made.probability:.3g} after {made.text!r}, {made.other:.3g} if others moved in: "
        f"{made.gain:+.1f} nats of log-odds, of which {made.lost:.1f} are lost without the induction heads "
        f"(p {made.without:.3g})",
        f"without random heads of the same layers p is {min(made.random):.3g} to {max(made.random):.3g}"
        if made.random
        else "none drawn",
        finding(made.gain >= 1 and beyond and made.lost > made.gain / 2, made.gain >= 1),
        {"with": made.probability, "other": made.other, "without": made.without, "gain": made.gain, "lost": made.lost},
    )


def _heads(r: HeadsReading) -> ExperimentTable:
    previous = {row.head: row.score for row in r.get("previous", "text").heads}
    return ExperimentTable(
        "Heads",
        f"the {LISTED} largest prefix-matching scores, with attention to the first position left out, and on text",
        ["head", "prefix matching", "control", "to the first", "without it", "rank so", "previous token", "found"],
        [
            [row.head, row.score, row.control, row.sink, row.without_sink, row.rank_without_sink, previous[row.head],
             row.found]
            for row in r.get("prefix").heads[:LISTED]
        ],
    )  # fmt: skip


def _ablations(rows: Sequence[AblationRow]) -> ExperimentTable:
    return ExperimentTable(
        "Heads taken out together",
        "by how many nats the loss of a token rises on the second copy of random tokens, and on the first; random "
        "heads of the same layers: the mean, the least and the most over draws",
        ["heads of", "how many", "by", "repeated", "first copy", "random heads", "ratio"],
        [
            [
                row.behaviour,
                len(row.heads),
                row.method,
                row.repeated,
                row.first,
                _spread(row.control.repeated),
                row.ratio,
            ]
            for row in rows
        ],
    )


def _pairs(made: Composed) -> ExperimentTable:
    order = sorted(range(len(made.pairs)), key=lambda i: -made.numbers[i][1])[:LISTED]
    return ExperimentTable(
        "K-composition of previous-token heads into induction heads",
        f"the {LISTED} pairs with the largest z; offset 0; q against acausal pairs as many layers apart",
        ["reader", "writer", "composition", "z", "q"],
        [[*made.pairs[i], *made.numbers[i]] for i in order],
    )


def _spread(values: Sequence[float]) -> Interval:
    return Interval(sum(values) / len(values), min(values), max(values))


def _bars(rows: Sequence[AblationRow]) -> tuple[list[str], list[Interval]]:
    names, bars = [], []
    for row in rows:
        names += [f"{row.behaviour}, {row.method}", "random heads"]
        bars += [Interval(row.repeated, row.repeated, row.repeated), _spread(row.control.repeated)]
    return names, bars
