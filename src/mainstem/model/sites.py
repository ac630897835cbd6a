"""From a recorded value to the place where later runs can see it.

A value that crosses a module's boundary, itself or as a view with the same elements in the same order, is seen by a
plain hook; any other by counting the calls of its function inside the innermost module call. Boundaries are preferred:
they cost least and do not depend on the number of calls inside.
"""

from collections import defaultdict

import torch

from mainstem.errors import RefusedError
from mainstem.model.hooks import Site
from mainstem.model.program import argument_slot
from mainstem.model.recorder import Call, Frame, Recording, Value

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
        for where in ("output", "input"):
            for candidate in same:
                for kind, frame, slot in self.boundaries.get(candidate.id, ()):
                    if kind == where and not (whole and self._used_before(same, frame, where)):
                        return Site(
                            frame.path,
                            frame.call,
                            where,
                            slot,
                            overwritten=candidate.overwritten,
                            positions_first=self._positions_first(candidate),
                        )
        if whole:
            same = sorted(same, key=lambda candidate: candidate.id)
        for candidate in same:
            call = candidate.call
            if call is not None and call.frame is not None and call.func is not None and call.name != "__setitem__":
                slot = max(candidate.slot, 0)
                return Site(
                    call.frame.path,
                    call.frame.call,
                    "result",
                    slot,
                    call.key,
                    call.ordinal,
                    candidate.overwritten,
                    self._positions_first(candidate),
                )
        where = value.call.frame.path if value.call is not None and value.call.frame is not None else "the model"
        raise RefusedError("A value of the stream is made out of sight of any module or function", where)

    def _used_before(self, same: list[Value], frame: Frame, where: str) -> bool:
        """Whether something uses one of the equal values `same` other than through this boundary of `frame`."""
        ids = {value.id for value in same}
        for value in same:
            for user in self.made_from.get(value.id, ()):
                if user.id in ids or user.call is None:
                    continue
                inside = user.call.frame is not None and frame in user.call.frame.stack()
                if inside != (where == "input"):
                    return True
        if where == "input":
            return False
        first = min(same, key=lambda value: value.id)
        return first.call is None or first.call.frame is None or frame not in first.call.frame.stack()

    def _positions_first(self, value: Value) -> bool:
        return len(value.shape) >= 3 and value.shape[:2] == (self.positions, 1)

    def arguments(self, call: Call, value: Value) -> Site:
        """The site of `value` as an argument of `call`."""
        assert call.frame is not None
        slot = argument_slot(call, value)
        return Site(call.frame.path, call.frame.call, "arguments", slot, call.key, call.ordinal)

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
