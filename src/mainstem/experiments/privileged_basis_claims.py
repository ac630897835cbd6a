"""What the case of the privileged basis claims, and its tables and figures, from what was run (`privileged_basis`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem.analysis.intervals import Interval
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, Figure, finding
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow
from mainstem.results.basis_rotations import PrecisionRow, RotationSection

if TYPE_CHECKING:
    from mainstem.session import Model

SOURCE = "Elhage, Lasenby, Olah, Privileged Bases, 2023"
HEAVY = 20.0
"""The kurtosis mid-stack from which the tails are far from a random direction's, whose kurtosis is 3."""

NEAR = 0.15
"""How far from 3 the mean over rotations may be."""

TINY = {"float64": 1e-6, "float32": 1e-4}
"""The largest change of the loss that is rounding."""


@dataclass(frozen=True)
class Found:
    """What was run.

    Attributes:
        section: kurtosis with its null.
        largest: for each state of the stream the dimension of the largest mean square.
        thinned: its kurtosis over all other dimensions.
        losses: the model and its rotated copy, precision by precision.
    """

    section: KurtosisSection
    largest: list[int]
    thinned: list[float]
    losses: RotationSection

    @property
    def states(self) -> list[PointRow]:
        """The states of the stream, in the order of execution."""
        return [row for row in self.section.points if row.kind == "stream"]

    @property
    def middle(self) -> range:
        """Which of the states are the middle half of the stack."""
        count = len(self.states)
        return range(count // 4, max(count - count // 4, count // 4 + 1))


def assemble(model: "Model", found: Found) -> Experiment:
    """The result of the case."""
    states = found.states
    return Experiment(
        name="privileged-basis",
        title="A privileged basis: the stream's coordinates are heavy-tailed, and need not be",
        question="Is the basis of the stream special, and does the computation need it?",
        provenance=model.provenance(),
        model=model.summary,
        claims=[
            heavy(found),
            rotated(found),
            not_first(found),
            not_one(found),
            needless(found.losses),
            measured_by_size(found),
        ],
        tables=[_states(found), _losses(found.losses)],
        figures=[
            Figure("Kurtosis of the stream, first positions left out", [row.name for row in states],
                   [_point(row.without_first) for row in states]),
            Figure("The same after a random rotation, the least and the largest of all rotations",
                   [row.name for row in states],
                   [Interval(row.rotated, row.rotated_least, row.rotated_largest) for row in states]),
        ],
        notes=[
            "That kurtosis is 3 does not show that no basis is special; that it is not shows that one is.",
            "Which part of training makes the basis special cannot be seen in one trained model.",
        ],
    )  # fmt: skip


def heavy(found: Found) -> Claim:
    """Whether kurtosis is far above its null in the middle of the stack."""
    rows = [found.states[i] for i in found.middle]
    low, high = min(row.without_first for row in rows), max(row.without_first for row in rows)
    null = max(row.rotated_largest for row in rows)
    above = [row for row in found.states if row.without_first > row.rotated_largest]
    return Claim(
        "The stream has a privileged basis: kurtosis over coordinates is far above 3.",
        SOURCE,
        "far from Gaussian (a figure without numbers)",
        f"{low:.0f} to {high:.0f} in the middle half of the stack, first positions left out; {len(above)} of "
        f"{len(found.states)} states are above every rotation",
        f"at most {null:.2f} after any of {found.section.rotations['draws']} random rotations",
        finding(low > HEAVY, low > null),
        {"least": low, "largest": high, "null": null},
    )


def rotated(found: Found) -> Claim:
    """Whether a rotation takes it to 3."""
    means = [row.rotated for row in found.states]
    away = max(abs(mean - 3) for mean in means)
    return Claim(
        "After a random rotation it is that of a random direction.",
        SOURCE,
        "about 3",
        f"{min(means):.2f} to {max(means):.2f} over states, means over {found.section.rotations['draws']} rotations",
        f"expected of a random direction: {found.section.expectation:.3f}",
        finding(away <= NEAR, 10 * away < max(row.without_first for row in found.states)),
        {"least": min(means), "largest": max(means)},
    )


def not_first(found: Found) -> Claim:
    """Whether other positions than the first have it."""
    row = found.states[found.middle[len(found.middle) // 2]]
    return Claim(
        "It is not the first position alone.",
        "a control: first positions are sinks with massive activations (Sun et al. 2024)",
        "not published",
        f"{row.name}: {row.kurtosis:.1f} with first positions, {row.without_first:.1f} without",
        f"rotated: {row.rotated:.2f}",
        finding(row.without_first > HEAVY, row.without_first > row.rotated_largest),
        {"with": row.kurtosis, "without": row.without_first},
    )


def not_one(found: Found) -> Claim:
    """Whether it is more than one dimension."""
    rest = [found.thinned[i] for i in found.middle]
    null = max(found.states[i].rotated_largest for i in found.middle)
    names = sorted({found.largest[i] for i in found.middle})
    return Claim(
        "It is not one dimension alone.",
        "a control",
        "20 to 60 dimensions above 6 in a layer of width 1,280",
        f"without the largest dimension of each state ({', '.join(map(str, names))}): {min(rest):.1f} to "
        f"{max(rest):.1f} in the middle half of the stack",
        f"at most {null:.2f} after any rotation",
        finding(min(rest) > null, max(rest) > null),
        {"least": min(rest), "largest": max(rest)},
    )


def needless(losses: RotationSection) -> Claim:
    """Whether the model computes the same in a rotated basis."""
    named = {row.dtype: row for row in losses.precisions if row.lifted or row.dtype != "float64"}
    small = [_change(named.get(dtype)) < most for dtype, most in TINY.items()]
    own = losses.certificate["logits"]
    return Claim(
        "The computation does not need it: a rotated model predicts the same.",
        SOURCE,
        "the loss changes by an absolutely tiny amount, far less than a seed changes it",
        "change of the loss: " + ", ".join(f"{_named(row)} {_words(row)}" for row in losses.precisions)
        + f"; logits in float64 apart by {own:.0e} of the largest",
        "rounding alone, the model in its own basis: " + _rounding(named),
        finding(all(small), any(small)),
        {_named(row): row.change for row in losses.precisions},
    )  # fmt: skip


def _named(row: PrecisionRow) -> str:
    return f"{row.dtype} with casts lifted" if row.lifted else row.dtype


def _change(row: PrecisionRow | None) -> float:
    return math.inf if row is None or row.change is None else abs(row.change)


def _words(row: PrecisionRow) -> str:
    return row.failure or "not measured" if row.change is None else f"{row.change:+.1e}"


def _rounding(named: dict[str, PrecisionRow]) -> str:
    """How much the loss of the model itself changes in narrower numbers."""
    full = named["float64"].loss if "float64" in named else None
    if full is None:
        return "not measured"
    tokens = named["float64"].tokens  # losses on other tokens are no measure of rounding
    narrower = [
        (dtype, row.loss - full)
        for dtype, row in named.items()
        if dtype != "float64" and row.loss is not None and row.tokens == tokens
    ]
    return ", ".join(f"{dtype} {change:+.1e}" for dtype, change in narrower)


def measured_by_size(found: Found) -> Claim:
    """The other kurtosis, of neurons' sizes."""
    rows = [found.states[i] for i in found.middle]
    low, high = (pick(row.neuron_kurtosis_without_first for row in rows) for pick in (min, max))
    return Claim(
        "Some coordinates are large for all tokens: kurtosis of their root mean squares.",
        "He et al., Understanding and Minimising Outlier Features, 2024",
        "25.6 in a model of 125 M parameters trained as usual, 1.2 with their block and SOAP",
        f"{low:.0f} to {high:.0f} in the middle half of the stack",
        "1 if all coordinates are equally large",
        "measured",
        {"least": low, "largest": high},
    )


def _point(value: float) -> Interval:
    return Interval(value, value, value)


def _states(found: Found) -> ExperimentTable:
    return ExperimentTable(
        "The stream, state by state",
        f"after each write, {found.section.tokens['all']:,} tokens; rotated on {found.section.rotations['tokens']:,}",
        ["after", "kurtosis", "without first positions", "without its largest dimension", "rotated", "of neurons"],
        [
            [row.name, row.kurtosis, row.without_first, thinned,
             Interval(row.rotated, row.rotated_least, row.rotated_largest), row.neuron_kurtosis_without_first]
            for row, thinned in zip(found.states, found.thinned, strict=True)
        ],
    )  # fmt: skip


def _losses(losses: RotationSection) -> ExperimentTable:
    return ExperimentTable(
        "The model and its rotated copy",
        "nats a token, the same tokens in both bases; with casts lifted, norms are computed in the dtype of the rest",
        ["dtype", "casts lifted", "tokens", "loss", "rotated", "change", "KL", "likeliest token changed"],
        [
            [row.dtype, "yes" if row.lifted else "no", row.tokens,
             *_numbers(row.loss, row.rotated_loss, row.change, row.kl, row.flips)]
            for row in losses.precisions
        ],
    )  # fmt: skip


def _numbers(*values: float | None) -> Sequence[float | str]:
    return ["" if value is None else value for value in values]
