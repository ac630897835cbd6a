"""Putting a patching sweep together: from texts to token ids, a metric and a grid with readable labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.cell_runs import Progress
from mainstem.causal.patching import Direction, Pair, Sweep, sweep
from mainstem.causal.patching_grids import grid as grid_of
from mainstem.causal.replay import DEFAULT_MEMORY
from mainstem.intervene.generating import described
from mainstem.intervene.intervening import metric_of, one_prompt, require_whole_edits
from mainstem.model.outputs import logits_of
from mainstem.run.inputs import Inputs
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt


def patch(
    model: "Model",
    clean: "Prompt",
    corrupted: "Prompt",
    answers: str | Sequence[str] = (),
    wrong_answers: str | Sequence[str] = (),
    metric: str | Callable[..., Any] = "logit-difference",
    grid: str = "resid",
    direction: Direction = "denoising",
    *,
    window: int = 1,
    units: Unit | str | Sequence[Unit | str] = (),
    roles: Mapping[str, Sequence[int]] | None = None,
    position: int = -1,
    chat: bool = False,
    memory: int = DEFAULT_MEMORY,
    state: str | Path | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Takes values from the run of one prompt into the run of another, cell by cell of a grid.

    Args:
        model: the model.
        clean: the prompt that has the answer.
        corrupted: the prompt that has not, with as many tokens.
        answers: tokens that the clean prompt should give, as literal text or `id:7042`.
        wrong_answers: tokens that it should not.
        metric: `logit-difference`, `probability`, `log-probability` or `kl`, or a function from logits [run, d_vocab]
            to a number for each run.
        grid: `resid`, `attn`, `mlp`, `mixer`, `heads`, `heads-positions` or `neurons`.
        direction: `denoising` (clean values into the corrupted run) or `noising` (the other way).
        window: for `attn`, `mlp` and `mixer`: how many consecutive sublayers a cell patches.
        units: for `neurons`: an address, or several.
        roles: for grids with positions: names of columns, each with the positions from 0 that its cells take at once.
        position: the destination, negative from the end.
        chat: whether to wrap text in the model's chat template.
        memory: the bytes that the sweep may take beside the model.
        state: a file to keep finished cells in; where it is there already, the sweep goes on from it.
        progress: called with the number of cells done and of all cells, after each batch.

    Raises:
        PromptError: if the prompts are not of equal length, or the same, or one is a batch.
        EditError: if an edit of one row of a batch holds.
        ChoiceError, UsageError, UnitError, LevelRefusedError: if the grid cannot be made for this model.
        TokenError, TargetError, MetricError: if an answer is no token, or the metric is the same on both prompts.
        NotFiniteError: if a run gives NaN; names the first layer.
        CertificateError: if a cell comes out differently in a full forward of its own.
    """
    require_whole_edits(model)
    first, second = (one_prompt(model, prompt, chat) for prompt in (clean, corrupted))
    place = first.place(position)
    chosen = metric_of(model, metric, answers, wrong_answers, lambda: _logits(model, first, place))
    pair = Pair(first.ids, second.ids, place, chosen)
    anatomy = model.anatomy
    edits = [described(edit) for edit in model.edits]
    labels = _labels(model, first, second)[: place + 1 if anatomy.causal else None]
    made = sweep(
        model.module,
        anatomy,
        pair,
        grid_of(anatomy, grid, labels, window, [units] if isinstance(units, str | Unit) else units, roles),
        direction,
        whole_number("memory", memory, 1),
        Path(state) if state is not None else None,
        {
            "model": model.loaded.name,
            "revision": model.loaded.revision,
            "dtype": model.loaded.dtype,
            "edits": edits,
            **({} if roles is None else {"roles": {name: list(own) for name, own in roles.items()}}),
        },
        progress,
        model.seed,
        **first.forward,
    )
    under = (f"Every run was made under edits: {'; '.join(edits)}.",) if edits else ()
    return replace(made, warnings=(*made.warnings, *under), provenance=model.provenance())


@torch.no_grad()
def _logits(model: "Model", inputs: Inputs, place: int) -> Float[Tensor, " d_vocab"]:
    return logits_of(model.module(input_ids=inputs.ids, **inputs.forward))[0, place]


def _labels(model: "Model", first: Inputs, second: Inputs) -> list[str]:
    """Each position with its token, or both tokens where the prompts differ."""
    labels = []
    for at, (clean, corrupted) in enumerate(zip(first.ids[0].tolist(), second.ids[0].tolist(), strict=False)):
        tokens = [clean] if clean == corrupted else [clean, corrupted]
        labels.append(f"{at} " + "/".join(model.token(token) for token in tokens))
    return labels
