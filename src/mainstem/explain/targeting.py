"""The target of a request: what the user wrote, or the model's own prediction."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.targets import Target

if TYPE_CHECKING:
    from mainstem.tracing import Trace


def chosen_target(
    trace: "Trace",
    target: str | Sequence[str] | Target | None,
    against: str | Sequence[str] = (),
    position: int = -1,
    row: int = 0,
    continuation: str | Sequence[int] | None = None,
    direction: str | Path | Sequence[float] | Tensor | None = None,
) -> Target:
    """The target that a request names: literal texts or `id:N`, a Target, or, for None, the model's own prediction.

    A continuation or a direction stands instead of it (see `Model.target`).

    Raises:
        TokenError, TargetError: if a text is not one token, or a token is its own rival.
    """
    if isinstance(target, Target):
        return target
    if continuation is not None or direction is not None:
        return trace.model.target(target or (), against, continuation=continuation, direction=direction)
    if target is None:
        target = f"id:{int(trace.logits(position, row).argmax())}"
    return trace.model.target(target, against)
