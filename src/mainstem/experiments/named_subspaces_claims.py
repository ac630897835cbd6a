"""The claims of the experiment on named subspaces, from its numbers; the rules are in `named_subspaces`."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.analysis.intervals import Interval
from mainstem.analysis.statistics import interval
from mainstem.analysis.subspace import Overlap
from mainstem.experiments.named_readers import BYSTANDERS
from mainstem.experiments.outcome import Claim, ExperimentTable, finding

SOURCE = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits"
NOTHING, EVERYTHING, RANDOM = "nothing", "everything", "random"
"""What is interchanged: no direction, all of them, and random subspaces by number."""

HALF, MOST = 0.5, 0.9


@dataclass(frozen=True)
class Held:
    """How often the right one of the held-out words is named, by word.

    Attributes:
        kind: what the probe is for.
        directions: of the subspace.
        inside, whole: through the subspace, and of the whole stream.
        random: through random subspaces of as many directions.
        drawn: with targets drawn for each word.
        other: asked for the other word of the sentence.
    """

    kind: str
    directions: int
    candidates: int
    inside: Sequence[float]
    whole: Sequence[float]
    random: Sequence[float]
    drawn: Sequence[float]
    other: Sequence[float]


@dataclass(frozen=True)
class Changed:
    """What an interchange does.

    Attributes:
        name: whose subspace it is.
        told: by kind, how often the later probe tells the base's word and the source's, by word.
        neurons, heads: by group, each reader's change, 1 that of the interchange of everything; sides of heads.
    """

    name: str
    told: dict[str, tuple[list[float], list[float]]]
    neurons: dict[str, list[float]]
    heads: dict[str, list[float]]

    def groups(self, readers: str) -> dict[str, list[float]]:
        """Those of "neurons" or "heads"."""
        return self.neurons if readers == "neurons" else self.heads


def claims(held: Sequence[Held], between: Overlap, changed: Sequence[Changed]) -> list[Claim]:
    """All claims; kinds are those of `held`, two of them."""
    kinds = [one.kind for one in held]
    by_name = {one.name: one for one in changed}
    found = [*(held_claim(one) for one in held), apart_claim(between)]
    for kind, other in (kinds, kinds[::-1]):
        found += [moved_claim(kind, other, by_name), readers_claim(kind, other, by_name, "neurons")]
        if changed[0].heads:
            found.append(readers_claim(kind, other, by_name, "heads"))
    return found


def held_claim(one: Held) -> Claim:
    """Whether a subspace holds a word."""
    inside, whole, random, drawn, other = map(interval, (one.inside, one.whole, one.random, one.drawn, one.other))
    return Claim(
        f"A subspace holds the {one.kind}.",
        SOURCE,
        "no number",
        f"{one.directions} directions name {_percent(inside)} of {one.candidates} unseen words, "
        f"the whole stream {_percent(whole)}",
        f"{1 / one.candidates:.1%} by guessing; random directions {_percent(random)}; "
        f"random targets {_percent(drawn)}; asked for the other word {_percent(other)}",
        finding(_above(inside, random, drawn, other), partly=_above(whole, drawn, other)),
        {"inside": inside.mean, "whole": whole.mean, "random": random.mean, "drawn": drawn.mean, "other": other.mean,
         "selectivity": inside.mean - drawn.mean, "candidates": one.candidates},
    )  # fmt: skip


def apart_claim(between: Overlap) -> Claim:
    """Whether the two subspaces are disjoint."""
    return Claim(
        "The two lie in disjoint subspaces.",
        SOURCE,
        "disjoint subspaces do not interact",
        f"overlap {between.overlap:.3f}, p {between.p_disjoint:.3f} of one so small",
        f"{between.expected:.3f} ± {between.spread:.3f} for random subspaces, p {between.p_shared:.3f} of one so large",
        finding(between.verdict == "disjoint", partly=between.verdict == "as random"),
        {"overlap": between.overlap, "expected": between.expected, "spread": between.spread, "z": between.z,
         "p_disjoint": between.p_disjoint, "p_shared": between.p_shared},
    )  # fmt: skip


def moved_claim(kind: str, other: str, changed: dict[str, Changed]) -> Claim:
    """Whether the run goes on with the source's word, and with the base's other word."""
    moved = interval(changed[kind].told[kind][1])
    random = interval([value for one in _random(changed) for value in one.told[kind][1]])
    full = interval(changed[EVERYTHING].told[kind][1])
    kept, plain = (interval(changed[name].told[other][0]) for name in (kind, NOTHING))
    changes = _above(moved, random)
    holds = changes and moved.mean >= HALF * full.mean and kept.mean >= MOST * plain.mean
    return Claim(
        f"With its subspace interchanged, the run has the source's {kind} and still the base's {other}.",
        SOURCE,
        "no number",
        f"the source's {kind} is told in {_percent(moved)}, the base's {other} in {_percent(kept)}",
        f"random subspaces {_percent(random)}, all directions {_percent(full)}; without any the {other} "
        f"{_percent(plain)}",
        finding(holds, partly=changes),
        {"moved": moved.mean, "random": random.mean, "full": full.mean, "kept": kept.mean, "plain": plain.mean},
    )


def readers_claim(kind: str, other: str, changed: dict[str, Changed], readers: str) -> Claim:
    """Whether what reads the subspace by its weights changes, and what reads the other does not."""
    groups = changed[kind].groups(readers)
    own, others, bystanders = (interval(groups[name]) for name in (kind, other, BYSTANDERS))
    draws = [one.groups(readers)[kind] for one in _random(changed)]
    random = interval([sum(values) / len(values) for values in zip(*draws, strict=True)])
    changes = _above(own, others, bystanders, random)
    return Claim(
        f"Swapped, the subspace of the {kind} changes the {readers} that read it and not the other's readers.",
        SOURCE,
        "no number",
        f"its readers change by {own.mean:.2f} [{own.low:.2f}, {own.high:.2f}] of what the whole stream does to them, "
        f"the other's by {others.mean:.2f} [{others.low:.2f}, {others.high:.2f}]",
        f"random {readers} {bystanders.mean:.2f} [{bystanders.low:.2f}, {bystanders.high:.2f}]; "
        f"its readers under random subspaces {random.mean:.2f} [{random.low:.2f}, {random.high:.2f}]",
        finding(changes and not _above(others, bystanders) and others.mean <= HALF * own.mean, partly=changes),
        {"readers": own.mean, "other": others.mean, "bystanders": bystanders.mean, "random": random.mean},
    )


def swap_table(changed: Sequence[Changed], caption: str) -> ExperimentTable:
    """Every interchange: what is told afterwards, and the mean change of each group of readers."""
    heads, rows = ["interchanged"], []
    for kind in changed[0].told:
        heads += [f"{kind}: the base's", f"{kind}: the source's"]
    for readers in ("neurons", "heads"):
        names = changed[0].groups(readers)
        heads += [f"{readers}: {name}" if name != BYSTANDERS else f"{name} {readers}" for name in names]
    for one in changed:
        told = [interval(values).mean for pair in one.told.values() for values in pair]
        groups = [*one.neurons.values(), *one.heads.values()]
        rows.append([one.name, *told, *(sum(values) / len(values) for values in groups)])
    return ExperimentTable("Interchange", caption, heads, rows)


def _random(changed: dict[str, Changed]) -> list[Changed]:
    return [one for name, one in changed.items() if name.startswith(RANDOM)]


def _above(own: Interval, *controls: Interval) -> bool:
    """Whether a mean's interval lies above that of each control."""
    return all(own.low > control.high for control in controls)


def _percent(one: Interval) -> str:
    return f"{one.mean:.1%} [{one.low:.1%}, {one.high:.1%}]"
