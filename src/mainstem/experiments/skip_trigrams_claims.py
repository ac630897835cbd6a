"""What the case of skip trigrams claims, and its tables and figure, from what was trained (see `skip_trigrams`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mainstem.experiments.outcome import Claim, Curves, ExperimentTable, finding
from mainstem.experiments.spreads import span
from mainstem.lab.skip_trigrams import FORCED, PLANTED

ELHAGE = "Elhage et al., A Mathematical Framework for Transformer Circuits, 2021"
SEED = "perfect ... are -> perfect"
PLANTED_NAMES = [" -> ".join((f"{source} ... {destination}", out)) for source, destination, out in PLANTED]
FORCED_OF = dict(zip([" -> ".join((f"{s} ... {d}", o)) for s, d, o in FORCED], PLANTED_NAMES[1:3], strict=True))
"""Each forced skip trigram, and the planted one of the same source and destination."""


@dataclass(frozen=True)
class Run:
    """One trained model; skip trigrams are named `source ... destination -> out`.

    Attributes:
        learning: (step, mean probability of planted outputs).
        learned: that at the end.
        read: the skip trigrams of the largest increase by the circuits, and their increase; `read_before`: the same
            before training.
        heads: of planted and forced ones, what the heads add to the logit of the output ("own"), and the most to that
            of another source's output ("others"), above the mean of the latter.
        spoken: their probability in running text; `unspoken`: with other sources instead of theirs.
    """

    learning: Sequence[Sequence[float]]
    learned: float
    read: Sequence[tuple[str, float]]
    read_before: Sequence[tuple[str, float]]
    heads: Mapping[str, Mapping[str, float]]
    spoken: Mapping[str, float]
    unspoken: Mapping[str, float]

    @property
    def first(self) -> list[str]:
        """As many as there are planted ones, by the circuits."""
        return [name for name, _ in self.read[: len(PLANTED_NAMES)]]

    @property
    def found(self) -> int:
        """How many of those are planted."""
        return len(set(self.first) & set(PLANTED_NAMES))

    @property
    def found_before(self) -> int:
        """The same before training."""
        return len({name for name, _ in self.read_before[: len(PLANTED_NAMES)]} & set(PLANTED_NAMES))

    @property
    def best_other(self) -> tuple[str, float]:
        """The one of the largest increase that is not planted."""
        return next((name, value) for name, value in self.read if name not in PLANTED_NAMES)

    def forced_share(self, forced: str) -> float:
        """What the heads add to a forced output over what they add to the planted one."""
        return self.heads[forced]["own"] / self.heads[FORCED_OF[forced]]["own"]

    def null_share(self, forced: str) -> float:
        """The same for the output of another source that the heads add most to."""
        return self.heads[forced]["others"] / self.heads[FORCED_OF[forced]]["own"]


def claims(planted: Sequence[Run], crossed: Sequence[Run]) -> list[Claim]:
    """All claims."""
    return [learned(planted), read_off(planted), seed_example(planted), forced(planted), shown(crossed, planted)]


def learned(runs: Sequence[Run]) -> Claim:
    """Whether the planted ones are predicted."""
    own, null = [run.learned for run in runs], [fmean([run.unspoken[n] for n in PLANTED_NAMES]) for run in runs]
    holds = min(own) >= 0.9 and max(null) <= 0.1
    partly = min(own) >= 0.5 and all(n <= p / 2 for p, n in zip(own, null, strict=True))
    return Claim(
        claim="A model of one attention layer learns skip trigrams",
        source=ELHAGE,
        published="found in one-layer models of text",
        measured=f"probability of the planted outputs {span(own)}",
        null=f"with other sources {span(null)}",
        finding=finding(holds, partly),
        values={"learned": own, "with other sources": null},
    )


def read_off(runs: Sequence[Run]) -> Claim:
    """Whether the circuits name the planted ones and no others."""
    count, found, before = len(PLANTED_NAMES), [run.found for run in runs], [run.found_before for run in runs]
    others = [run.best_other for run in runs]
    least = [min((value for name, value in run.read if name in PLANTED_NAMES), default=0.0) for run in runs]
    name, value = max(others, key=lambda other: other[1])
    return Claim(
        claim="They are read off the QK and OV circuits, and nothing else is",
        source=ELHAGE,
        published="the largest entries of both circuits are skip trigrams that make sense",
        measured=f"{span(found)} of the {count} of the largest increase are planted, by {min(least):.2f} or more; no "
        f"other has more than {value:.2f} ({name})",
        null=f"before training {span(before)} of {count}",
        finding=finding(min(found) == count and max(before) == 0, min(found) >= count - 2),
        values={"found": found, "before": before, "others": others, "least": least},
    )


def seed_example(runs: Sequence[Run]) -> Claim:
    """Whether [perfect] ... [are] -> [perfect] is among them."""
    first = [SEED in run.first for run in runs]
    own, null = [run.spoken[SEED] for run in runs], [run.unspoken[SEED] for run in runs]
    speaks = min(own) >= 0.9 and max(null) <= 0.1
    return Claim(
        claim="[perfect] ... [are] -> [perfect] is one of them",
        source=ELHAGE,
        published="an example of a head that copies",
        measured=f"among the first {len(PLANTED_NAMES)} by the circuits in {sum(first)} of {len(runs)} models; its "
        f"probability in running text {span(own)}",
        null=f"with other sources for `perfect` {span(null)}",
        finding=finding(speaks and all(first), speaks),
        values={"first": first, "spoken": own, "unspoken": null},
    )


def forced(runs: Sequence[Run]) -> Claim:
    """Whether the heads add as much to what was not planted."""
    own = {name: [run.forced_share(name) for run in runs] for name in FORCED_OF}
    null = {name: [run.null_share(name) for run in runs] for name in FORCED_OF}
    holds = [
        all(run.heads[planted]["own"] > 0 for run in runs)
        and min(own[name]) >= 0.5
        and all(n <= s / 2 for s, n in zip(own[name], null[name], strict=True))
        for name, planted in FORCED_OF.items()
    ]
    return Claim(
        claim="keep ... in -> mind and keep ... at -> bay force the same with outputs exchanged on the heads",
        source=ELHAGE,
        published="a head that increases the first two must increase the others",
        measured="heads add to the logit of what is forced, over that of what is planted: "
        + "; ".join(f"{name} {span(values)}" for name, values in own.items()),
        null="to an output of another source at most " + "; ".join(span(values) for values in null.values()),
        finding=finding(all(holds), any(holds)),
        values={"shares": own, "null": null},
    )


def shown(crossed: Sequence[Run], planted: Sequence[Run]) -> Claim:
    """Whether predictions show it where the direct path cannot repair it."""
    own = {name: [run.spoken[name] for run in crossed] for name in FORCED_OF}
    null = {name: [run.unspoken[name] for run in crossed] for name in FORCED_OF}
    repaired = [run.spoken[name] for run in planted for name in FORCED_OF]
    holds = [all(p >= 0.01 and p >= 10 * n for p, n in zip(own[name], null[name], strict=True)) for name in FORCED_OF]
    return Claim(
        claim="The bug shows in predictions where the direct path cannot repair it",
        source=ELHAGE,
        published="an example of a bug of one-layer models of text",
        measured="probability " + "; ".join(f"{name} {span(values)}" for name, values in own.items()),
        null=f"with other sources for `keep` {'; '.join(span(values) for values in null.values())}; where the direct "
        f"path can repair it {span(repaired)}",
        finding=finding(all(holds), any(holds)),
        values={"spoken": own, "unspoken": null, "repaired": repaired},
    )


def tables(planted: Sequence[Run], crossed: Sequence[Run], seeds: Sequence[int]) -> list[ExperimentTable]:
    """What the circuits name, and every planted and forced skip trigram."""
    read = [
        [seed, rank, name, value, "planted" if name in PLANTED_NAMES else ""]
        for seed, run in zip(seeds, planted, strict=True)
        for rank, (name, value) in enumerate(run.read[: len(PLANTED_NAMES) + 2], 1)
    ]
    return [
        ExperimentTable(
            "Skip trigrams of the largest increase by the circuits",
            "increase of the output's probability by the source, from the weights alone",
            ["seed", "rank", "skip trigram", "increase", "planted"],
            read,
        ),
        ExperimentTable(
            "Planted and forced skip trigrams",
            "mean over models; heads: what they add to the logit, in nats; probability: in running text",
            ["arm", "skip trigram", "heads", "probability", "with other sources"],
            [*_rows("planted", planted), *_rows("crossed", crossed)],
        ),
    ]


def _rows(arm: str, runs: Sequence[Run]) -> Iterator[list[Any]]:
    for name in runs[0].spoken:
        heads = [run.heads[name]["own"] for run in runs]
        yield [arm, name, *map(fmean, (heads, [r.spoken[name] for r in runs], [r.unspoken[name] for r in runs]))]


def curves(runs: Mapping[str, Sequence[Run]], seeds: Sequence[int]) -> Curves:
    """How they are learned."""
    return Curves(
        "Planted outputs while training",
        "mean probability in sequences that are not trained on",
        "step",
        "probability",
        {
            f"{arm}, seed {seed}": [(step, value) for step, value in run.learning]
            for arm, found in runs.items()
            for seed, run in zip(seeds, found, strict=True)
        },
    )
