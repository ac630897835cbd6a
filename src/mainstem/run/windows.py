"""A long text in windows: every token is seen once, however the text is cut.

A model sees a bounded context, so a text is cut into windows of one length. Windows begin `stride` tokens apart; the
last one is moved back so that it ends with the text. What a window adds is what no window before it had: `new` says
from which position on. With a stride shorter than the window, each new token is predicted from at least
`length - stride` tokens before it (the sliding-window perplexity of Transformers' documentation); with a stride equal
to the length the windows do not overlap, but for the last, and the first token of a window is predicted from nothing
and not counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mainstem.errors import TextError, UsageError

LENGTH = 512


@dataclass(frozen=True, eq=False)
class Windows:
    """A text cut into windows.

    Attributes:
        ids: [window, pos] token ids.
        new: for each window, the first position that no window before it had.
        stride: how far apart windows begin (the last one but for the text's end).
    """

    ids: Int[Tensor, "window pos"]
    new: tuple[int, ...]
    stride: int

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.ids.shape[1]

    @property
    def n_tokens(self) -> int:
        """Tokens of the text, each counted once."""
        return sum(self.length - first for first in self.new)

    def fresh(self, rows: slice = slice(None)) -> Bool[Tensor, "window pos"]:
        """Which positions of some windows no earlier window had."""
        first = torch.tensor(self.new[rows])
        return torch.arange(self.length) >= first[:, None]

    def predicted(self, rows: slice = slice(None)) -> Bool[Tensor, "window pos"]:
        """Which positions of some windows are counted as predicted: the fresh ones that have a token before them."""
        fresh = self.fresh(rows)
        fresh[:, 0] = False
        return fresh

    def batches(self, size: int) -> Iterator[slice]:
        """The windows in batches of at most `size`."""
        for start in range(0, len(self.new), size):
            yield slice(start, min(start + size, len(self.new)))


def windows(ids: Sequence[int], length: int = LENGTH, stride: int | None = None) -> Windows:
    """Cuts a text.

    Args:
        ids: the text's tokens.
        length: tokens of a window; at most the model's context.
        stride: how far apart windows begin; the window's length by default.

    Raises:
        TextError: the text is shorter than a window.
        UsageError: a window of fewer than two tokens, or a stride that is not from 1 to the window's length.
    """
    step = length if stride is None else stride
    if length < 2:
        raise UsageError("A window needs two tokens at least", f"window {length}", "Use 512, for example.")
    if not 1 <= step <= length:
        raise UsageError("A stride is from 1 to the window's length", f"stride {step}", f"The window has {length}.")
    if len(ids) < length:
        raise TextError(
            f"The text has {len(ids)} token{'s' * (len(ids) != 1)}, a window {length}",
            None,
            "Give a longer text, or a shorter window.",
        )
    last = len(ids) - length
    starts = [*range(0, last, step), last]
    seen = [0, *(start + length for start in starts[:-1])]
    table = torch.tensor([list(ids[start : start + length]) for start in starts])
    return Windows(table, tuple(end - start if end else 0 for start, end in zip(starts, seen, strict=True)), step)
