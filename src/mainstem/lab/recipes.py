"""A recipe: everything that decides how a small model is trained, apart from the model, its data and its loss.

The learning rate of a step is a pure function of the step, so that a training that goes on from a checkpoint needs no
state of a schedule. With r the recipe's rate, T its steps and w its warm-up:

    constant    r
    cosine      r (1 + cos(pi t / T)) / 2, with t and T counted from the end of the warm-up
    one_cycle   from r / 25 up to r in the first 30 % of the steps, then down to almost nothing, both along half a
                cosine (Smith and Topin 2018, "Super-convergence"; the rates are those of torch's OneCycleLR)

The first w steps of `constant` and `cosine` rise linearly to r; `one_cycle` has a rise of its own.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mainstem.errors import ChoiceError, UsageError

Schedule = Literal["constant", "cosine", "one_cycle"]

RISE, LOW, LOWEST = 0.3, 1 / 25, 1 / 250_000
"""Of one cycle: the share of steps that rise, and the rate at the start and at the end over the highest."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        steps: how many.
        optimiser: one of `mainstem.lab.optimisers.OPTIMISERS`.
        learning_rate: the highest of the schedule.
        weight_decay: as the optimiser's library has it: decoupled, except for adam, sgd and rmsprop.
        momentum: of sgd, rmsprop and muon.
        betas: of everything that is like Adam; the second is rmsprop's smoothing, too.
        eps: added to the root of the second moment.
        warmup: steps.
        schedule: of the learning rate.
        clip: the largest norm of all gradients together; None for no limit.
        seed: of what is drawn while training: dropout, and the rotations of ortho_adam. Weights and data have theirs.
        mixed_precision: forward passes in bfloat16 where they may be; needs an accelerator.

    Raises:
        UsageError: numbers that make no recipe.
        ChoiceError: an unknown schedule.
    """

    steps: int
    optimiser: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    warmup: int = 0
    schedule: Schedule = "constant"
    clip: float | None = 1.0
    seed: int = 0
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ChoiceError("schedule", self.schedule, get_args(Schedule))
        for name, wrong, right in (
            ("steps", self.steps < 1, "at least 1"),
            ("learning_rate", self.learning_rate <= 0, "above 0"),
            ("warmup", not 0 <= self.warmup <= self.steps, "between 0 and the number of steps"),
            ("clip", self.clip is not None and self.clip <= 0, "above 0, or None"),
        ):
            if wrong:
                raise UsageError(f"A recipe with {name} = {getattr(self, name)}", None, f"Give a number {right}.")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate * self._factor(step)

    def _factor(self, step: int) -> float:
        if self.schedule == "one_cycle":
            top, last = RISE * self.steps - 1, self.steps - 1
            return _between(LOW, 1.0, step / top) if step <= top else _between(1.0, LOWEST, (step - top) / (last - top))
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.schedule == "cosine":
            return _between(1.0, 0.0, (step - self.warmup) / (self.steps - self.warmup))
        return 1.0


def _between(start: float, end: float, share: float) -> float:
    """From start to end along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
