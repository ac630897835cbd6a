"""Where a model holds what turns with its stream, and what must be settled before a copy is made.

Uses of one tensor are seen one by one; only when all are known is it clear what is folded, what is turned at run time,
and whether one tensor would have to be two things at once.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch

from mainstem.errors import RefusedError
from mainstem.model.experts import data_operand
from mainstem.model.recording import Call, Frame, Recording, Value
from mainstem.model.stream import PRODUCTS
from mainstem.model.turning import Place, Turn

NOT_ROTATED = "such a model cannot be rotated"


def settled(turns: Sequence[Turn], plain: Sequence[Place]) -> tuple[Turn, ...]:
    """Each tensor once; where two reads of one tensor would fold different gains, none is folded.

    Raises:
        RefusedError: a gain that can neither be folded nor left in the old basis, or a tensor that turns along two axes
            or is used in the old basis as well.
    """
    changed = True
    while changed:
        changed = False
        forms: dict[Place, set[tuple]] = defaultdict(set)
        for turn in turns:
            forms[turn.place].add(turn.folded())
        for turn in turns:
            if len(forms[turn.place]) > 1:
                for gain in (*turn.gains, *turn.over):
                    changed, gain.kept = changed or not gain.kept, True
    found: dict[Place, Turn] = {}
    for turn in turns:
        if turn.within is None or not turn.within.kept:
            found.setdefault(turn.place, turn)
    _check_settled(turns, list(found), plain)
    return tuple(found.values())


def _check_settled(turns: Sequence[Turn], found: Sequence[Place], plain: Sequence[Place]) -> None:
    """Refuses what cannot be: see `settled`."""
    used = {(place.module, place.attribute) for place in plain}
    for place in found:
        if (place.module, place.attribute) in used:
            raise RefusedError("A tensor is used both by the stream and elsewhere", str(place), NOT_ROTATED)
    shapes = {(place.module, place.attribute): place for place in found}
    if len(shapes) != len(found):
        twice = next(place for place in found if shapes[(place.module, place.attribute)] is not place)
        raise RefusedError("A tensor turns along two axes", str(twice), NOT_ROTATED)
    for gain in {id(g): g for turn in turns for g in (*turn.gains, *turn.over)}.values():
        if gain.kept and not gain.brackets:
            raise RefusedError(
                "A factor for each dimension cannot be folded into what reads the stream",
                gain.where,
                NOT_ROTATED,
            )


def weights_of(call: Call, sources: Sequence[Value]) -> list[Value]:
    """Which operands of a product are weights, also where they were chosen by token."""
    if call.name not in PRODUCTS:
        return []
    own = [source for source in sources if source in call.operands()]
    constant = [source for source in own if not source.active]
    if constant:
        return constant
    data = data_operand(call)
    return [] if data is None else [source for source in own if source is not data]


def place_of(value: Value, axis: int, frame: Frame | None) -> Place:
    """Where the model holds a parameter or buffer: in the innermost module around its use that has it."""
    tensor = value.holder
    rows = tensor.detach().movedim(axis, -1)
    geometry = (tuple(rows.shape), tuple(rows.stride()))
    for around in frame.stack() if frame is not None else []:
        for name, own in chain(around.module._parameters.items(), around.module._buffers.items()):
            if own is tensor:
                return Place(around.path, name, *geometry)
    assert value.parameter is not None
    module, _, name = value.parameter.rpartition(".")
    return Place(module, name, *geometry)


def where(call: Call | None) -> str:
    """The place of a call as a reader of the model's code finds it."""
    if call is None:
        return "the model"
    path = call.frame.path if call.frame is not None else ""
    return path or "the model"


def same_values(a: Value, b: Value) -> bool:
    """Whether two values are equal to the bit."""
    return a.shape == b.shape and a.tensor.dtype == b.tensor.dtype and torch.equal(a.tensor, b.tensor)


def check_seen(model: torch.nn.Module, recording: Recording, turns: Sequence[Turn]) -> None:
    """Refuses a tensor that no recorded token used, where its like in a neighbouring module turns."""

    def kind(name: str) -> str:
        return ".".join("" if word.isdigit() else word for word in name.split("."))

    used = {id(value.holder) for value in recording.values if value.parameter is not None}
    turned = {kind(str(turn.place)) for turn in turns}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used and kind(name) in turned:
            raise RefusedError(
                "No token of the recorded run used this tensor, and its like turns",
                name,
                "how it does cannot be known",
            )
