"""What the methods that run a model again have in common: two prompts of equal length, a metric, rows of runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.edited_rows import EditedRows
from mainstem.causal.metrics import Metric
from mainstem.lab.pairs import PromptPair, encode_pair
from mainstem.run.inputs import Inputs

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt

MetricOf = Callable[[Float[Tensor, "run d_vocab"]], Float[Tensor, " run"]]


def equal_prompts(model: "Model", clean: "Prompt", corrupted: "Prompt", chat: bool = False) -> tuple[Inputs, Inputs]:
    """The inputs of two prompts of as many tokens.

    Raises:
        PairError: if they have unequal numbers of tokens, or the same tokens.
        PromptError, TokenError: if a prompt is not to be had.
    """
    first, second = (tuple(model.encode(prompt, chat)) for prompt in (clean, corrupted))
    encode_pair(PromptPair(first, second, ()), model.encoder)
    return model.inputs(list(first)), model.inputs(list(second))


def rows_of(model: "Model", inputs: Inputs, position: int) -> EditedRows:
    """Runs of a prompt.

    Raises:
        PositionError: if it has no such position.
    """
    place = inputs.place(position)
    return EditedRows(model.module, model.anatomy, inputs.ids[0], place, model.inputs, **inputs.forward)


def metric_of(
    model: "Model",
    metric: str | MetricOf,
    answers: str | Sequence[str],
    wrong_answers: str | Sequence[str],
    clean_logits: Float[Tensor, " d_vocab"],
) -> tuple[str, MetricOf]:
    """A metric and its name.

    Raises:
        ChoiceError, MetricError, TokenError, TargetError: if there is no such metric, or an answer is no token.
    """
    if not isinstance(metric, str):
        return getattr(metric, "__name__", "metric"), metric
    right, wrong = (model.target(given).ids if given else () for given in (answers, wrong_answers))
    return metric, Metric(metric, right, wrong, clean_logits)  # type: ignore[arg-type]


def answer_of(model: "Model", answer: str | Sequence[str], logits: Float[Tensor, " d_vocab"]) -> tuple[str, Any]:
    """The answer's text and ids; by default the likeliest token."""
    target = model.target(answer or f"id:{int(torch.argmax(logits))}")
    return target.text, target.ids
