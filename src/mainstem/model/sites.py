"""From a recorded value to the place where later runs can see it.

A value that crosses a module's boundary, itself or as a view with the same elements in the same order, is seen by a
plain hook; any other by counting the calls of its function inside the innermost module call. Boundaries are preferred:
they cost least and do not depend on the number of calls inside.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch

from mainstem.errors import RefusedError
from mainstem.model.hooks import Site
from mainstem.model.program import argument_slot
from mainstem.model.recording import Call, Frame, Recording, Value

MAX_VIEWS = 4


class SiteFinder:
    """Finds sites in one recording."""

    def __init__(self, recording: Recording, positions: int) -> None:
        self.positions = positions
        self.boundaries: dict[int, list[tuple[str, Frame, int]]] = defaultdict(list)
        self.made_from: dict[int, list[Value]] = defaultdict(list)
        for frame in recording.frames:
            for where, values in (("output", frame.outputs), ("input", frame.inputs)):
                for slot, value in enumerate(values):
                    if value is not None:
                        self.boundaries[value.id].append((where, frame, slot))
        for value in recording.values:
            if value.call is not None:
                for operand in value.call.operands():
                    self.made_from[operand.id].append(value)

    def site(self, value: Value, whole: bool = False) -> Site:
        """The cheapest site of `value`.

        Args:
            value: what to see.
            whole: whether everything that uses the value must come after the site, so that a change there is a
                change of the value; otherwise one of several uses may be where it is seen.

        Raises:
            RefusedError: if the value is made where no hook can see it.
        """
        same = self.views_of(value)
        boundaries: tuple[Literal["output", "input"], ...] = ("output", "input")
        for where in boundaries:
            for candidate in same:
                for kind, frame, slot in self.boundaries.get(candidate.id, ()):
                    if kind == where and not (whole and self._used_before(same, frame, where)):
                        return self._boundary(candidate, frame, where, slot)
        if whole:
            same = sorted(same, key=lambda candidate: candidate.id)
        for candidate in same:
            call = candidate.call
            if call is not None and call.frame is not None and call.func is not None and call.name != "__setitem__":
                slot = max(candidate.slot, 0)
                first = self._positions_first(candidate)
                return call.site("result", slot, overwritten=candidate.overwritten, positions_first=first)
        where = value.call.frame.path if value.call is not None and value.call.frame is not None else "the model"
        raise RefusedError("A value of the stream is made out of sight of any module or function", where)

    def widest_input(self, value: Value, inner: Frame, foreign: Sequence[Value]) -> tuple[Site, Frame] | None:
        """The widest module call around `inner` that receives `value` and in which none of `foreign` is made.

        Returns:
            Where it receives it, and the call; None if there is no such call.
        """
        same = self.views_of(value)
        for frame in reversed(inner.stack()):
            if any(other.call is not None and other.call.inside(frame) for other in foreign):
                continue
            for candidate in same:
                for kind, receiver, slot in self.boundaries.get(candidate.id, ()):
                    if kind == "input" and receiver is frame:
                        return self._boundary(candidate, frame, "input", slot), frame
        return None

    def _boundary(self, value: Value, frame: Frame, where: Literal["input", "output"], slot: int) -> Site:
        first = self._positions_first(value)
        return Site(frame.path, frame.call, where, slot, overwritten=value.overwritten, positions_first=first)

    def _used_before(self, same: list[Value], frame: Frame, where: str) -> bool:
        """Whether something uses one of the equal values `same` other than through this boundary of `frame`."""
        ids = {value.id for value in same}
        for value in same:
            for user in self.made_from.get(value.id, ()):
                if user.id in ids or user.call is None:
                    continue
                if user.call.inside(frame) != (where == "input"):
                    return True
        if where == "input":
            return False
        first = min(same, key=lambda value: value.id)
        return first.call is None or not first.call.inside(frame)

    def _positions_first(self, value: Value) -> bool:
        return len(value.shape) >= 3 and value.shape[:2] == (self.positions, 1)

    def arguments(self, call: Call, value: Value) -> Site:
        """The site of `value` as an argument of `call`."""
        return call.site("arguments", argument_slot(call, value), overwritten=value.overwritten)

    def views_of(self, value: Value) -> list[Value]:
        """`value` and the values that hold the same elements in the same order and dtype."""
        found, pending = {value.id: value}, [(value, 0)]
        while pending:
            current, depth = pending.pop(0)
            if depth == MAX_VIEWS:
                continue
            neighbours = list(self.made_from.get(current.id, ()))
            if current.call is not None and len(current.call.active_operands()) == 1:
                neighbours.extend(current.call.active_operands())
            for other in neighbours:
                if other.id not in found and _same_elements(value.tensor, other.tensor):
                    found[other.id] = other
                    pending.append((other, depth + 1))
        return list(found.values())


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() != b.numel() or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a.reshape(-1), b.reshape(-1)) and bool(a.reshape(-1)[:64].any())
