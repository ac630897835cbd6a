"""The claims of the experiment on two tasks in one stream, from its numbers; the rules are in `subspaces`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from mainstem.experiments.outcome import Claim, ExperimentTable, finding
from mainstem.experiments.spreads import listed, percents
from mainstem.lab.two_tasks import TASKS

SOURCE = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits"
TOGETHER, BY_TURNS = "together", "by turns"

TOP = 30
"""How many neurons a task needs most."""

LEVEL, HALF, MOST = 0.01, 0.5, 0.9


@dataclass(frozen=True)
class Lying:
    """How two subspaces lie to each other: numbers of `mainstem.analysis.subspace.Overlap`."""

    overlap: float
    expected: float
    spread: float
    p_disjoint: float
    p_shared: float
    verdict: str


@dataclass(frozen=True)
class Common:
    """What two sets of neurons have in common.

    Attributes:
        count: how many neurons.
        expected: of random sets.
        p_few, p_many: how often random sets have so few, and so many.
    """

    count: int
    expected: float
    p_few: float
    p_many: float


@dataclass(frozen=True)
class Run:
    """What one model gave; everything by task.

    Attributes:
        losses: of each step.
        sizes: directions of the subspaces.
        plain: accuracies.
        chance: of always giving the most frequent answer.
        frozen: by whose subspace is frozen, the accuracy of each task.
        again: with its subspace frozen as the first wording has it, the accuracy where it is asked by the second.
        random: accuracies with random subspaces frozen.
        between: how the two tasks' subspaces lie; `same`: those of one task asked in two ways.
        neurons: what the neurons that the tasks need most have in common; `same_neurons`: those of one task asked in
            two ways.
        heads: what each head, held at its mean, adds to the loss, in nats.
    """

    losses: Sequence[float]
    sizes: Mapping[str, int]
    plain: Mapping[str, float]
    chance: Mapping[str, float]
    frozen: Mapping[str, Mapping[str, float]]
    again: Mapping[str, float]
    random: Mapping[str, Sequence[float]]
    between: Lying
    same: Mapping[str, Lying]
    neurons: Common
    same_neurons: Mapping[str, Common]
    heads: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Self:
        """From plain data."""
        return cls(
            **{
                **made,
                "between": Lying(**made["between"]),
                "same": {task: Lying(**one) for task, one in made["same"].items()},
                "neurons": Common(**made["neurons"]),
                "same_neurons": {task: Common(**one) for task, one in made["same_neurons"].items()},
            }
        )


Runs = Mapping[str, Sequence[Run]]
"""By way, one run for each seed."""


def common(first: Sequence[float], second: Sequence[float], top: int = TOP) -> dict[str, float]:
    """How many of those that two tasks need most are the same, beside random sets: the fields of a `Common`.

    Args:
        first: what each neuron is worth to one task.
        second: to the other.
        top: how many are compared.
    """
    sets = [set(sorted(range(len(one)), key=lambda i: -one[i])[:top]) for one in (first, second)]
    count, total = len(sets[0] & sets[1]), len(first)
    ways = [math.comb(top, i) * math.comb(total - top, top - i) / math.comb(total, top) for i in range(top + 1)]
    return {"count": count, "expected": top * top / total, "p_few": sum(ways[: count + 1]), "p_many": sum(ways[count:])}


def claims(runs: Runs) -> list[Claim]:
    """All claims."""
    together = runs[TOGETHER]
    return [apart_claim(together), neurons_claim(together), freezing_claim(together), turns_claim(runs[BY_TURNS])]


def apart_claim(runs: Sequence[Run]) -> Claim:
    """Whether the two tasks' information lies in disjoint subspaces."""
    seen = all(one.verdict == "shared" for run in runs for one in run.same.values())
    verdicts = [run.between.verdict for run in runs]
    return Claim(
        "Two tasks that are done together have their information in disjoint subspaces of the stream.",
        SOURCE,
        "disjoint subspaces do not interact",
        _overlaps(runs),
        _overlap_null(runs),
        finding(
            seen and all(verdict == "disjoint" for verdict in verdicts),
            partly=seen and all(verdict in ("disjoint", "as random") for verdict in verdicts),
        ),
        {"overlap": [run.between.overlap for run in runs], "p_disjoint": [run.between.p_disjoint for run in runs],
         "same": [one.overlap for run in runs for one in run.same.values()]},
    )  # fmt: skip


def neurons_claim(runs: Sequence[Run]) -> Claim:
    """Whether the two tasks need other neurons."""
    seen = all(one.p_many < LEVEL for run in runs for one in run.same_neurons.values())
    found = [run.neurons for run in runs]
    same = [one.count for run in runs for one in run.same_neurons.values()]
    return Claim(
        "They need other neurons.",
        SOURCE,
        "no number",
        f"of the {TOP} neurons that each needs most {listed([one.count for one in found])} are the same, "
        f"p {max(one.p_few for one in found):.2g} at most of so few",
        f"{found[0].expected:.1f} of random sets; {listed(same)} of one task asked in two ways",
        finding(
            seen and all(one.p_few < LEVEL for one in found),
            partly=seen and all(one.p_many >= LEVEL for one in found),
        ),
        {"common": [one.count for one in found], "expected": found[0].expected, "same": same},
    )


def freezing_claim(runs: Sequence[Run]) -> Claim:
    """Whether freezing a task's subspace removes that task alone."""
    pairs = [(run, *names) for run in runs for names in (TASKS, TASKS[::-1])]
    separated = all(
        run.frozen[own][own] <= HALF * run.plain[own]
        and run.frozen[own][other] >= MOST * run.plain[other]
        and min(run.random[own]) >= MOST * run.plain[own]
        for run, own, other in pairs
    )
    lower = all(run.frozen[own][own] < min(run.frozen[own][other], *run.random[own]) for run, own, other in pairs)
    return Claim(
        "Freezing the subspace of one task takes that task away and leaves the other.",
        SOURCE,
        "what reads another subspace is not reached",
        _accuracies(runs),
        _accuracy_null(runs),
        finding(separated, partly=lower),
        _accuracy_values(runs),
    )


def turns_claim(runs: Sequence[Run]) -> Claim:
    """The same where a run does one task."""
    return Claim(
        "Two tasks that are done by turns: how their subspaces lie, and what freezing one does.",
        SOURCE,
        "not published",
        f"{_overlaps(runs)}; {_accuracies(runs)}; of the {TOP} neurons that each needs most "
        f"{listed([run.neurons.count for run in runs])} are the same",
        f"{_overlap_null(runs)}; {_accuracy_null(runs)}; {runs[0].neurons.expected:.1f} neurons of random sets",
        "measured",
        {"overlap": [run.between.overlap for run in runs], **_accuracy_values(runs)},
    )


def frozen_table(runs: Runs, seeds: Sequence[int]) -> ExperimentTable:
    """Accuracies under every freezing."""
    rows = []
    for way, found in runs.items():
        for seed, run in zip(seeds, found, strict=True):
            rows.append([way, seed, "nothing", 0, *(run.plain[task] for task in TASKS), None])
            for own in TASKS:
                rows.append(
                    [way, seed, own, run.sizes[own], *(run.frozen[own][task] for task in TASKS), run.again[own]]
                )
            drawn = [fmean(run.random[task]) for task in TASKS]
            rows.append([way, seed, "random", max(run.sizes.values()), *drawn, None])
    return ExperimentTable(
        "Freezing",
        "accuracy with a subspace held at its mean; the last: of the frozen task, asked by its other word",
        ["tasks", "seed", "frozen", "directions", *TASKS, "asked otherwise"],
        rows,
    )


def units_table(runs: Runs, seeds: Sequence[int]) -> ExperimentTable:
    """What each head is worth to each task."""
    rows = [
        [way, seed, f"L0H{number}", *(run.heads[task][number] for task in TASKS)]
        for way, found in runs.items()
        for seed, run in zip(seeds, found, strict=True)
        for number in range(len(run.heads[TASKS[0]]))
    ]
    return ExperimentTable(
        "Heads", "what is added to -log p of the answer with the head held at its mean, in nats",
        ["tasks", "seed", "head", *TASKS], rows,
    )  # fmt: skip


def _overlaps(runs: Sequence[Run]) -> str:
    sizes = [size for run in runs for size in run.sizes.values()]
    found = [run.between.overlap for run in runs]
    worst = max(run.between.p_disjoint for run in runs)
    return f"overlap {listed(found)} of subspaces of {listed(sizes)} directions, p {worst:.2g} at most of one so small"


def _overlap_null(runs: Sequence[Run]) -> str:
    same = [one.overlap for run in runs for one in run.same.values()]
    expected, spread = (fmean(getattr(run.between, name) for run in runs) for name in ("expected", "spread"))
    return f"{expected:.2f} ± {spread:.2f} of random subspaces; {listed(same)} of one task asked in two ways"


def _accuracies(runs: Sequence[Run]) -> str:
    parts = []
    for own, other in (TASKS, TASKS[::-1]):
        kept, left = ([run.frozen[own][task] for run in runs] for task in (own, other))
        parts.append(f"{own} frozen: {own} {percents(kept)}, {other} {percents(left)}")
    return "; ".join(parts)


def _accuracy_null(runs: Sequence[Run]) -> str:
    plain, drawn = ([value for run in runs for task in TASKS for value in of(run, task)] for of in (_plain, _drawn))
    chance = max(run.chance[task] for run in runs for task in TASKS)
    return (
        f"nothing frozen {percents(plain)}; random subspaces {percents(drawn)}; the most frequent answer {chance:.1%}"
    )


def _plain(run: Run, task: str) -> Sequence[float]:
    return [run.plain[task]]


def _drawn(run: Run, task: str) -> Sequence[float]:
    return run.random[task]


def _accuracy_values(runs: Sequence[Run]) -> dict[str, Any]:
    return {"plain": [dict(run.plain) for run in runs],
            "frozen": [{own: dict(run.frozen[own]) for own in TASKS} for run in runs],
            "again": [dict(run.again) for run in runs],
            "random": [{task: min(run.random[task]) for task in TASKS} for run in runs]}  # fmt: skip
