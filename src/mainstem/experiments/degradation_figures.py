"""The curves of the experiment on degradation: losses, layers' responses in both orders, gradients."""

from collections.abc import Sequence
from statistics import fmean

from mainstem.experiments.degradation_claims import PLAIN_20, PLAIN_56, RESIDUAL_20, RESIDUAL_56, Runs
from mainstem.experiments.outcome import Curves, Figure

SHOWN = (PLAIN_20, PLAIN_56, RESIDUAL_20, RESIDUAL_56)


def figures(runs: Runs, seeds: Sequence[int]) -> list[Figure | Curves]:
    """All curves."""
    return [
        losses(runs, seeds),
        responses(runs, "Responses of layers", "from the first convolution to the last"),
        responses(runs, "Responses of layers, sorted", "from the largest response to the smallest", ordered=True),
        gradients(runs, seeds),
    ]


def losses(runs: Runs, seeds: Sequence[int]) -> Curves:
    """The training loss of every run."""
    lines = {
        f"{name}, seed {seed}": list(enumerate(run.epochs, 1))
        for name, found in runs.items()
        for seed, run in zip(seeds, found, strict=True)
    }
    return Curves("Training loss", "mean over each epoch's batches", "epoch", "loss, nats", _floats(lines), True)


def responses(runs: Runs, title: str, order: str, ordered: bool = False) -> Curves:
    """The response of every layer, a mean over seeds."""
    lines = {}
    for name in SHOWN:
        each = [sorted(run.responses, reverse=True) if ordered else run.responses for run in runs[name]]
        lines[name] = list(enumerate((fmean(values) for values in zip(*each, strict=True)), 1))
    caption = f"standard deviation of outputs after batch norm, mean over seeds, {order}; 1 before training"
    return Curves(title, caption, "convolution", "response", _floats(lines), True)


def gradients(runs: Runs, seeds: Sequence[int]) -> Curves:
    """The first convolution's gradient over the last's, through training."""
    lines = {
        f"{name}, seed {seed}": list(enumerate(run.gradient_ratios))
        for name in SHOWN
        for seed, run in zip(seeds, runs[name], strict=True)
    }
    caption = "norm of the first convolution's gradient over that of the last's, before training and after each epoch"
    return Curves("Gradients", caption, "epoch", "first over last", _floats(lines), True)


def _floats(lines: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(float(x), float(y)) for x, y in points] for name, points in lines.items()}
