"""The perplexity of the model itself on a reference text."""

from typing import TYPE_CHECKING

from mainstem.basis.reference import Reference
from mainstem.causal.evaluation import evaluate
from mainstem.model.outputs import logits_of
from mainstem.run.windows import windows

if TYPE_CHECKING:
    from mainstem.session import Model


def perplexity(model: "Model", on: Reference, tokens: int) -> float:
    """On the first tokens of the text, in the same windows; one window at least."""
    from mainstem.basis.measuring import forward_of

    forward, length = forward_of(model), on.windows.length
    cut = windows(on.ids[: max(tokens, length)], length)
    return evaluate({"model": lambda ids: logits_of(forward(ids))}, cut)["model"].perplexity
