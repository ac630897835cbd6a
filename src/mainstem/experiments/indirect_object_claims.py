"""What the indirect-object case claims, and its tables and figures, from what was run (see `indirect_object`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mainstem.analysis.intervals import Interval
from mainstem.analysis.ranks import rank_correlation
from mainstem.analysis.statistics import interval
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, Figure, finding
from mainstem.results.patch import PatchReading

if TYPE_CHECKING:
    from mainstem.session import Model

SOURCE = "Wang et al., Interpretability in the Wild, 2022"
STRONG = 0.1
"""The effect from which a head counts as found."""

HALF = 0.5
CIRCUIT = 26 / 144
"""The part of all heads that the published circuit is."""

LISTED = 10

Head = tuple[str, Interval]


@dataclass(frozen=True)
class Ablated:
    """What taking heads out does: the part of the mean logit difference that is lost, for each prompt.

    Attributes:
        found: without the heads that were found.
        published: the same on the published prompt alone.
        controls: by name, for each draw the mean part that is lost.
    """

    found: list[float]
    published: float
    controls: dict[str, list[float]]


def heads_by_effect(reading: PatchReading) -> list[Head]:
    """All heads of a sweep of heads, the largest effects first."""
    low, high = reading.low or reading.effects, reading.high or reading.effects
    found = []
    for i, row in enumerate(reading.rows):
        for j, column in enumerate(reading.columns):
            if (effect := reading.effects[i][j]) is not None:
                found.append((f"{row}{column}", Interval(effect, low[i][j] or 0.0, high[i][j] or 0.0)))
    return sorted(found, key=lambda head: -head[1].mean)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / max(len(values), 1)


def assemble(
    model: "Model",
    stream: PatchReading,
    heads: PatchReading,
    found: Sequence[Head],
    ablated: Ablated,
    estimates: Mapping[str, float],
    tested: int,
    tried: int,
) -> Experiment:
    """The result of the case."""
    strong = [head for head in found if head[1].mean >= STRONG]
    against = [head for head in reversed(found) if head[1].mean <= -STRONG]
    return Experiment(
        name="indirect-object",
        title="Indirect objects: which heads move the name",
        question=f"{stream.prompt['text']!r} is continued by {stream.answers[0]!r}: logit difference "
        f"{stream.clean:.2f}, {stream.corrupted_value:.2f} with the other giver",
        provenance=model.provenance(),
        model=model.summary,
        claims=[
            moved(stream),
            few(strong, found),
            opposed(against),
            estimated(strong, found, estimates, model.seed),
            taken_out(strong, ablated, model.seed),
            nulls(ablated),
        ],
        tables=[_course(stream), _heads(found), _ablations(ablated, len(strong), model.seed)],
        figures=[
            Figure("Effects of single heads", *_bars([*strong[:LISTED], *reversed(against)])),
            Figure(
                "Part of the logit difference that is lost; of controls the least and the most over draws",
                *_losses(ablated, model.seed),
            ),
        ],
        warnings=[warning for warning in heads.warnings if warning["code"] != "chat"],
        notes=[
            f"Heads were found on {heads.pairs} pairs and taken out on {tested} others, of {tried} drawn the first "
            "that are solved both ways.",
            f"Effects of heads over halves of the pairs correlate with {heads.stability.half:.2f}."
            if heads.stability
            else "Heads were found on one pair, without intervals.",
            *heads.notes,
        ],
    )


def moved(stream: PatchReading) -> Claim:
    """Whether what decides goes from where the prompts differ to the last position, through no other."""
    end = stream.position
    clean, corrupted = stream.prompt["ids"], stream.corrupted["ids"]
    start = next(i for i, (a, b) in enumerate(zip(clean, corrupted, strict=True)) if a != b)
    effects = torch.tensor(stream.effects, dtype=torch.float64)
    at = int((effects[:, end] > effects[:, start]).double().argmax())
    rest = effects.clone()
    rest[:, [start, end]] = 0
    elsewhere = float(rest.abs().max())
    tokens = stream.prompt["tokens"]
    return Claim(
        "The name is read where it is repeated, and moved from there to the last position.",
        SOURCE,
        "in GPT-2 small by heads of layers 7 to 9 of 12",
        f"up to {stream.rows[max(at - 1, 0)]} most is at the second {tokens[start]!r} "
        f"({effects[max(at - 1, 0), start]:.2f} of the difference), from {stream.rows[at]} on at the last token, "
        f"{tokens[end]!r} ({effects[at, end]:.2f})",
        f"other positions: at most {elsewhere:.2f} at any layer",
        finding(elsewhere < HALF and 0 < at < len(effects) - 1),
        {"from": start, "to": end, "layer": stream.rows[at], "elsewhere": elsewhere},
    )


def few(strong: Sequence[Head], found: Sequence[Head]) -> Claim:
    """Whether the heads that matter are as few as in the published circuit."""
    rest = sorted(abs(effect.mean) for _, effect in found if effect.mean < STRONG)
    named = _named(strong)
    return Claim(
        "A few heads do it.",
        SOURCE,
        "26 of 144 heads (18 %) in GPT-2 small",
        f"{len(strong)} of {len(found)} heads bring {STRONG:.0%} or more of the difference back, each alone: "
        f"{named or 'none'}",
        f"the median of the other heads: {rest[len(rest) // 2] if rest else 0.0:.3f}",
        finding(0 < len(strong) <= CIRCUIT * len(found)),
        {"heads": [name for name, _ in strong]},
    )


def opposed(against: Sequence[Head]) -> Claim:
    """Whether there are heads that write against the answer, beyond chance over pairs."""
    sure = [name for name, effect in against if effect.high < 0]
    named = _named(against)
    return Claim(
        "Some heads write against the answer.",
        SOURCE,
        "2 negative name movers in GPT-2 small",
        named or f"no head takes {STRONG:.0%} or more away",
        "an interval over pairs that holds 0",
        finding(bool(sure), bool(against)),
        {"heads": [name for name, _ in against]},
    )


def _named(heads: Sequence[Head]) -> str:
    return ", ".join(f"{name} {effect.mean:+.2f} [{effect.low:.2f}, {effect.high:.2f}]" for name, effect in heads)


def estimated(strong: Sequence[Head], found: Sequence[Head], estimates: Mapping[str, float], seed: int) -> Claim:
    """Whether attribution patching names the same heads as the exact sweeps."""
    first = sorted(estimates, key=lambda name: -estimates[name])[: len(strong)]
    shared = [name for name, _ in strong if name in first]
    both = [(effect.mean, estimates[name]) for name, effect in found if name in estimates]
    exact, guessed = torch.tensor(both, dtype=torch.float64).T
    rho = rank_correlation(exact, guessed, seed)
    chance = len(strong) ** 2 / max(len(found), 1)
    return Claim(
        "Attribution patching finds the same heads.",
        "Nanda, Attribution Patching, 2023",
        "claimed of heads",
        f"{len(shared)} of the {len(strong)} are among its first {len(strong)}: {', '.join(first) or 'none'}; over all "
        f"{rho.units} heads Spearman's correlation is {rho.value:.2f} [{rho.low:.2f}, {rho.high:.2f}] "
        "(integrated gradients, 5 steps)",
        f"{chance:.1f} of {len(strong)} by chance",
        finding(bool(strong) and len(shared) == len(strong), len(shared) > max(chance, len(strong) / 2)),
        {"first": first, "correlation": rho.value},
    )


def taken_out(strong: Sequence[Head], ablated: Ablated, seed: int) -> Claim:
    """Whether the heads together hold more than half of the logit difference."""
    lost = interval(ablated.found, seed)
    return Claim(
        "Without those heads, more than half of the logit difference is gone.",
        "expected of heads that move the name",
        "more than half",
        f"{lost.mean:.0%} [{lost.low:.0%}, {lost.high:.0%}] is lost on {len(ablated.found)} other prompts, "
        f"{ablated.published:.0%} on the published one, without {len(strong)} heads together",
        "0 % without any",
        finding(lost.low > HALF and ablated.published > HALF, lost.mean > HALF or ablated.published > HALF),
        {"lost": lost.mean, "published": ablated.published},
    )


def nulls(ablated: Ablated) -> Claim:
    """Whether as many random heads lose less than half, in every draw."""
    own = mean(ablated.found)
    draws = ablated.controls["random"]
    text = {
        name: f"{mean(values):.0%} ({min(values):.0%} to {max(values):.0%})"
        for name, values in ablated.controls.items()
        if values
    }
    below = bool(draws) and max(draws) < min(HALF, own)
    return Claim(
        "As many random heads do not.",
        "expected of heads that move the name",
        "less than half, in every draw",
        f"random heads from anywhere: {text.get('random', 'none drawn')} over {len(draws)} draws",
        f"heads of the same layers: {text.get('same layers', 'none drawn')}; those found: {own:.0%}",
        finding(below, bool(draws) and mean(draws) < min(HALF, own)),
        {name: list(values) for name, values in ablated.controls.items()},
    )


def _course(stream: PatchReading) -> ExperimentTable:
    """The two positions' effects along the layers."""
    values = moved(stream).values
    start, end = values["from"], values["to"]
    tokens = stream.prompt["tokens"]
    return ExperimentTable(
        "Where the name is",
        "the effect of the stream that enters each layer, at the two positions; 0 corrupted, 1 clean",
        ["before", f"{start} {tokens[start].strip()}", f"{end} {tokens[end].strip()}"],
        [[row, effects[start], effects[end]] for row, effects in zip(stream.rows, stream.effects, strict=True)],
    )


def _heads(found: Sequence[Head]) -> ExperimentTable:
    ends = [*found[:LISTED], *found[-3:]]
    return ExperimentTable(
        "Heads",
        f"the {LISTED} largest effects and the 3 lowest, each head alone, at all positions; intervals over pairs",
        ["head", "effect"],
        [[name, effect] for name, effect in dict(ends).items()],
    )


def _ablations(ablated: Ablated, count: int, seed: int) -> ExperimentTable:
    rows: list[list] = [["the heads found", count, 1, interval(ablated.found, seed)]]
    rows += [[name, count, len(values), _spread(values)] for name, values in ablated.controls.items() if values]
    return ExperimentTable(
        "Heads taken out together",
        "the part of the mean logit difference that is lost; of controls the mean, least and most over draws",
        ["heads", "how many", "draws", "lost"],
        rows,
    )


def _spread(values: Sequence[float]) -> Interval:
    """A mean between the least and the most."""
    return Interval(mean(values), min(values), max(values))


def _bars(heads: Sequence[Head]) -> tuple[list[str], list[Interval]]:
    return [name for name, _ in heads], [effect for _, effect in heads]


def _losses(ablated: Ablated, seed: int) -> tuple[list[str], list[Interval]]:
    names, bars = ["the heads found"], [interval(ablated.found, seed)]
    for name, values in ablated.controls.items():
        if values:
            names.append(name)
            bars.append(_spread(values))
    return names, bars
