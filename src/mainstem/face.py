"""What the parts of `Model`'s public face have in common.

Its methods stand by topic where the work is done, such as `mainstem.weights.face`; `Model` inherits them all.
"""

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mainstem.session import Model


class Face:
    """A part of the face of `Model`, which is no use without the rest of it."""

    @property
    def _model(self) -> "Model":
        return cast("Model", self)
