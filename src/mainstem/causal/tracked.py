"""A run whose values at chosen sites can be differentiated: what activation and edge attribution share.

The embeddings of the run are replaced by themselves as leaves of a graph of their own, so everything computed from
them can be asked for gradients; the model's parameters, whatever they require, get none, because only gradients with
respect to what was seen are asked for. Nothing is left in the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import MetricError, RunError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of

LogitMetric = Callable[[Float[Tensor, "run d_vocab"]], Float[Tensor, " run"]]
"""A number for the logits of each run, differentiable: a `mainstem.causal.metrics.Metric`, or any other function."""
Replace = Callable[[Tensor], Tensor]
"""Puts another tensor in the place of what is at a site, of the same shape."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Cost:
    """What was run, in rows of one prompt: a batch of m rows counts m times."""

    forwards: int = 0
    backwards: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.forwards + other.forwards, self.backwards + other.backwards)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt and where its logits are read.

    Attributes:
        ids: token ids, without padding.
        position: the destination whose logits the metric sees, from 0.
        forward: further arguments of the forward call.
    """

    ids: Int[Tensor, " pos"]
    position: int
    forward: dict[str, Any]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Tracked:
    """What one run had at the sites, as the model held it, and its metric."""

    values: dict[Site, Any]
    metric: Float[Tensor, " 1"]

    def gradients(self, sites: Sequence[Site], keep: bool = False) -> dict[Site, Tensor]:
        """The gradients of the metric at the sites, in the model's own axes; zero where nothing flows.

        Args:
            sites: where, of those that were seen.
            keep: whether the graph is needed again.
        """
        inputs = [self.values[site] for site in sites]
        found = torch.autograd.grad(
            self.metric.sum(), inputs, retain_graph=keep, allow_unused=True, materialize_grads=True
        )
        return dict(zip(sites, found, strict=True))


def embedding_sites(anatomy: Anatomy) -> list[Site]:
    """Where the embeddings are written: what every run begins from."""
    return [write.site for write in anatomy.writes if write.unit.kind == "embedding"]


def between(anatomy: Anatomy, base: Tracked, donor: Tracked, point: float) -> dict[Site, Replace]:
    """Embeddings on the straight line from those of one run (0) to those of another (1)."""
    changes: dict[Site, Replace] = {}
    for site in embedding_sites(anatomy):
        value = torch.lerp(base.values[site], donor.values[site], point)
        changes[site] = lambda old, value=value: value
    return changes


@torch.no_grad()
def seen(
    model: torch.nn.Module, sites: Iterable[Site], prompt: Prompt, metric: LogitMetric, changes: dict[Site, Replace]
) -> Tracked:
    """A run without gradients."""
    return _run(model, sites, prompt, metric, changes)


def tracked(
    model: torch.nn.Module,
    anatomy: Anatomy,
    sites: Iterable[Site],
    prompt: Prompt,
    metric: LogitMetric,
    changes: dict[Site, Replace],
    then: Callable[[Tracked], Made],
) -> Made:
    """Runs a prompt and does `then` with what was seen, while its graph is there.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        sites: what to see.
        prompt: what to run.
        metric: of the logits at the prompt's destination.
        changes: what to put at some sites; what is seen there is what was put.
        then: asks for the gradients.

    Raises:
        RunError: if the model cannot be differentiated.
        MetricError: if the metric cannot.
    """

    def leaf(value: Tensor) -> Tensor:
        return value.detach().requires_grad_()

    def started(change: Replace | None) -> Replace:
        return leaf if change is None else lambda value: leaf(change(value))

    begun = {site: started(changes.get(site)) for site in embedding_sites(anatomy)}

    def differentiate() -> Made:
        with torch.enable_grad():
            return then(_run(model, sites, prompt, metric, changes | begun))

    return in_spite_of_changes(differentiate)


def _run(
    model: torch.nn.Module, sites: Iterable[Site], prompt: Prompt, metric: LogitMetric, changes: dict[Site, Replace]
) -> Tracked:
    values: dict[Site, Tensor] = {}
    wanted = dict.fromkeys([*sites, *changes])
    with tapped(model, [(site, _tap(site, changes.get(site), values)) for site in wanted]):
        logits = logits_of(model(input_ids=prompt.ids[None], **prompt.forward))[:, prompt.position]
    found = metric(logits)
    if logits.requires_grad and not found.requires_grad:
        raise MetricError(
            "The metric has no gradient", None, "Give a differentiable function of the logits, such as a Metric."
        )
    return Tracked(values, found)


def _tap(site: Site, change: Replace | None, values: dict[Site, Tensor]) -> Tap:
    def tap(leaves: list[Any]) -> list[Any] | None:
        value = leaves[site.slot] if change is None else change(leaves[site.slot])
        if site.overwritten:  # the model may hold the very tensor, if it is a function's argument
            value = value.clone()
        values[site] = value
        if change is None and not site.overwritten:
            return None
        new = list(leaves)
        new[site.slot] = value.clone() if site.overwritten else value  # what was seen stays as it is
        return new

    return tap


def in_spite_of_changes(differentiate: Callable[[], Made]) -> Made:
    """Where a model changes in place what its backward pass needs, once more, with copies of what it changes.

    Raises:
        RunError: if the model cannot be differentiated.
    """
    try:
        try:
            return differentiate()
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                return differentiate()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RunError(
            f"This model cannot be differentiated: {reason}", None, "Use a method that needs no gradient."
        ) from error


def require_same_length(clean: Prompt, corrupted: Prompt) -> None:
    """Raises UsageError where two prompts have no position in common for each of their tokens."""
    if len(clean) != len(corrupted):
        raise UsageError(
            f"The prompts have {len(clean)} and {len(corrupted)} tokens",
            None,
            "Patching needs the same number: replace tokens one for one, and look at both with `Trace.tokens`.",
        )
