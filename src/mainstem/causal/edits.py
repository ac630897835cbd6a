"""What an edit is: a place of the run, a method, and the positions and rows that it holds for.

    Edit.zero("L5.mlp")                          nothing is written there
    Edit.mean("L9H8", reference)                 its mean over the tokens of other prompts, but for their first
    Edit.patch("L5.resid_pre", trace)            what another run has there
    Edit.resample("L27N846", prompts, seed=1)    what it is at a random token of other prompts
    Edit.add("L5.resid_post", vector, 4.0)       steering
    Edit.scale("L9H8", 0.5)
    Edit.project_out("L5.attn.input", axes)      without its part in a subspace
    Edit.replace_in("L5.resid_pre", axes, trace) with another run's part in a subspace
    Edit.freeze("L9H8.pattern", trace)           a pattern, or the scale of a norm, as in another run
    Edit.knockout("L9H8", [3])                   some sources cannot be attended to; the others share their weight

Edits of one place are made in the order in which they are given, across places in that of the forward pass. One that
would be lost, because another says what the value is, is refused (see `mainstem.causal.edit_plans`). A source of values
is a trace, a text, a list of texts, or the inputs of a run.

A method makes the new values of one piece of the point (see `mainstem.causal.pieces`) from the old: [pos, entry].
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import New, Places, set_to
from mainstem.errors import EditError, PositionError
from mainstem.points import Point
from mainstem.units import Unit

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


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit. Make one with a class method.

    Attributes:
        at: where; text is parsed as `mainstem.points.Point` does.
        method: how.
        positions: which positions: numbers, negative ones counted from the end of the prompt; "prompt" or
            "generated"; None for all. For keys and values the positions that are attended to.
        row: which row of a batch; None for every row.
        written: the text that it was made of, if it was.
    """

    at: Point
    method: Method
    positions: Places = None
    row: int | None = None
    written: str | None = None

    @classmethod
    def of(cls, at: Point | str, method: Method, positions: Places | int = None, row: int | None = None) -> Self:
        """An edit by any method."""
        if not isinstance(method, Method):
            raise EditError(f"{method!r} is no method", None, "Use a class method of Edit, such as Edit.zero.")
        if isinstance(at, Unit):
            at = Point("write", at)
        point = at if isinstance(at, Point) else Point.parse(at)
        return cls(point, method, _places(positions), None if row is None else operator.index(row))

    @classmethod
    def zero(cls, at: Point | str, positions: Places | int = None, row: int | None = None) -> Self:
        """Nothing is written, read or attended to there."""
        return cls.of(at, Zero(), positions, row)

    @classmethod
    def mean(cls, at: Point | str, reference: Any, positions: Places | int = None, row: int | None = None) -> Self:
        """The mean over the tokens of a reference, but for the first of each row."""
        return cls.of(at, Mean(_given(at, reference)), positions, row)

    @classmethod
    def patch(
        cls, at: Point | str, source: Any, positions: Places | int = None, row: int | None = None, source_row: int = 0
    ) -> Self:
        """What another run has there, at the same positions."""
        return cls.of(at, Patch(_given(at, source), source_row), positions, row)

    @classmethod
    def resample(
        cls, at: Point | str, source: Any, seed: int = 0, positions: Places | int = None, row: int | None = None
    ) -> Self:
        """What is there at a random token of other runs."""
        return cls.of(at, Resample(_given(at, source), seed), positions, row)

    @classmethod
    def add(
        cls,
        at: Point | str,
        vector: Float[Tensor, " entry"],
        coefficient: float = 1.0,
        positions: Places | int = None,
        row: int | None = None,
    ) -> Self:
        """Steering: `coefficient` times `vector` more."""
        return cls.of(at, Add(torch.as_tensor(vector).clone(), float(coefficient)), positions, row)

    @classmethod
    def scale(cls, at: Point | str, factor: float, positions: Places | int = None, row: int | None = None) -> Self:
        """Times a factor."""
        return cls.of(at, Scale(float(factor)), positions, row)

    @classmethod
    def project_out(
        cls, at: Point | str, axes: Float[Tensor, "direction entry"], positions: Places | int = None, row=None
    ) -> Self:
        """Without its part in the span of `axes`, rows that need not be orthogonal."""
        return cls.of(at, Subspace(torch.as_tensor(axes)), positions, row)

    @classmethod
    def replace_in(
        cls,
        at: Point | str,
        axes: Float[Tensor, "direction entry"],
        source: Any,
        positions: Places | int = None,
        row: int | None = None,
        source_row: int = 0,
    ) -> Self:
        """With another run's part in the span of `axes`."""
        return cls.of(at, Subspace(torch.as_tensor(axes), _given(at, source), source_row), positions, row)

    @classmethod
    def freeze(
        cls, at: Point | str, source: Any, positions: Places | int = None, row: int | None = None, source_row: int = 0
    ) -> Self:
        """A pattern (L9H8.pattern) or the scale of a norm (L9.attn.norm, norm) as in another run."""
        made = cls.patch(at, source, positions, row, source_row)
        if made.at.kind not in ("pattern", "norm"):
            raise EditError(f"Only patterns and norms are frozen, not {made.at}", None, "Use Edit.patch.")
        return made

    @classmethod
    def knockout(
        cls, head: Point | str, sources: Sequence[int] | int, positions: Places | int = None, row: int | None = None
    ) -> Self:
        """A head cannot attend from `positions` to `sources`."""
        at = Point.parse(head) if isinstance(head, str) else head
        if at.kind == "write" and at.unit is not None:
            at = Point("pattern", at.unit)
        if at.kind != "pattern" or at.unit is None or at.unit.kind != "head":
            raise EditError(f"Only heads attend, and {head} is none", None, "Give a head, such as L9H8.")
        given = (sources,) if isinstance(sources, int) else tuple(int(source) for source in sources)
        if not given or min(given) < 0:
            raise EditError("A knockout needs source positions, counted from 0", str(at), "Give one or more.")
        return cls.of(at, Knockout(given), positions, row)


def _places(positions: Any) -> Places:
    """Positions as an edit keeps them."""
    if positions is None or isinstance(positions, str) and positions in ("prompt", "generated"):
        return positions  # type: ignore[return-value]
    try:
        given: Any = positions if isinstance(positions, str) else torch.as_tensor(positions).flatten().tolist()
        places = tuple(operator.index(place) for place in given)
    except (TypeError, ValueError, RuntimeError):
        places = ()
    if not places:
        raise PositionError(
            f"{positions!r} names no positions", None, "Give numbers, 'prompt', 'generated', or nothing for all."
        )
    return places


def _given(at: Any, source: Any) -> Any:
    if source is None:
        raise EditError("A value of another run needs that run", str(at), "Give a trace, a text, or several texts.")
    return source


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
            f"{at}, of a run of {len(values)} tokens",
            "Name the positions to edit, or give prompts of equal length.",
        )
    return values[places.to(values.device)]


def _draw(count: int, seed: int, place: int) -> int:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + place) % 2**63)
    return int(torch.randint(count, (1,), generator=generator))
