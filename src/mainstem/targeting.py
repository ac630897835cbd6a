"""The target of a request: what the user wrote, or the model's own prediction."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainstem.targets import Target

if TYPE_CHECKING:
    from mainstem.session import Trace


def chosen_target(
    trace: "Trace",
    target: str | Sequence[str] | Target | None,
    against: str | Sequence[str] = (),
    position: int = -1,
    row: int = 0,
) -> Target:
    """The target that a request names: literal texts or `id:N`, a Target, or, for None, the model's own prediction.

    Raises:
        TokenError, TargetError: if a text is not one token, or a token is its own rival.
    """
    if isinstance(target, Target):
        return target
    if target is None:
        target = f"id:{int(trace.logits(position, row).argmax())}"
    return trace.model.target(target, against)
