"""What makes a value of the stream turn: back from it to the tensors of the model, through operations that carry turns.

An operation carries a turn if some of its operands, reflected along some of their axes, reflect its result. The fewest
operands that do are taken, and each is followed further back, down to parameters and buffers: the matrix of a product
and its bias, the table of an embedding, every expert's matrix.

Cost: each operation on the way is run twice for each choice of operands that is tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

from mainstem.model.equivariance import Reflections
from mainstem.model.program import one_call
from mainstem.model.recording import Call, Frame, Value
from mainstem.model.turning import Gains, Place
from mainstem.model.turning_places import place_of, same_values

MAX_TOGETHER = 2
MAX_BEHIND = 30


@dataclass(frozen=True, eq=False)
class Mark:
    """That a value turns along an axis, and the gains it carries that what reads it is to take over."""

    axis: int
    gains: Gains = ()


@dataclass(frozen=True, eq=False)
class Behind:
    """A value that must turn, along which axis, and the tensors of the model that make it turn."""

    value: Value
    axis: int
    places: tuple[Place, ...]


Found = dict[int, Behind]


class Makers:
    """Looks for makers; `marks` and `places` are what is known so far, of values by their ids."""

    def __init__(
        self, reflections: Reflections, marks: Mapping[int, Mark], places: Mapping[int, tuple[Place, ...]]
    ) -> None:
        self.reflections, self.marks, self.places = reflections, marks, places

    def behind(self, value: Value, axis: int, frame: Frame | None, depth: int = 0) -> Found | None:
        """Everything that must turn so that `value` does, itself last; None if the model's tensors do not make it.

        Args:
            value: what must turn.
            axis: along which axis, counted from the last.
            frame: the module call that uses it, to name tensors by.
            depth: how far back this is.
        """
        known = self.marks.get(value.id)
        if known is not None:
            return {value.id: Behind(value, axis, self.places.get(value.id, ()))} if known.axis == axis else None
        if value.parameter is not None and not value.active:
            return {value.id: Behind(value, axis, (place_of(value, axis, frame),))}
        call = value.call
        if call is None or depth > MAX_BEHIND:
            return None
        frame = call.frame or frame
        for chosen in self._candidates(call, value, axis):
            found = self.all_behind(chosen, frame, depth + 1)
            if found is not None:
                places = dict.fromkeys(chain(*(found[operand.id].places for operand, _ in chosen)))
                return found | {value.id: Behind(value, axis, tuple(places))}
        return None

    def all_behind(self, chosen: Sequence[tuple[Value, int]], frame: Frame | None, depth: int = 0) -> Found | None:
        """`behind` of several values with their axes; None if one of them is not made by the model's tensors."""
        found: Found = {}
        for operand, axis in chosen:
            more = self.behind(operand, axis, frame, depth)
            if more is None:
                return None
            found |= more
        return found

    def _candidates(self, call: Call, value: Value, axis: int) -> Iterator[list[tuple[Value, int]]]:
        """The smallest choices of operands with which a result turns along `axis`."""
        if call.func is None:  # the value again, seen through another tensor
            yield from ([(o, axis)] for o in call.operands() if same_values(o, value))
            return
        for chosen in self.choices(call, 1 + MAX_TOGETHER):
            program = one_call(value, [operand for operand, _ in chosen])
            if self.reflections.turns(program, [(operand.tensor, own) for operand, own in chosen]) == axis:
                yield chosen

    def choices(self, call: Call, most: int) -> Iterator[list[tuple[Value, int]]]:
        """Operands that could turn, unmarked or marked, few first, each with each of its axes of the stream's size."""
        operands = [(o, self.reflections.axes(o.shape)) for o in call.operands() if o.tensor.is_floating_point()]
        able = [(operand, axes) for operand, axes in operands if axes]
        for size in range(1, most + 1):
            for some in combinations(able, size):
                for axes in product(*(axes for _, axes in some)):
                    yield [(operand, axis) for (operand, _), axis in zip(some, axes, strict=True)]
        if len(able) > most:  # many parts joined
            yield [(operand, axes[0]) for operand, axes in able]
