"""From prompts to what a forward call takes: ids padded on the left, masks, positions, and the destinations' places."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.errors import PositionError, PromptError, TokenError
from mainstem.whole_numbers import whole_number


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch of token ids, padded on the left; `padding` is the number of padding tokens of each row."""

    ids: Int[Tensor, "batch pos"]
    padding: tuple[int, ...]
    forward: dict[str, Any]

    def length(self, row: int) -> int:
        """The number of real tokens of a row."""
        return self.ids.shape[1] - self.padding[row]

    def place(self, position: Any, row: int = 0) -> int:
        """A position of the prompt (negative: from the end) counted from its first token.

        Raises:
            PositionError: if the prompt has no such position.
            UsageError: if it is no whole number.
        """
        position, length = whole_number("position", position), self.length(row)
        if not -length <= position < length:
            raise PositionError(
                f"Position {position} is outside the prompt",
                f"the prompt has {length} tokens",
                f"Use 0 to {length - 1}, or -1 to {-length} counted from the end.",
            )
        return position % length

    def destinations(self, positions: Sequence[int]) -> Int[Tensor, "batch destination"]:
        """Where the asked positions are in the padded rows."""
        rows = [
            [self.padding[row] + self.place(position, row) for position in positions]
            for row in range(self.ids.shape[0])
        ]
        return torch.tensor(rows, device=self.ids.device)


def accepted(module: torch.nn.Module) -> set[str]:
    """The keyword arguments that a model's forward takes; where it passes any on, those of the model inside too."""
    names: set[str] = set()
    for inner in module.modules():
        parameters = inspect.signature(inner.forward).parameters
        if inner is module or "input_ids" in parameters:
            names |= set(parameters)
            open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
            if not open_ended or (inner is not module and "attention_mask" in parameters):
                break
    return names


def base_arguments(module: torch.nn.Module) -> dict[str, Any]:
    """Arguments for every run: no cache of keys and values where the model has one."""
    return {"use_cache": False} if "use_cache" in accepted(module) else {}


CACHES = ("cache", "past_key_values", "cache_params")
"""What models call the keys and values, or states, of positions that came before."""


def cache_argument(module: torch.nn.Module) -> str | None:
    """What the model calls its cache; None if it takes none."""
    return next((name for name in CACHES if name in accepted(module)), None)


def context_length(module: torch.nn.Module) -> int | None:
    """The number of positions that the model's configuration allows, if it says so."""
    config = getattr(module, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        value = getattr(part, "max_position_embeddings", None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def make_inputs(
    module: torch.nn.Module, rows: Sequence[Sequence[int]], d_vocab: int, device: torch.device | str, pad: int = 0
) -> Inputs:
    """Inputs for one or several prompts given as token ids.

    Raises:
        PromptError: if a prompt is empty or longer than the context.
        TokenError: if an id is outside the vocabulary.
    """
    limit = context_length(module)
    for ids in rows:
        if not ids:
            raise PromptError("The prompt is empty", None, "Give at least one token of text.")
        if limit is not None and len(ids) > limit:
            raise PromptError(
                f"The prompt has {len(ids)} tokens, the model's context {limit}", None, "Shorten the prompt."
            )
        for token in ids:
            if not 0 <= token < d_vocab:
                raise TokenError(
                    f"Token id {token} is outside the vocabulary", None, f"Ids go from 0 to {d_vocab - 1}."
                )
    longest = max(len(ids) for ids in rows)
    padding = tuple(longest - len(ids) for ids in rows)
    table = torch.tensor([[pad] * n + list(ids) for n, ids in zip(padding, rows, strict=True)], device=device)
    forward = base_arguments(module)
    if any(padding):
        names = accepted(module)
        if "attention_mask" not in names:
            raise PromptError(
                "This model takes no attention mask, so prompts of different lengths cannot run together",
                None,
                "Trace them one at a time.",
            )
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
        forward["attention_mask"] = mask
        if "position_ids" in names:
            forward["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return Inputs(table, padding, forward)
