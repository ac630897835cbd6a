"""The claims of the experiment on degradation, from its numbers; the rules are in `degradation`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from mainstem.experiments.outcome import Claim, ExperimentTable, finding
from mainstem.experiments.spreads import listed, percents

SOURCE = "He et al. 2015, Deep Residual Learning for Image Recognition"
PLAIN_20, PLAIN_56, RESIDUAL_20, RESIDUAL_56 = "plain-20", "plain-56", "residual-20", "residual-56"
SINGLE, TRIPLE = "residual-56 by ones", "residual-56 by threes"
"""The arms; blocks are of two layers, or by ones of one and by threes of three."""

TENTH, HALF, MOST = 0.1, 0.5, 0.9
LARGER = 1.1
"""A loss is larger than another from so many times it; more than what the order of sums makes of it."""

SOUND, WEAK, VANISHED = 0.1, 0.01, 0.001
"""Of the first layer's gradient over the last's: as large, smaller, and gone."""


@dataclass(frozen=True)
class Run:
    """What one training gave.

    Attributes:
        epochs: the mean training loss of each epoch's batches, in nats.
        training_error, test_error: the share of images that are told wrongly, after training.
        responses: the standard deviation of each convolution's output after batch norm, in the order of layers.
        gradients: the norms of the first and the last convolution's gradient, before training and after each epoch.
    """

    epochs: Sequence[float]
    training_error: float
    test_error: float
    responses: Sequence[float]
    gradients: Sequence[Sequence[float]]

    @property
    def loss(self) -> float:
        """Of the last epoch."""
        return self.epochs[-1]

    @property
    def response(self) -> float:
        """The mean over layers."""
        return fmean(self.responses)

    @property
    def gradient_ratios(self) -> list[float]:
        """The first layer's gradient over the last's, before training and after each epoch; 0 if the last's is 0."""
        return [first / last if last else 0.0 for first, last in self.gradients]

    @property
    def gradient_ratio(self) -> float:
        """The geometric mean of these over the run; 0 if one is ever 0."""
        return geometric_mean(ratios) if min(ratios := self.gradient_ratios) else 0.0


Runs = Mapping[str, Sequence[Run]]
"""By arm, one run for each seed, in the same order."""


def claims(runs: Runs, vanishing: Sequence[float]) -> list[Claim]:
    """All claims; that on blocks of three if they were run.

    Args:
        runs: by arm.
        vanishing: the first gradient over the last in the control, for each seed.
    """
    found = [depth_claim(runs), fitting_claim(runs), shortcut_claim(runs), gradient_claim(runs, vanishing)]
    found += [response_claim(runs), single_claim(runs)]
    return [*found, triple_claim(runs)] if TRIPLE in runs else found


def depth_claim(runs: Runs) -> Claim:
    """Whether the deeper plain network has the higher training loss."""
    shallow, deep = _losses(runs, PLAIN_20), _losses(runs, PLAIN_56)
    clearly = _always(deep, [LARGER * loss for loss in shallow])
    return Claim(
        "Plain networks train worse when they are deeper.",
        SOURCE,
        "plain-56 above plain-20 in training error, all through (figures 1 and 6)",
        f"training loss of plain-20 {listed(shallow)}, of plain-56 {listed(deep)}",
        f"{max(shallow) - min(shallow):.3g} between seeds of plain-20" if len(shallow) > 1 else "one seed: no spread",
        finding(min(deep) > max(shallow) and clearly, partly=_always(deep, shallow)),
        {"plain-20": shallow, "plain-56": deep},
    )


def fitting_claim(runs: Runs) -> Claim:
    """Whether the deeper plain network fails on training images, too."""
    train = [[run.training_error for run in runs[name]] for name in (PLAIN_20, PLAIN_56)]
    test = [[run.test_error for run in runs[name]] for name in (PLAIN_20, PLAIN_56)]
    underfits = _always(train[1], train[0])
    return Claim(
        "It is not overfitting: the deeper plain network is worse on the images it is trained with.",
        SOURCE,
        "higher training error and, with it, higher test error",
        f"training error of plain-20 {percents(train[0])}, of plain-56 {percents(train[1])}; "
        f"test error {percents(test[0])} and {percents(test[1])}",
        "overfitting would be a lower training error beside a higher test error",
        finding(underfits and _always(test[1], test[0]), partly=underfits),
        {"training": train, "test": test},
    )


def shortcut_claim(runs: Runs) -> Claim:
    """Whether depth costs residual networks nothing."""
    plain, residual = _losses(runs, PLAIN_56), _losses(runs, RESIDUAL_56)
    costs = [_costs(runs, *pair) for pair in ((PLAIN_20, PLAIN_56), (RESIDUAL_20, RESIDUAL_56))]
    below = _always(plain, residual)
    free = all(cost > 0 and own <= TENTH * cost for cost, own in zip(*costs, strict=True))
    return Claim(
        "With shortcuts around blocks of two layers depth costs nothing.",
        SOURCE,
        "test error on CIFAR-10 8.75 % with 20 layers, 6.97 % with 56",
        f"training loss of residual-20 {listed(_losses(runs, RESIDUAL_20))}, of residual-56 {listed(residual)}; "
        f"test error {percents([run.test_error for run in runs[RESIDUAL_20]])} and "
        f"{percents([run.test_error for run in runs[RESIDUAL_56]])}",
        f"the same weights and batches without shortcuts: 36 layers more cost {listed(costs[0])}, "
        f"with them {listed(costs[1])}",
        finding(below and free, partly=below),
        {"residual-56": residual, "plain-56": plain, "cost plain": costs[0], "cost residual": costs[1]},
    )


def gradient_claim(runs: Runs, vanishing: Sequence[float]) -> Claim:
    """Whether the first layer of the deep plain network gets gradients."""
    ratios = [run.gradient_ratio for run in runs[PLAIN_56]]
    starts = [run.gradient_ratios[0] for run in runs[PLAIN_56]]
    lowest = [min(run.gradient_ratios) for run in runs[PLAIN_56]]
    seen = max(vanishing) < VANISHED
    return Claim(
        "Nor do gradients vanish in the deeper plain network.",
        SOURCE,
        "gradients have healthy norms with batch norm",
        f"the first convolution's gradient over the last's: {listed(ratios)} through training, "
        f"{listed(starts)} before it, {listed(lowest)} at its lowest",
        f"with sigmoids and without batch norm {listed(vanishing)}; residual-56 "
        f"{listed([run.gradient_ratio for run in runs[RESIDUAL_56]])}",
        finding(seen and min(ratios) >= SOUND, partly=seen and min(ratios) >= WEAK),
        {"plain-56": ratios, "before training": starts, "lowest": lowest, "control": list(vanishing)},
    )


def response_claim(runs: Runs) -> Claim:
    """Whether layers of residual networks change their input less."""
    found = {name: [run.response for run in runs[name]] for name in (PLAIN_20, RESIDUAL_20, PLAIN_56, RESIDUAL_56)}
    smaller = _always(found[PLAIN_20], found[RESIDUAL_20]) and _always(found[PLAIN_56], found[RESIDUAL_56])
    return Claim(
        "Layers of residual networks respond less than those of plain ones, and the less the deeper they are.",
        SOURCE,
        "smaller standard deviations of layers' outputs after batch norm (figure 7)",
        "mean over layers: " + ", ".join(f"{name} {listed(values)}" for name, values in found.items()),
        "1 in every untrained network, where batch norm makes it so",
        finding(smaller and _always(found[RESIDUAL_20], found[RESIDUAL_56]), partly=smaller),
        found,
    )


def single_claim(runs: Runs) -> Claim:
    """Whether blocks of one layer bring less than blocks of two."""
    gains = _gains(runs, SINGLE)
    return Claim(
        "Blocks of one layer have no advantage over a plain network.",
        SOURCE,
        "no advantages observed",
        f"training loss {listed(_losses(runs, SINGLE))}: {_shares(gains)} of what blocks of two gain",
        f"plain-56 {listed(_losses(runs, PLAIN_56))}, blocks of two {listed(_losses(runs, RESIDUAL_56))}",
        finding(_at_most(HALF, gains), partly=_at_most(MOST, gains)),
        {"gains": gains},
    )


def triple_claim(runs: Runs) -> Claim:
    """Whether blocks of three layers do as well as blocks of two."""
    gains = _gains(runs, TRIPLE)
    return Claim(
        "Blocks of three layers have it, as those of two.",
        SOURCE,
        "blocks of two or three layers, more are possible",
        f"training loss {listed(_losses(runs, TRIPLE))}: {_shares(gains)} of what blocks of two gain",
        f"plain-56 {listed(_losses(runs, PLAIN_56))}, blocks of two {listed(_losses(runs, RESIDUAL_56))}",
        finding(all(own >= HALF * two > 0 for own, two in gains), partly=all(own > 0 for own, _ in gains)),
        {"gains": gains},
    )


def summary(runs: Runs, seeds: Sequence[int]) -> ExperimentTable:
    """Every run, one a row."""
    rows = [
        [name, seed, run.loss, run.training_error, run.test_error, run.response, run.gradient_ratio]
        for name, found in runs.items()
        for seed, run in zip(seeds, found, strict=True)
    ]
    return ExperimentTable(
        "Runs",
        "training loss of the last epoch, in nats; errors after training; the mean response over layers; the first "
        "convolution's gradient over the last's",
        ["network", "seed", "training loss", "training error", "test error", "response", "gradient"],
        rows,
    )


def _losses(runs: Runs, name: str) -> list[float]:
    return [run.loss for run in runs[name]]


def _always(larger: Sequence[float], smaller: Sequence[float]) -> bool:
    return all(a > b for a, b in zip(larger, smaller, strict=True))


def _costs(runs: Runs, shallow: str, deep: str) -> list[float]:
    """What the deeper network's loss is more, by seed."""
    return [b - a for a, b in zip(_losses(runs, shallow), _losses(runs, deep), strict=True)]


def _gains(runs: Runs, name: str) -> list[tuple[float, float]]:
    """By seed, what an arm takes off the loss of plain-56, and what blocks of two do."""
    return list(zip(_costs(runs, name, PLAIN_56), _costs(runs, RESIDUAL_56, PLAIN_56), strict=True))


def _at_most(share: float, gains: Sequence[tuple[float, float]]) -> bool:
    """Whether the gain is always at most a share of that of blocks of two, which gain something."""
    return all(two > 0 and own <= share * two for own, two in gains)


def _shares(gains: Sequence[tuple[float, float]]) -> str:
    return listed([own / two if two > 0 else math.nan for own, two in gains])
