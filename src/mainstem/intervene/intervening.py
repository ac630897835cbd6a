"""What the methods that run a model again have in common: prompts, a metric, rows of runs, the edits that hold."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.edited_rows import EditedRows
from mainstem.causal.metrics import Metric, OwnMetric, checked_metric
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import EditError, PromptError
from mainstem.lab.pairs import PromptPair, encode_pair
from mainstem.run.inputs import Inputs

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt


def require_whole_edits(model: "Model") -> None:
    """Refuses to run under an edit of one row of a batch what makes batches of its own: rows are other runs there.

    Raises:
        EditError: if such an edit holds.
    """
    for edit in model.edits:
        if edit.row is not None:
            raise EditError(
                f"The edit of {edit.at} holds for row {edit.row} of a batch, and the rows of batches are runs here",
                None,
                "Make the edit for every row: leave out `row`.",
            )


def one_prompt(model: "Model", prompt: "Prompt", chat: bool = False) -> Inputs:
    """The inputs of a single prompt.

    Raises:
        PromptError, TokenError: if it is not to be had, or there are several.
    """
    inputs = model.inputs(prompt, chat)
    if len(inputs.ids) != 1:
        raise PromptError(f"There are {len(inputs.ids)} prompts where one is wanted", None, "Give them one at a time.")
    return inputs


def equal_prompts(model: "Model", clean: "Prompt", corrupted: "Prompt", chat: bool = False) -> tuple[Inputs, Inputs]:
    """The inputs of two prompts of as many tokens.

    Raises:
        PairError: if they have unequal numbers of tokens, or the same tokens.
        PromptError, TokenError: if a prompt is not to be had.
    """
    first, second = (one_prompt(model, prompt, chat) for prompt in (clean, corrupted))
    ids, others = (tuple(one.ids[0].tolist()) for one in (first, second))
    encode_pair(PromptPair(ids, others, ()), model.encoder)
    return first, second


def rows_of(model: "Model", inputs: Inputs, position: int) -> EditedRows:
    """Runs of a prompt.

    Raises:
        EditError: if an edit of one row of a batch holds.
        PositionError: if it has no such position.
    """
    require_whole_edits(model)
    place = inputs.place(position)
    return EditedRows(model.module, model.anatomy, inputs.ids[0], place, model.inputs, **inputs.forward)


def metric_of(
    model: "Model",
    metric: str | LogitMetric,
    answers: str | Sequence[str],
    wrong_answers: str | Sequence[str],
    clean_logits: Callable[[], Float[Tensor, " d_vocab"]],
) -> Metric | OwnMetric:
    """A metric by its name, or a caller's own.

    Args:
        model: the session's.
        metric: a name, or a function.
        answers: tokens that the clean prompt should give.
        wrong_answers: tokens that it should not.
        clean_logits: makes the logits of the clean run; called where the metric needs them.

    Raises:
        ChoiceError, MetricError, TokenError, TargetError: if there is no such metric, or an answer is no token.
    """
    if not isinstance(metric, str):
        return checked_metric(metric)
    right, wrong = (model.target(given).ids if given else () for given in (answers, wrong_answers))
    return Metric(metric, right, wrong, clean_logits() if metric == "kl" else None)  # type: ignore[arg-type]


def answer_of(model: "Model", answer: str | Sequence[str], logits: Float[Tensor, " d_vocab"]) -> tuple[str, Any]:
    """The answer's text and ids; by default the likeliest token."""
    target = model.target(answer or f"id:{int(torch.argmax(logits))}")
    return target.text, target.ids
