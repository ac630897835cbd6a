"""The text that a question about the basis is asked on: opened, in tokens, cut into windows that the model can see."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainstem.errors import UsageError
from mainstem.lab.texts import Text, open_text
from mainstem.run.inputs import context_length
from mainstem.run.windows import LENGTH, Windows, windows

if TYPE_CHECKING:
    from mainstem.session import Model


@dataclass(frozen=True, eq=False)
class Reference:
    """A text as one model reads it."""

    text: Text
    ids: list[int]
    windows: Windows

    def summary(self) -> dict[str, Any]:
        """What a result says of it."""
        return {
            "name": self.text.name,
            "source": self.text.source,
            "tokens": self.windows.n_tokens,
            "window": self.windows.length,
            "stride": self.windows.stride,
            "windows": len(self.windows.new),
        }

    def first(self, tokens: int) -> "Reference":
        """Its first tokens, in windows of the same length, or in one window where they are fewer than that.

        Raises:
            UsageError: fewer than two tokens.
        """
        ids = self.ids[:tokens]
        return replace(self, ids=ids, windows=windows(ids, min(self.windows.length, tokens)))


def reference(
    model: "Model", text: Text | str | Path = "drama", tokens: int = 20_000, window: int | None = None
) -> Reference:
    """The first tokens of a text in windows side by side.

    Args:
        model: the model.
        text: a text, or what `open_text` takes.
        tokens: how many tokens at most.
        window: tokens of a window; 512 by default, or `tokens` or the model's context where that is shorter.

    Raises:
        TextError: the text cannot be opened, or is shorter than a window.
        UsageError: a window that is longer than the model's context, or shorter than two tokens.
    """
    context = context_length(model.module)
    if window is not None and context is not None and window > context:
        raise UsageError(
            "A window is longer than the model's context",
            f"window {window}, context {context}",
            f"Use {context} at most.",
        )
    opened = text if isinstance(text, Text) else open_text(text)
    ids = opened.ids(model, tokens)
    length = window or min(LENGTH, tokens, context or LENGTH)
    return Reference(opened, ids, windows(ids, length))
