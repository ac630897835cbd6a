"""Putting a search for a subspace together: counterfactuals from texts, a point from its address."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mainstem.causal.interchange import Counterfactual, Interchange
from mainstem.causal.subspaces import Subspace, Training, learn
from mainstem.errors import UsageError
from mainstem.intervene.intervening import require_whole_edits
from mainstem.points import Point
from mainstem.targets import check_token_id, parse_token

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt


def learn_subspace(
    model: "Model",
    at: Point | str,
    counterfactuals: "Sequence[tuple[Prompt, Prompt, str | int]]",
    size: int = 1,
    *,
    positions: int | Sequence[int] = -1,
    position: int = -1,
    steps: int = 200,
    batch: int = 32,
    rate: float = 0.1,
    held_out: float = 0.3,
    draws: int = 5,
    chat: bool = False,
) -> Subspace:
    """A subspace of a point in which interchanging runs gives the counterfactual answers; with controls.

    Args:
        model: the model.
        at: a point that is one vector at each position: `L5.resid_pre`, `L5.mlp`, `L9H8`, `embed`.
        counterfactuals: base prompt, source prompt, and the token (text or id) that the base should then give; all
            prompts of equal length.
        size: how many directions.
        positions: where to interchange, negative from the end.
        position: the destination of the answer.
        steps: of Adam.
        batch: counterfactuals of each step.
        rate: the learning rate.
        held_out: the share of the counterfactuals that are not trained on.
        draws: how many random subspaces to compare with.
        chat: whether to wrap text in the model's chat template.

    Raises:
        UsageError: if there are too few counterfactuals, or a number makes no sense.
        PairError: if prompts are not of equal length.
        PromptError, TokenError, PositionError: if a prompt, an answer or a position is not to be had.
        UnitError, LevelRefusedError: if the model has no such point, or it is not one vector.
        RunError: if the model cannot be differentiated.
    """
    require_whole_edits(model)
    examples = [_encoded(model, *example, chat) for example in counterfactuals]
    if not examples:
        raise UsageError("A subspace is learned on counterfactuals", None, "Give some.")
    inputs = model.inputs(list(examples[0].base))
    places = [inputs.place(place) for place in ([positions] if isinstance(positions, int) else positions)]
    interchange = Interchange(
        model.module,
        model.anatomy,
        Point.parse(at) if isinstance(at, str) else at,
        places,
        inputs.place(position),
        **inputs.forward,
    )
    found = learn(interchange, examples, Training(size, steps, batch, rate), held_out, draws, model.seed)
    return replace(found, provenance=model.provenance())


def _encoded(model: "Model", base: "Prompt", source: "Prompt", expected: str | int, chat: bool) -> Counterfactual:
    vocabulary = model.anatomy.sizes.d_vocab
    token = (
        parse_token(expected, model.tokenizer, vocabulary)
        if isinstance(expected, str)
        else check_token_id(expected, vocabulary)
    )
    return Counterfactual(tuple(model.encode(base, chat)), tuple(model.encode(source, chat)), token)
