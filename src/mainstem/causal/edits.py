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

How each makes its new values is in `mainstem.causal.edit_methods`.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import Places
from mainstem.causal.edit_methods import Add, Knockout, Mean, Method, Patch, Resample, Scale, Subspace, Zero
from mainstem.errors import EditError, PositionError
from mainstem.points import Point
from mainstem.units import Unit


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
