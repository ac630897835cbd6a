"""Putting an attention knockout together: the answer, and sets of source positions with names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mainstem.causal.knockouts import Knockouts, knock_out
from mainstem.intervene.intervening import answer_of, one_prompt, rows_of

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt


def knock_out_attention(
    model: "Model",
    prompt: "Prompt",
    sources: Mapping[str, Sequence[int]] | None = None,
    answer: str | Sequence[str] = (),
    *,
    window: int = 5,
    position: int = -1,
    chat: bool = False,
) -> Knockouts:
    """The change of the answer's probability when the destination cannot attend to some sources, layer by layer.

    Args:
        model: the model.
        prompt: text or token ids.
        sources: sets of positions by name, negative ones from the end; by default every position by itself.
        answer: its tokens; by default the likeliest.
        window: how many layers around each are knocked out together, in all of their heads.
        position: the destination, negative from the end.
        chat: whether to wrap text in the model's chat template.

    Raises:
        UsageError: if a window or a set holds nothing.
        PositionError: if a position is outside the prompt, or a source after the destination.
        LevelRefusedError: if no layer has heads, or a head's pattern cannot be changed.
    """
    inputs = one_prompt(model, prompt, chat)
    rows = rows_of(model, inputs, position)
    text, ids = answer_of(model, answer, rows.clean)
    if sources is None:
        tokens = inputs.ids[0].tolist()
        last = rows.position + 1 if model.anatomy.causal else len(tokens)
        sets = {f"{place} {model.token(tokens[place])}": [place] for place in range(last)}
    else:
        sets = {name: [inputs.place(place) for place in own] for name, own in sources.items()}
    return replace(knock_out(rows, ids, sets, window, text), provenance=model.provenance())
