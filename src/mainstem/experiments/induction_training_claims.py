"""What the case of induction claims, and its table and figures, from what was trained (see `induction_training`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mainstem.experiments.outcome import Claim, Curves, ExperimentTable, finding
from mainstem.experiments.spreads import percent_span, span

OLSSON = "Olsson et al., In-context Learning and Induction Heads, 2022"
ELHAGE = "Elhage et al., A Mathematical Framework for Transformer Circuits, 2021"
TWO, ONE, SMEARED = "two layers", "one layer", "one layer, smeared keys"
LOW, HIGH = 0.1, 0.5


@dataclass(frozen=True)
class Window:
    """When induction heads form.

    Attributes:
        first: the last measured step before the rise at which the best score is below `LOW`.
        last: the first after it at which it is `HIGH` or more.
        share: of all steps.
    """

    first: float
    last: float
    share: float


@dataclass(frozen=True)
class Run:
    """One trained model.

    Attributes:
        probes: what was measured at each step (`mainstem.experiments.induction_probes`).
        heads: each head's prefix-matching and previous-token score at the end.
        composed: of two layers, how the head of the largest prefix-matching score reads the previous-token head: z of
            "q", "k" and "v", of "k" "before" training, and the largest of other "writers".
        taken: of two layers, what is lost without the heads found; None where there are none.
    """

    probes: Sequence[Mapping[str, float]]
    heads: Mapping[str, Sequence[float]]
    composed: Mapping[str, Any] | None
    taken: Mapping[str, Any] | None

    def line(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of one measure."""
        return [(row["step"], row[f"induction.{name}"]) for row in self.probes]

    def values(self, name: str) -> list[float]:
        """The values of one measure."""
        return [value for _, value in self.line(name)]

    @property
    def window(self) -> Window | None:
        """The window; None where there is none."""
        line = self.line("prefix")
        last = next((i for i, (_, value) in enumerate(line) if value >= HIGH), None)
        if last is None:
            return None
        low = [i for i, (_, value) in enumerate(line[:last]) if value < LOW]
        if not low:
            return None
        first = low[-1]
        return Window(line[first][0], line[last][0], (line[last][0] - line[first][0]) / line[-1][0])

    def change_inside(self, name: str) -> float:
        """The part of a measure's whole fall, from the first measurement to the last, that is inside the window."""
        window, line = self.window, dict(self.line(name))
        if window is None:
            return 0.0
        values = list(line.values())
        whole = values[-1] - values[0]
        return (line[window.last] - line[window.first]) / whole if whole < 0 else 0.0


Runs = Mapping[str, Sequence[Run]]


def claims(runs: Runs) -> list[Claim]:
    """All claims."""
    two, one, smeared = runs[TWO], runs[ONE], runs[SMEARED]
    return [
        forms(two, one),
        falls_inside(
            two,
            "repeats",
            "The loss on repeats falls in the window in which induction heads form",
            "all of the bump in the loss",
            0.5,
            f"where nothing is repeated it ends at {span([run.values('unrepeated')[-1] for run in two])} nats",
        ),
        falls_inside(
            two,
            "in_context",
            "In-context learning comes about in that window",
            "more than 75 %",
            0.75,
            f"with one layer it ends at {span([run.values('in_context')[-1] for run in one])} nats",
        ),
        smears(smeared, one),
        composes([run.composed for run in two if run.composed is not None]),
        removed([run.taken for run in two]),
    ]


def forms(two: Sequence[Run], one: Sequence[Run]) -> Claim:
    """Whether two layers form induction heads, and one does not."""
    start, end = [run.values("prefix")[0] for run in two], [run.values("prefix")[-1] for run in two]
    null = [max(run.values("prefix")) for run in one]
    windows = [run.window for run in two]
    holds = max(start) < LOW and all(windows) and min(end) >= HIGH and max(null) < LOW
    partly = max(start) < LOW and min(end) >= 2 * LOW and max(null) < min(end) / 2
    spans = ", ".join("none" if w is None else f"{w.first:.0f} to {w.last:.0f}" for w in windows)
    return Claim(
        claim="Two layers of attention form induction heads, one does not",
        source=OLSSON,
        published="in two layers and more, within a short window; not in one",
        measured=f"best prefix-matching score {span(end)}, {span(start)} at the start; window in steps {spans}",
        null=f"one layer, the best at any time {span(null)}",
        finding=finding(holds, partly),
        values={"start": start, "end": end, "one layer": null},
    )


def falls_inside(runs: Sequence[Run], name: str, claim: str, published: str, wanted: float, more: str) -> Claim:
    """Whether a measure falls in the window, by at least so much of its whole fall."""
    inside = [run.change_inside(name) for run in runs]
    shares = [run.window.share if run.window else 1.0 for run in runs]
    holds = all(part >= wanted and part >= 2 * share for part, share in zip(inside, shares, strict=True))
    partly = all(part > share for part, share in zip(inside, shares, strict=True))
    first, last = ([run.values(name)[place] for run in runs] for place in (0, -1))
    return Claim(
        claim=claim,
        source=OLSSON,
        published=published,
        measured=f"{percent_span(inside)} of the whole fall; at the end {span(last)} nats, at the start {span(first)}",
        null=f"the window is {percent_span(shares)} of the steps; {more}",
        finding=finding(holds, partly),
        values={"inside": inside, "share of the steps": shares},
    )


def smears(smeared: Sequence[Run], one: Sequence[Run]) -> Claim:
    """Whether smeared keys let one layer do it."""
    own, null = ([run.values("prefix")[-1] for run in runs] for runs in (smeared, one))
    return Claim(
        claim="With smeared keys one layer of attention forms induction heads",
        source=OLSSON,
        published="with smeared keys one-layer models show the change, too",
        measured=f"best prefix-matching score {span(own)}",
        null=f"with plain keys {span(null)}",
        finding=finding(min(own) >= HIGH and min(own) >= 3 * max(null), min(own) >= 3 * max(null)),
        values={"smeared": own, "plain": null},
    )


def composes(found: Sequence[Mapping[str, Any]]) -> Claim:
    """Whether the induction head reads the previous-token head by its keys."""
    own, before = [one["k"] for one in found], [one["before"] for one in found]
    others = [max(one["q"], one["v"], one["writers"]) for one in found]
    holds = min(own) > 3 and all(k > other for k, other in zip(own, others, strict=True)) and max(before) < 3
    pairs = ", ".join(f"{one['reader']} reads {one['writer']}" for one in found)
    return Claim(
        claim="Induction heads read the previous-token head by their keys (K-composition)",
        source=ELHAGE,
        published="the one strong composition of a two-layer model",
        measured=f"{pairs}: {span(own)} standard deviations of a random rotation; by queries, by values and of other "
        f"heads at most {span(others)}",
        null=f"the same heads before training {span(before)}",
        finding=finding(holds, min(own) > 3),
        values={"k": own, "others": others, "before": before},
    )


def removed(found: Sequence[Mapping[str, Any] | None]) -> Claim:
    """Whether induction is gone without the heads."""
    taken = [one for one in found if one is not None]
    lost = [one["lost"] / one["gained"] for one in taken]
    null = [max(one["controls"], default=0.0) / one["gained"] for one in taken]
    others = span([one["others"] for one in taken])
    always = bool(taken) and len(taken) == len(found)
    matched = all(one["others"] >= len(one["heads"]) for one in taken)  # as many others are in the layer
    holds = always and matched and all(a >= 0.5 and b <= a / 2 for a, b in zip(lost, null, strict=True))
    partly = always and all(one["others"] for one in taken)
    partly = partly and all(a >= 0.25 and b < a for a, b in zip(lost, null, strict=True))
    heads = "; ".join(", ".join(one["heads"]) for one in taken) or "none found"
    return Claim(
        claim="Without its induction heads a model loses what it learns from repetition",
        source=OLSSON,
        published="in small models in-context learning falls when they are knocked out",
        measured=f"without {heads}: {percent_span(lost)} of the gain on second copies is lost",
        null=f"without other heads of the same layers, {others}, at most {percent_span(null)}",
        finding=finding(holds, partly),
        values={"lost": lost, "random": null},
    )


def table(runs: Runs, seeds: Sequence[int]) -> ExperimentTable:
    """Every model at the end of its training."""
    names = ("prefix", "previous", "repeats", "unrepeated", "in_context")
    return ExperimentTable(
        "At the end of training",
        "best head's attention; losses and the in-context score in nats a token",
        ["arm", "seed", "prefix matching", "previous token", "loss on repeats", "not repeated", "in-context score"],
        [
            [arm, seed, *(run.values(name)[-1] for name in names)]
            for arm, found in runs.items()
            for seed, run in zip(seeds, found, strict=True)
        ],
    )


def curves(runs: Runs, seeds: Sequence[int]) -> list[Curves]:
    """What was measured while the models learned."""
    shown = (
        ("prefix", "Best prefix-matching score", "attention to the token after the earlier copy", "attention"),
        ("repeats", "Loss on repeats", "second copies of segments in text not trained on", "nats a token"),
        ("in_context", "In-context score", "loss late in a sequence less that early in it", "nats a token"),
    )
    return [
        Curves(
            title,
            caption,
            "step",
            unit,
            {
                f"{arm}, seed {s}": run.line(name)
                for arm, found in runs.items()
                for s, run in zip(seeds, found, strict=True)
            },
        )
        for name, title, caption, unit in shown
    ]
