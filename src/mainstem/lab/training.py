"""One loop that trains everything in the laboratory, and records what is asked of it on the way.

    batches      a function of the step: the batch of step i, the same one each time it is asked for
    loss         a function of the model and a batch
    probes       functions of the model, each a number or several by name, taken every so many steps and at the end

A training with a folder goes on from its last checkpoint, and what it then records is, on a CPU, bitwise what it would
have recorded without the interruption: batches and learning rates are functions of the step, the random numbers of a
step depend on the recipe's seed and the step alone, and the state of the optimisers is kept to the last bit.

Lightning or accelerate would not make this shorter: the loop itself is 15 lines, and neither restores bitwise.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mainstem.errors import DivergedError, UsageError
from mainstem.lab.checkpoints import Checkpoints, Progress, digest, own_tensors
from mainstem.lab.optimisers import Optimiser, optimisers
from mainstem.lab.recipes import Recipe
from mainstem.model.placement import parse_device

Batches = Callable[[int], Any]
"""The batch of a step: a tensor, or a tuple of tensors."""

Loss = Callable[[nn.Module, Any], Tensor]
Probe = Callable[[nn.Module], float | dict[str, float]]


@dataclass
class Training:
    """What a training recorded.

    Attributes:
        losses: one a step.
        probes: for each step at which probes were taken {"step": steps done, name: number ...}; of a probe with
            several numbers each is named `probe.number`.
        seconds: of training, probes and checkpoints included; interruptions not.
    """

    losses: list[float] = field(default_factory=list)
    probes: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON has it."""
        return asdict(self)

    def probe(self, name: str) -> list[tuple[float, float]]:
        """(steps done, number) of one probe."""
        return [(row["step"], row[name]) for row in self.probes if name in row]


def train(
    module: nn.Module,
    loss: Loss,
    batches: Batches,
    recipe: Recipe,
    *,
    probes: Mapping[str, Probe] | None = None,
    every: int = 100,
    folder: Path | None = None,
    device: str | torch.device = "cpu",
    report: Callable[[str], None] = lambda text: None,
) -> Training:
    """Trains a model in place, or goes on doing so.

    Args:
        module: the model, as it was made, also where a training goes on: its first weights are compared. It stays on
            the device, in evaluation mode.
        loss: of the model on a batch, in nats or whatever it is.
        batches: a pure function of the step. Tensors are moved to the device.
        recipe: how.
        probes: taken before the first step, every `every` steps and at the end, with the model in evaluation mode;
            gradients that they leave are cleared.
        every: steps between probes, checkpoints and reports.
        folder: where checkpoints go, and where one is looked for; None for no checkpoints.
        device: where to train.
        report: receives a line of progress.

    Raises:
        ChoiceError: an unknown optimiser; a device that is not there.
        UsageError: mixed precision without an accelerator; an optimiser that is not installed.
        DivergedError: the loss, a gradient or a weight became NaN or infinite; has what was recorded until then.
        CheckpointError: the folder holds a checkpoint of another training, or cannot be written.
    """
    place = parse_device(device)
    if recipe.mixed_precision and place.type == "cpu":
        raise UsageError("Mixed precision needs a GPU, and this is a CPU", "mixed_precision", "Train without it.")
    if every < 1:
        raise UsageError(f"Probes every {every} steps", None, "Give a number of at least 1.")
    run = _Run(module.to(place), loss, batches, recipe, probes or {}, every, place, report)
    with torch.random.fork_rng([] if place.type == "cpu" else None, device_type=place.type):
        return run.to_the_end(folder)


def next_token_loss(module: nn.Module, ids: Int[Tensor, "batch pos"]) -> Tensor:
    """The mean over tokens of -log p of each token, given those before it, in nats; the first of a row is given."""
    logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass
class _Run:
    """One call of `train`."""

    module: nn.Module
    loss: Loss
    batches: Batches
    recipe: Recipe
    probes: Mapping[str, Probe]
    every: int
    place: torch.device
    report: Callable[[str], None]

    def to_the_end(self, folder: Path | None) -> Training:
        checkpoints = Checkpoints(folder, self._identity()) if folder is not None else None
        made = optimisers(self.module, self.recipe)
        found = checkpoints.restore(self.module, made) if checkpoints else None
        done, training = (found.step, Training(**found.recorded)) if found else (0, Training())
        if found is None:
            self._probe(training, 0)
        began, before = time.monotonic(), training.seconds
        for step in range(done, self.recipe.steps):
            training.losses.append(self._step(step, made, training))
            if (step + 1) % self.every == 0 or step + 1 == self.recipe.steps:
                self._check_weights(step, training)
                self._probe(training, step + 1)
                training.seconds = before + time.monotonic() - began
                if checkpoints:
                    checkpoints.save(self.module, made, Progress(step + 1, training.as_dict()))
                self._say(training, (time.monotonic() - began) / (step + 1 - done))
        self.module.eval()
        return training

    def _step(self, step: int, made: list[Optimiser], training: Training) -> float:
        recipe = self.recipe
        torch.manual_seed(1_000_003 * recipe.seed + step)
        self.module.train()
        with torch.autocast(self.place.type, torch.bfloat16, enabled=recipe.mixed_precision):
            loss = self.loss(self.module, _moved(self.batches(step), self.place))
        self._finite("loss", loss.detach(), step, training)
        loss.backward()
        bound = math.inf if recipe.clip is None else recipe.clip
        self._finite("gradient", torch.nn.utils.clip_grad_norm_(self.module.parameters(), bound), step, training)
        for optimiser in made:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate(step)
            optimiser.step()
        self.module.zero_grad()
        return float(loss.detach())

    def _finite(self, what: str, value: Tensor, step: int, training: Training) -> None:
        if not torch.isfinite(value):
            self.module.zero_grad()
            where = f"step {step + 1} of {self.recipe.steps}, {self.recipe.optimiser} at {self.recipe.rate(step):.3g}"
            raise DivergedError(f"The {what} is {float(value)}", where, training=training)

    def _check_weights(self, step: int, training: Training) -> None:
        """Before they are measured or saved: an update can overflow where the loss before it was finite."""
        for name, weight in self.module.named_parameters():
            self._finite(f"largest magnitude in {name}", weight.detach().abs().max(), step, training)

    def _probe(self, training: Training, step: int) -> None:
        row: dict[str, float] = {"step": step}
        self.module.eval()
        for name, probe in self.probes.items():
            torch.manual_seed(1_000_003 * self.recipe.seed + step)
            found = probe(self.module)
            row |= (
                {f"{name}.{key}": value for key, value in found.items()} if isinstance(found, dict) else {name: found}
            )
            self.module.zero_grad()
        if len(row) > 1:
            training.probes.append(row)

    def _say(self, training: Training, seconds_a_step: float) -> None:
        done, of = len(training.losses), self.recipe.steps
        left = f", {seconds_a_step * (of - done):.0f} s left" if done < of else ""
        self.report(f"step {done} of {of}, loss {training.losses[-1]:.3f}{left}")

    def _identity(self) -> dict[str, Any]:
        """What makes this training another one than the next."""
        return {
            "recipe": asdict(self.recipe),
            "model": _configuration(self.module),
            "shapes": {name: list(weight.shape) for name, weight in self.module.named_parameters()},
            "weights at the start": digest(own_tensors(self.module).values()),
            "loss": getattr(self.loss, "__qualname__", type(self.loss).__name__),
            "first batch": digest(_tensors(self.batches(0))),
            "probes": sorted(self.probes),
            "every": self.every,
            "device": self.place.type,
            "torch": torch.__version__,
        }


def _configuration(module: nn.Module) -> Any:
    """A model's settings, as far as they are known, as plain data."""
    config, name = getattr(module, "config", None), type(module).__name__
    if isinstance(module, PreTrainedModel):
        return json.loads(module.config.to_json_string(use_diff=False))
    return {"class": name, **asdict(config)} if is_dataclass(config) and not isinstance(config, type) else name


def _moved(batch: Any, place: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(place)
    if not isinstance(batch, (tuple, list)):
        return batch
    moved = [_moved(each, place) for each in batch]
    return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)  # a named tuple keeps its names


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for each in batch:
            yield from _tensors(each)
