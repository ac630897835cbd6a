"""Which key a unit of a run has, by its address: the neuron's, or one side of an attention value's head.

What has no key, or reads no one direction of the stream at the destination, is refused here with the reason.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.analysis.attribution import functional
from mainstem.analysis.decompose import decompose
from mainstem.analysis.keys import SIDES, HeadReading, Key, evaluated, head_reading, pattern_key, value_key
from mainstem.analysis.neuron_keys import neuron_key
from mainstem.analysis.parts import pull_back
from mainstem.analysis.unit_tokens import existing
from mainstem.errors import ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.explain.targeting import chosen_target
from mainstem.targets import Target
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.tracing import Trace

ONE_DIRECTION = {"ffn_neuron": "value", "expert_neuron": "value", "attention_subvalue": "query"}
"""The kinds of unit that read one direction of the stream at the destination, and the side of their key that does."""

NAME_ONE = "Name a neuron (L27N846), or a head and the source that it meets (L23H4@3)."
MANY_DIRECTIONS = {
    "head": ("its query, key and value each read d_head directions", NAME_ONE),
    "attention_neuron": ("it reads the values of its sources, not the destination", "`Trace.queries` lists those."),
    "sublayer": ("it reads many", NAME_ONE),
}
"""Why other kinds have no one direction, and what to do."""


def key_of(trace: "Trace", unit: Unit, position: int, side: str, target, row: int) -> tuple[Key, HeadReading | None]:
    """The key of a value unit, and, for an attention value, the reading of its head."""
    if side not in SIDES:
        raise ChoiceError("side", side, SIDES)
    here = trace.run.moment(position, row)
    if unit.kind in ("ffn_neuron", "expert_neuron"):
        if side != "value":
            raise UsageError(f"{unit} is a neuron, and has no {side} side", side, "Leave out the side.")
        return neuron_key(here, unit), None
    if unit.kind not in ("attention_subvalue", "attention_neuron") or unit.source is None:
        raise UnitError(
            f"{unit} has no one key",
            None,
            "Name a neuron (L24N1005), a head's source (L23H4@3) or one entry of it (L23H4.17@3).",
        )
    reading = _reading(trace, unit, position, row)
    try:
        if side != "value":
            return pattern_key(reading, side), reading  # type: ignore[arg-type]
        direction = None if unit.kind == "attention_neuron" else _direction(trace, reading, target, position, row)
        return value_key(reading, direction), reading
    except LevelRefusedError as error:
        raise LevelRefusedError(f"{error.what} of {unit}", error.where, error.reason, error.remedy) from error


def named_unit(direction: object) -> Unit | None:
    """The unit that a direction is named by: a unit or its address, and not a file or numbers."""
    if not isinstance(direction, str):
        return direction if isinstance(direction, Unit) else None
    try:
        return Unit.parse(direction)
    except UnitError:
        return None


def input_key(trace: "Trace", unit: Unit, position: int = -1, row: int = 0) -> Key:
    """The key of a unit that reads one direction of the stream at the destination: a neuron, or a head's query.

    A head meets a source (L23H4@3): what its query reads there, the source's key as it is, is what it looks for.

    Raises:
        UnitError: if there is no such unit, or it reads no one direction or, because it is off, none at all.
        LevelRefusedError: if it has no key.
    """
    if unit.kind not in ONE_DIRECTION:
        reason, remedy = MANY_DIRECTIONS.get(unit.kind, ("it writes", NAME_ONE))
        raise UnitError(f"{unit} reads no one direction of the stream", reason, remedy)
    key, _ = key_of(trace, unit, position, ONE_DIRECTION[unit.kind], None, row)
    if not key.direction.any():
        raise UnitError(
            f"{unit} is off", f"position {key.moment.position}", "It reads nothing there; ask at another position."
        )
    return key


def input_target(key: Key) -> Target:
    """What a unit reads, as a direction in the stream."""
    return Target(direction=tuple(key.in_stream().tolist()), text=f"input of {key.unit}")


def input_note(key: Key) -> str:
    """Where in the stream the unit itself reads its direction, and what it gets there."""
    there = float(key.in_stream() @ evaluated(key.moment).values[key.stream_node][0].double())
    return (
        f"{key.unit} reads this direction in the stream before {key.unit.sublayer}, where the inner product is "
        f"{there:.4g} ({key.quantity} {key.observed:.4g}); what is explained is the final stream, to which "
        f"{key.unit.sublayer} and what follows it have added."
    )


def _reading(trace: "Trace", unit: Unit, position: int, row: int) -> HeadReading:
    anatomy = trace.model.anatomy
    indices = [i for i in anatomy.writes_of(unit.sublayer) if anatomy.writes[i].attention is not None]
    if not indices:
        reasons = [w.refusals["subvalues"] for w in anatomy.writes if w.unit == unit.sublayer and w.refusals]
        if not reasons:
            there = existing(decompose(trace.run.moment(position, row), "units"), unit)
            raise UnitError(f"The model has no sublayer {unit.sublayer}", None, there)
        raise LevelRefusedError(f"No subvalues at {unit.sublayer}", reason=reasons[0])
    here = trace.run.moment(position, row)
    core = anatomy.writes[indices[0]].attention
    assert core is not None and unit.head_index is not None and unit.source is not None
    width = core.channels.shape[1]
    if unit.head_index >= core.n_heads or unit.source >= here.n_sources or (unit.neuron or 0) >= width:
        entries = f"A head's value has {width} entries. " if unit.neuron is not None else ""
        there = existing(decompose(here, "units"), unit)
        raise UnitError(f"The run has no unit {unit}", None, entries + there)
    if float(here.attention[core.site].pattern[unit.head_index, unit.source]) == 0.0:
        raise UnitError(
            f"{unit} has no weight", f"position {here.position}", "The destination does not see the source."
        )
    there = trace.run.moment(unit.source, row)
    return head_reading(here, there, trace.run.operands(indices[0], row), unit)


def _direction(trace: "Trace", reading: HeadReading, target, position: int, row: int) -> Tensor:
    """What the target's logit reads of attention's write at the destination."""
    made = decompose(reading.here, "sublayers")
    wanted = chosen_target(trace, target, (), position, row)
    tail = made.maps[trace.model.anatomy.write_nodes[reading.operands.write]]
    if tail is None:
        raise LevelRefusedError("No direct effect", str(reading.unit), "its write does not reach the final stream")
    return pull_back(tail, functional(made, wanted, "direct").direction)


def with_source(trace: "Trace", unit: Unit, position: int, row: int) -> Unit:
    """The unit itself; for an attention neuron that is summed over sources, the source that gives it most."""
    if unit.kind != "attention_neuron" or unit.source is not None:
        return unit
    here = trace.run.moment(position, row)
    write = next(w for w in here.anatomy.writes if w.unit == unit.sublayer and w.attention is not None)
    assert write.attention is not None and unit.head_index is not None
    heads = here.attention[write.attention.site]
    values = heads.value[heads.group()[unit.head_index], :, unit.neuron].double()
    return replace(unit, source=int((heads.pattern[unit.head_index] * values).abs().argmax()))
