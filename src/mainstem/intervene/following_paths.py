"""Putting path patching together: from texts and addresses to senders, receivers and a metric."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mainstem.causal.path_patching import PathEffects, PathPatching
from mainstem.causal.tracked import LogitMetric
from mainstem.intervene.intervening import equal_prompts, metric_of, rows_of
from mainstem.model.anatomy import Anatomy
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt


def patch_paths(
    model: "Model",
    clean: "Prompt",
    corrupted: "Prompt",
    senders: Sequence[Unit | str] | None = None,
    receivers: Sequence[str | Sequence[str]] = ("logits",),
    answers: str | Sequence[str] = (),
    wrong_answers: str | Sequence[str] = (),
    metric: str | LogitMetric = "logit-difference",
    *,
    positions: Sequence[int] | None = None,
    position: int = -1,
    chat: bool = False,
) -> PathEffects:
    """The effect of senders on receivers along direct paths, everything else frozen.

    Args:
        model: the model.
        clean: the prompt that is run.
        corrupted: the prompt whose writes the senders take, with as many tokens.
        senders: embeddings, sublayers, heads, neurons; by default embeddings, heads, and sublayers without heads.
        receivers: `L9H8.query`, `.key` or `.value`, `L5.attn.input`, `L5.mlp.input`, `logits`; a list of several is
            changed together.
        answers: tokens that the clean prompt should give.
        wrong_answers: tokens that it should not.
        metric: `logit-difference`, `probability`, `log-probability`, `kl`, or a function of logits [run, d_vocab].
        positions: where the senders' writes are the other ones, negative from the end; everywhere by default.
        position: the destination, negative from the end.
        chat: whether to wrap text in the model's chat template.

    Raises:
        PairError: if the prompts have unequal numbers of tokens, or the same tokens.
        UnitError, LevelRefusedError: if the model has no such sender or receiver, or it cannot be had.
        UsageError, PositionError: if nothing is named, or a position is outside the prompt.
        ChoiceError, MetricError, TokenError, TargetError: if the metric cannot be made.
    """
    first, second = equal_prompts(model, clean, corrupted, chat)
    rows = rows_of(model, first, position)
    made = metric_of(model, metric, answers, wrong_answers, lambda: rows.clean)
    units = default_senders(model.anatomy) if senders is None else senders
    found = PathPatching(rows, second.ids[0]).effects(
        [Unit.parse(unit) if isinstance(unit, str) else unit for unit in units],
        [[own] if isinstance(own, str) else list(own) for own in receivers],
        made,
        None if positions is None else [first.place(place) for place in positions],
        made.name,
    )
    return replace(found, provenance=model.provenance())


def default_senders(anatomy: Anatomy) -> list[Unit]:
    """Embeddings, heads, and sublayers that have no heads, in the order in which they write."""
    found: list[Unit] = []
    for unit in anatomy.sublayers():
        cores = [anatomy.writes[i].attention for i in anatomy.writes_of(unit)]
        if unit.layer is None or cores[0] is None or "heads" in anatomy.writes[anatomy.writes_of(unit)[0]].refusals:
            found.append(unit)
        else:
            found += [Unit.head(unit.layer, head, nth=unit.nth) for head in range(cores[0].n_heads)]
    return found
