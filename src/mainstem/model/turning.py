"""Which tensors of a model carry the basis of the stream, so that a copy of it can be rotated.

A rotation R of the stream (x becomes R x) is undone by what reads the stream and made by what writes into it. Which
tensors those are, and along which axis, is asked of every operation of one recorded forward pass, by behaviour: with a
reflection H, an operation f on stream values `turns` with them if f(H x) = H f(x), is `blind` to them if
f(H x) = f(x), and does either only `together` with another operand if f(H x, H w) = H f(x, w) or f(x, w). From the
writes it goes back to the matrices and tables that make them, from every stream value forward to all that use it: so
embeddings, fused and stacked matrices, experts, mixers, biases and the unembedding are found alike, whatever they are
called and however they are laid out. What is neither (a sum of squares) is taken together with what follows until it
is (a mean of squares); what never is, is refused with its place.

A factor for each dimension does not commute with R. It is a `Gain` if it is a parameter: f(H x, 1) = H f(x, 1) and
f(x, g) = g f(x, 1). Where everything that sees the result is a matrix, the gain is folded into the matrix and becomes 1
in the copy (a following bias b becomes R (b / g)). Where the result enters the stream (norms after a sublayer, gates
for each channel), the operation is left in the old basis: in a run its inputs are turned back and its result turned
(`Bracket`). The same is done with writes that no tensor of the model makes.

H is drawn with H 1 = 1 where a generic one fails, which says that the model takes means over the stream (`centred`).
Everything is computed in float64 with the recording's casts widened, so that what holds, holds to 1e-9.

Cost: a recorded pass, and each operation on the stream run a few times more. Limits: what the recorded tokens did not
use (an expert that was not chosen) is not seen, and refused where its like was.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mainstem.model.hooks import Site


@dataclass(frozen=True)
class Place:
    """A tensor of the model: the module and the attribute that hold it, and its shape with the stream's axis last."""

    module: str
    attribute: str
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}".lstrip(".")

    def held(self, model: torch.nn.Module) -> Tensor:
        """The tensor itself."""
        return getattr(model.get_submodule(self.module), self.attribute)

    def of(self, model: torch.nn.Module) -> Tensor:
        """It in `model`, with the stream's axis last: changes to it change the model."""
        whole = self.held(model)
        return torch.as_strided(whole.detach(), self.size, self.stride, whole.storage_offset())


@dataclass(eq=False)
class Gain:
    """A factor for each dimension that a parameter makes; `unit` is the parameter's value at which it is 1.

    `kept` says that it cannot be folded: what it makes enters the stream, or nothing is known to set to 1.
    """

    place: Place | None
    value: Tensor
    unit: Tensor | None
    where: str
    kept: bool = False
    brackets: "list[Bracket]" = field(default_factory=list)


Gains = tuple[Gain, ...]


@dataclass(frozen=True, eq=False)
class Turn:
    """A tensor that turns along its last axis: rows w become R (w * folded gains, or w / those of `over`).

    `within` is the gain of the same operation: where that is kept, the tensor stays as it is.
    """

    place: Place
    gains: Gains = ()
    over: Gains = ()
    within: Gain | None = None
    where: str = ""

    def folded(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The gains that rows are multiplied with and divided by, as identities."""
        by, over = (tuple(id(gain) for gain in gains if not gain.kept) for gains in (self.gains, self.over))
        return by, over

    def scale(self) -> Tensor | None:
        """What rows are multiplied with before they turn, [d_model] float64; None for one."""
        out = None
        for gain in (*self.gains, *self.over):
            if not gain.kept:
                factor = 1 / gain.value if gain in self.over else gain.value
                out = factor if out is None else out * factor
        return out


@dataclass(frozen=True)
class Bracket:
    """An operation that stays in the old basis: in a run its `inputs` are turned back and its `results` turned.

    With each site the axis of the stream, counted from the last.
    """

    inputs: tuple[tuple[Site, int], ...]
    results: tuple[tuple[Site, int], ...]
    where: str


@dataclass(frozen=True, eq=False)
class Turning:
    """How to rotate a copy of one model.

    Attributes:
        d_model: the stream's width.
        centred: whether the model takes means over the stream: then R 1 = 1 is needed.
        turns: the tensors that turn.
        gains: those that are folded.
        brackets: what is turned while the model runs, so that no checkpoint holds the rotation.
        plain: uses, as they are, of tensors that turn where others use them.
    """

    d_model: int
    centred: bool
    turns: tuple[Turn, ...]
    gains: tuple[Gain, ...]
    brackets: tuple[Bracket, ...]
    plain: tuple[Place, ...]
