"""What `Model.basis` is: questions about the basis of the stream, each answered by a module of this package."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainstem.session import Model


class Basis:
    """The basis laboratory of one model; the model is never changed."""

    def __init__(self, model: "Model") -> None:
        self.model = model
