"""Putting causal tracing together: the corruption, and a metric."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mainstem.causal.causal_tracing import KINDS, CausalTrace, noised, replaced, trace_causes
from mainstem.causal.replay import DEFAULT_MEMORY
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import UsageError
from mainstem.intervene.intervening import answer_of, equal_prompts, metric_of, one_prompt, rows_of
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt

DRAWS = 10


def causal_trace(
    model: "Model",
    clean: "Prompt",
    corrupted: "Prompt | None" = None,
    answers: str | Sequence[str] = (),
    wrong_answers: str | Sequence[str] = (),
    metric: str | LogitMetric = "probability",
    *,
    subject: Sequence[int] = (),
    noise: float = 3.0,
    draws: int = DRAWS,
    kinds: Sequence[str] = KINDS,
    window: int = 1,
    position: int = -1,
    chat: bool = False,
    memory: int = DEFAULT_MEMORY,
) -> CausalTrace:
    """Which states of the clean run bring the answer back to the corrupted run.

    Args:
        model: the model.
        clean: the prompt that has the answer.
        corrupted: the prompt that has not, with as many tokens; without it noise is put on the subject.
        answers: tokens that the clean prompt should give; by default its likeliest.
        wrong_answers: tokens that it should not.
        metric: `probability`, `log-probability`, `logit-difference`, `kl`, or a function of logits [run, d_vocab].
        subject: positions whose embeddings get noise, negative ones from the end.
        noise: its size, in standard deviations of what the embedding writes for the prompt.
        draws: how many times, by the model's seed.
        kinds: states to restore: `resid` (the stream after a block), `attn`, `mlp`.
        window: how many layers around each `attn` and `mlp` are restored in together.
        position: the destination, negative from the end.
        chat: whether to wrap text in the model's chat template.
        memory: the bytes that the runs may take beside the model.

    Raises:
        PairError: if the prompts have unequal numbers of tokens, or the same tokens.
        UsageError: if there is neither another prompt nor a subject, or both, no draw, no noise or no window, or the
            memory is too small.
        NotFiniteError: if a run gives NaN; names the first layer.
        CertificateError: if a cell comes out differently in a full forward of its own.
        ChoiceError, LevelRefusedError: if there is no such kind of state.
        MetricError, TokenError, TargetError, PositionError: if the metric or a position is not to be had.
    """
    if (corrupted is None) == (not subject):
        raise UsageError("Causal tracing needs another prompt, or a subject for noise", None, "Give one of the two.")
    if corrupted is not None:
        inputs, other = equal_prompts(model, clean, corrupted, chat)
        rows = rows_of(model, inputs, position)
        runs, words = replaced(other.ids[0]), "replaced tokens"
    else:
        inputs = one_prompt(model, clean, chat)
        rows = rows_of(model, inputs, position)
        places = [inputs.place(place) for place in subject]
        runs = noised(rows, places, noise, draws, model.seed)
        words = f"noise of {noise:g} standard deviations at {places}, {draws} draws"
    if not answers:
        answers = [f"id:{token}" for token in answer_of(model, (), rows.clean)[1]]
    made = metric_of(model, metric, answers, wrong_answers, lambda: rows.clean)
    allowed = whole_number("memory", memory, 1)
    traced = trace_causes(rows, runs, made, kinds, window, words, made.name, allowed)
    return replace(traced, provenance=model.provenance())
