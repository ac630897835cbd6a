"""Interchange in a learned subspace: does a subspace of one point hold a variable that a counterfactual changes?

A counterfactual is a base prompt, a source prompt, and the answer that the base should have if the variable had the
source's value. With orthonormal directions R [k, width] at one point and position the base run goes on with

    h  <-  h_base + (h_source - h_base) R^T R

and the R is sought under which it gives the expected answers: cross-entropy, Adam, R kept orthogonal by
`torch.nn.utils.parametrizations.orthogonal` (distributed alignment search: Geiger et al. 2023, "Finding alignments
between interpretable causal variables and distributed neural representations"). Nothing but R has gradients.

Accuracy is that on counterfactuals that were not trained on, beside what others of the same size do: random subspaces,
and dormant directions, those along which the point varies least; and beside no interchange and that of the full vector.
A subspace found by training may be an illusion: it takes the variable from a direction that nothing later reads, and
puts it in by one along which the point itself never varies (Makelov et al. 2023, "Is this the subspace you are looking
for?"). So directions are sought among active ones alone: the principal ones that hold 99.9 % of the point's variance
over the prompts; the rest is dormant.

The verdict is `found` if the lower end of the 95 % interval (Wilson) of the accuracy is above the accuracy of every
control of the same size and of no interchange, else `not found`.

Cost: `steps` forward and backward passes of a batch; runs are whole forward passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from mainstem.causal.interchange import Counterfactual, Counterfactuals, Interchange
from mainstem.causal.tracked import in_spite_of_changes
from mainstem.errors import UsageError


@dataclass(frozen=True)
class Control:
    """How often the expected answer is the likeliest one under another interchange: mean and largest over draws."""

    name: str
    draws: int
    mean: float
    max: float


@dataclass(frozen=True, eq=False)
class Subspace:
    """A learned subspace, and what it does on held-out counterfactuals.

    Attributes:
        at: the point's address.
        positions: where, counted from 0.
        directions: orthonormal rows; `Edit.replace_in` takes them.
        accuracy: how often the expected answer is the likeliest, on held-out counterfactuals.
        log_probability: of the expected answer there, mean, in nats.
        active: how many directions the point varies along.
        trained, held_out: how many counterfactuals.
        losses: of each step.
        controls: `random` and `dormant` subspaces of the same size, `unchanged` (no interchange), `full` vector.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    at: str
    positions: tuple[int, ...]
    directions: Float[Tensor, "direction d_in"]
    accuracy: float
    log_probability: float
    active: int
    trained: int
    held_out: int
    losses: tuple[float, ...]
    controls: tuple[Control, ...]
    provenance: Any = None

    @property
    def verdict(self) -> str:
        """`found` or `not found`."""
        rivals = max(control.max for control in self.controls if control.name != "full")
        return "found" if lower_bound(self.accuracy, self.held_out) > rivals else "not found"

    def overlap(self, directions: Float[Tensor, "direction d_in"]) -> float:
        """The mean squared cosine of the subspace with the span of other directions: 1 if inside, 0 if across."""
        basis = torch.linalg.qr(torch.atleast_2d(directions).to(self.directions).T).Q
        return float((self.directions @ basis).pow(2).sum() / len(self.directions))


@dataclass(frozen=True)
class Training:
    """How a subspace is learned: its size, steps of Adam, counterfactuals of each step, learning rate."""

    size: int = 1
    steps: int = 200
    batch: int = 32
    rate: float = 0.1


def lower_bound(share: float, count: int, z: float = 1.96) -> float:
    """The lower end of Wilson's interval of a share of `count`."""
    centre, spread = share + z * z / (2 * count), z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return (centre - spread) / (1 + z * z / count)


def learn(
    interchange: Interchange,
    examples: Sequence[Counterfactual],
    training: Training,
    held_out: float = 0.3,
    draws: int = 5,
    seed: int = 0,
) -> Subspace:
    """Learns a subspace on some counterfactuals and tries it on the others.

    Args:
        interchange: the model and the point.
        examples: prompts of equal length.
        training: how to learn.
        held_out: the share of the counterfactuals that are kept for the trial.
        draws: how many random subspaces to try.
        seed: of the split, the start, the batches and the draws.

    Raises:
        UsageError: if there are too few counterfactuals to train and to try, or a number makes no sense.
        PairError: if prompts are not of equal length.
        RunError: if the model cannot be differentiated.
    """
    data = Counterfactuals(interchange, examples)
    _check(training, draws, held_out, interchange)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(examples), generator=generator)
    count = round(held_out * len(examples))
    if not 0 < count < len(examples):
        raise UsageError(f"{len(examples)} counterfactuals cannot be split", None, "Give more of them.")
    tried, used = order[:count], order[count:]
    varying, active = data.varying(used)
    if not training.size < active:
        raise UsageError(
            f"{interchange.at} varies along {active} direction{'s' * (active != 1)}, of which a subspace of "
            f"{training.size} says nothing",
            None,
            "Ask for fewer, or give prompts that differ more.",
        )
    directions, losses = _train(data, used, varying[:active], training, generator)
    right, log_p = data.outcome(tried, directions)
    return Subspace(
        at=str(interchange.at),
        positions=tuple(interchange.places.tolist()),
        directions=directions,
        accuracy=right,
        log_probability=log_p,
        active=active,
        trained=len(used),
        held_out=count,
        losses=tuple(losses),
        controls=_controls(data, tried, varying[-training.size :], draws, generator),
    )


def _check(training: Training, draws: int, held_out: float, interchange: Interchange) -> None:
    width = len(interchange.entries)
    if not 0 < training.size < width:
        raise UsageError(
            f"A subspace of {training.size} of the {width} dimensions of {interchange.at} says nothing",
            None,
            f"Give a size from 1 to {width - 1}.",
        )
    if min(training.steps, training.batch, draws) < 1 or not 0 < held_out < 1 or not training.rate > 0:
        raise UsageError(
            "Learning needs 1 or more steps, draws and rows of a batch, a rate above 0, a held-out share inside 0 to 1",
            None,
            "Leave out those that you do not know: each has a default.",
        )


def _train(
    data: Counterfactuals,
    used: Int[Tensor, " row"],
    active: Float[Tensor, "direction d_in"],
    training: Training,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "direction d_in"], list[float]]:
    active = active.to(torch.promote_types(data.own.dtype, torch.float32))
    rotation = nn.Linear(len(active), training.size, bias=False, device="meta").to_empty(device=active.device)
    rotation = rotation.to(active.dtype)
    with torch.no_grad():
        rotation.weight.copy_(_random(len(active), training.size, generator))
    orthogonal(rotation, use_trivialization=False)  # a trivialisation draws random numbers
    parameters = list(rotation.parameters())
    optimiser = torch.optim.Adam(parameters, lr=training.rate)
    losses = []
    for _ in range(training.steps):
        chosen = used[torch.randint(len(used), (training.batch,), generator=generator)]
        loss, slopes = in_spite_of_changes(_differentiating(data, chosen, rotation, active, parameters))
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope
        optimiser.step()
        losses.append(loss)
    return rotation.weight.detach() @ active, losses


def _differentiating(
    data: Counterfactuals,
    chosen: Int[Tensor, " row"],
    rotation: nn.Linear,
    active: Tensor,
    parameters: list[nn.Parameter],
) -> Callable[[], tuple[float, tuple[Tensor, ...]]]:
    def differentiate() -> tuple[float, tuple[Tensor, ...]]:
        with torch.enable_grad():
            loss = F.nll_loss(data.log_p(chosen, rotation.weight @ active), data.expected[chosen])
            return float(loss.detach()), torch.autograd.grad(loss, parameters)

    return differentiate


def _controls(
    data: Counterfactuals,
    tried: Int[Tensor, " row"],
    dormant: Float[Tensor, "direction d_in"],
    draws: int,
    generator: torch.Generator,
) -> tuple[Control, ...]:
    size, width = dormant.shape
    sets: dict[str, list[Tensor | None]] = {
        "random": [_random(width, size, generator) for _ in range(draws)],
        "dormant": [dormant],
        "unchanged": [torch.zeros(1, width)],
        "full": [None],
    }
    made = {name: [data.outcome(tried, directions)[0] for directions in own] for name, own in sets.items()}
    return tuple(Control(name, len(own), sum(own) / len(own), max(own)) for name, own in made.items())


def _random(width: int, size: int, generator: torch.Generator) -> Float[Tensor, "direction d_in"]:
    """Orthonormal rows."""
    return torch.linalg.qr(torch.randn(width, size, generator=generator, dtype=torch.float64)).Q.T
