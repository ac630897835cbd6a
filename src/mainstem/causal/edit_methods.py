"""How an edit makes new values of old: zero, a mean, another run's, a sum, a multiple, a subspace, a knockout.

A method makes the new values of one piece of the point (see `mainstem.causal.pieces`) from the old: [pos, entry].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import New, set_to
from mainstem.errors import EditError, PositionError
from mainstem.points import Point

Values = Sequence[Float[Tensor, "pos entry"]] | None
"""Of each row of a source, at every position; None without a source."""


class Method:
    """How new values are made; `source`, in some, is the run or runs whose values are needed."""

    sets: ClassVar[bool] = False
    """Whether old values are dropped."""

    source: Any = None

    def new(self, at: Point, width: int, values: Values) -> New:
        """The function that makes them.

        Args:
            at: the point, for messages.
            width: how many entries the piece has.
            values: for each row of the source [pos, entry]; None without a source.

        Raises:
            EditError: if they cannot be made there.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Zero(Method):
    """Nothing."""

    sets: ClassVar[bool] = True

    def new(self, at: Point, width: int, values: Values) -> New:
        """Zeros."""
        return set_to(0.0)


@dataclass(frozen=True, eq=False)
class Mean(Method):
    """The mean over the tokens of a source, without the first of each row, which is a sink in many models."""

    source: Any
    sets: ClassVar[bool] = True

    def new(self, at: Point, width: int, values: Values) -> New:
        """The same at every position."""
        assert values is not None
        tokens = torch.cat([row[1:] for row in values])
        if not len(tokens):
            raise EditError("A mean over nothing", str(at), "Give a reference of two tokens at least.")
        return set_to(tokens.double().mean(0))


@dataclass(frozen=True, eq=False)
class Patch(Method):
    """Another run's values at the same positions."""

    source: Any
    row: int = 0
    sets: ClassVar[bool] = True

    def new(self, at: Point, width: int, values: Values) -> New:
        """By position."""
        assert values is not None
        theirs = _row(at, values, self.row)
        return lambda old, places: _at_places(at, theirs, places).to(old)


@dataclass(frozen=True, eq=False)
class Resample(Method):
    """The value at a random token of a source, drawn anew for each position, the same for the same seed."""

    source: Any
    seed: int = 0
    sets: ClassVar[bool] = True

    def new(self, at: Point, width: int, values: Values) -> New:
        """By position."""
        assert values is not None
        tokens = torch.cat(list(values))

        def new(old: Tensor, places: Tensor) -> Tensor:
            draws = [_draw(len(tokens), self.seed, place) for place in places.tolist()]
            return tokens[draws].to(old)

        return new


@dataclass(frozen=True, eq=False)
class Add(Method):
    """The old values and a vector times a coefficient."""

    vector: Float[Tensor, " entry"]
    coefficient: float = 1.0

    def new(self, at: Point, width: int, values: Values) -> New:
        """Of one piece: what a unit writes in several is added to once (see `mainstem.causal.edit_plans`)."""
        if self.vector.shape != (width,):
            size = " x ".join(map(str, self.vector.shape)) or "0"
            raise EditError(f"A vector of {size} entries cannot be added here", str(at), f"Give one of {width}.")
        return lambda old, places: old + self.coefficient * self.vector.to(old)


@dataclass(frozen=True, eq=False)
class Scale(Method):
    """The old values times a factor."""

    factor: float

    def new(self, at: Point, width: int, values: Values) -> New:
        """Every piece."""
        return lambda old, places: old * self.factor


@dataclass(frozen=True, eq=False)
class Subspace(Method):
    """The old values, with their part in the span of `axes` dropped for the source's; for nothing, without one."""

    axes: Float[Tensor, "direction entry"]
    source: Any = None
    row: int = 0

    def new(self, at: Point, width: int, values: Values) -> New:
        """Every piece."""
        axes = self.axes[None] if self.axes.dim() == 1 else self.axes
        if axes.shape[-1] != width:
            raise EditError(
                f"Directions of {axes.shape[-1]} entries span nothing here", str(at), f"Give some of {width}."
            )
        basis = _basis(at, axes)
        theirs = None if values is None else _row(at, values, self.row)

        def new(old: Tensor, places: Tensor) -> Tensor:
            own = basis.to(old)
            change = -old if theirs is None else _at_places(at, theirs, places).to(old) - old
            return old + change @ own @ own.T

        return new


@dataclass(frozen=True, eq=False)
class Knockout(Method):
    """Some sources cannot be attended to: what a softmax over the others gives.

    A sink outside the prompt keeps its share. Where nothing else can be attended to the head writes nothing.
    """

    sources: tuple[int, ...]

    def rows(self, sinks: bool) -> New:
        """The function that makes rows of a pattern from old ones; `sinks`: what they lack to 1 is a sink's."""

        def new(old: Tensor, places: Tensor) -> Tensor:
            kept = old.double()
            sink = (1 - kept.sum(-1, keepdim=True)).clamp_min(0)
            noise = torch.finfo(old.dtype).eps
            kept[:, [s for s in self.sources if s < old.shape[1]]] = 0
            total = kept.sum(-1, keepdim=True) + torch.where(sink > noise, sink, 0) * sinks
            return torch.where(total > 0, kept / total.clamp_min(1e-300), 0).to(old)

        return new


def _row(at: Point, values: Sequence[Tensor], row: int) -> Tensor:
    if not 0 <= row < len(values):
        raise EditError(f"The source has no row {row}", f"{at}, of {len(values)} rows", "Rows count from 0.")
    return values[row]


def _basis(at: Point, axes: Float[Tensor, "direction entry"]) -> Float[Tensor, "entry direction"]:
    """Orthonormal columns that span the axes, which need be neither orthogonal nor independent."""
    if not torch.isfinite(axes).all() or not axes.any():
        raise EditError("The axes are zero or not finite, and span no subspace", str(at), "Give other directions.")
    left, sizes, _ = torch.linalg.svd(axes.double().T, full_matrices=False)
    return left[:, sizes > max(axes.shape) * torch.finfo(axes.dtype).eps * sizes[0]]


def _at_places(at: Point, values: Float[Tensor, "pos entry"], places: Tensor) -> Float[Tensor, "pos entry"]:
    if len(places) and int(places.max()) >= len(values):
        raise PositionError(
            f"The other run has no position {int(places.max())}",
            f"{at}, of a run of {len(values)} token{'s' * (len(values) != 1)}",
            "Name the positions to edit, or give prompts of equal length.",
        )
    return values[places.to(values.device)]


def _draw(count: int, seed: int, place: int) -> int:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + place) % 2**63)
    return int(torch.randint(count, (1,), generator=generator))
