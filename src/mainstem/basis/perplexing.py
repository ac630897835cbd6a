"""The perplexity of the model itself on a reference text."""

from typing import TYPE_CHECKING

from mainstem.basis.reference import Reference
from mainstem.causal.evaluation import evaluate
from mainstem.causal.rotated import plain_run

if TYPE_CHECKING:
    from mainstem.session import Model


def perplexity(model: "Model", on: Reference) -> float:
    """exp of the mean loss on the text."""
    return evaluate({"model": plain_run(model.module)}, on.windows)["model"].perplexity
