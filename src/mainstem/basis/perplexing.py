"""The perplexity of the model itself on a reference text."""

from typing import TYPE_CHECKING

from mainstem.basis.reference import Reference
from mainstem.causal.evaluation import evaluate
from mainstem.model.outputs import logits_of

if TYPE_CHECKING:
    from mainstem.session import Model


def perplexity(model: "Model", on: Reference) -> float:
    """exp of the mean loss on the text."""
    from mainstem.basis.measuring import forward_of

    forward = forward_of(model)
    return evaluate({"model": lambda ids: logits_of(forward(ids))}, on.windows)["model"].perplexity
