"""The text that a question about the basis is asked on: opened, in tokens, cut into windows that the model can see."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def reference(
    model: "Model", text: Text | str | Path = "drama", tokens: int = 20_000, window: int | None = None
) -> Reference:
    """The first tokens of a text in windows side by side.

    Args:
        model: the model.
        text: a text, or what `open_text` takes.
        tokens: how many tokens at most.
        window: tokens of a window; 512 by default, or the model's context where that is shorter.

    Raises:
        TextError: the text cannot be opened, or is shorter than a window.
    """
    opened = text if isinstance(text, Text) else open_text(text)
    ids = opened.ids(model, tokens)
    length = window or min(LENGTH, context_length(model.module) or LENGTH)
    return Reference(opened, ids, windows(ids, length))
