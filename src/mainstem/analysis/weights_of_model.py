"""Which heads' weights can be had: the factored weights of a model, with what is refused and what is left out."""

from collections.abc import Callable

from mainstem.analysis.scaleless import GATED
from mainstem.analysis.stream_weights import Operands, StreamWeights
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, Write
from mainstem.model.operands import OperandMap
from mainstem.run.operands import AttentionOperands
from mainstem.units import Unit


def stream_weights(anatomy: Anatomy, record: Callable[[int], Operands], positions: int) -> StreamWeights:
    """The weights of a model as its stream sees them.

    Args:
        anatomy: of the model.
        record: the operands of every attention, of a run on so many positions.
        positions: how many the first run has.
    """
    operands = record(positions)
    heads: list[Unit] = []
    refusals: dict[Unit, LevelRefusedError] = {}
    qk_refusals: dict[Unit, LevelRefusedError] = {}
    notes: dict[str, list[Unit]] = {}
    for i, write in enumerate(anatomy.writes):
        if write.unit in refusals or any(h.sublayer == write.unit for h in heads):
            continue
        if write.attention is None:
            if "heads" in write.refusals:
                refusals[write.unit] = _refused(write, write.refusals["heads"])
            continue
        found = operands[i]
        refusal = found if isinstance(found, LevelRefusedError) else _refusal(write, found)
        if refusal is not None:
            refusals[write.unit] = refusal
            continue
        assert isinstance(found, AttentionOperands)
        refusal = _side_refusal(write, found, "query") or _side_refusal(write, found, "key")
        if refusal is not None:
            qk_refusals[write.unit] = refusal
        layer, nth = write.unit.layer, write.unit.nth
        assert layer is not None
        heads += [Unit.head(layer, head, nth=nth) for head in range(write.attention.n_heads)]
        for note in _notes(write, found):
            notes.setdefault(note, []).append(write.unit)
    sentences = tuple(f"{note} ({units[0]} to {units[-1]}, {len(units)} sublayers)." for note, units in notes.items())
    return StreamWeights(anatomy, record, tuple(heads), refusals, qk_refusals, sentences, {positions: operands})


def _refusal(write: Write, operands: AttentionOperands) -> LevelRefusedError | None:
    """Why the heads of a write have no W_OV."""
    reason = write.refusals.get("heads")
    if reason is None and write.projection is None:
        reason = "its output matrix is not known"
    if reason is None and write.attention is not None and any(s.gate_site is not None for s in write.attention.steps):
        reason = f"{GATED} on the way from attention to the output matrix"
    return _side_refusal(write, operands, "value") if reason is None else _refused(write, reason)


def _refused(write: Write, reason: str) -> LevelRefusedError:
    return LevelRefusedError(f"No weights of heads at {write.unit}", None, reason)


def _side_refusal(write: Write, operands: AttentionOperands, role: str) -> LevelRefusedError | None:
    try:
        operands.side(role)[0].unscaled()
    except LevelRefusedError as error:
        return LevelRefusedError(f"No {role} rows of heads at {write.unit}", None, error.reason)
    return None


def _notes(write: Write, operands: AttentionOperands) -> list[str]:
    notes = []
    sides = [(role, operands.maps if role == "value" else operands.sides) for role in ("query", "key", "value")]
    normed = [role for role, maps in sides if isinstance(found := maps.get(role), OperandMap) and found.normed]
    if normed:
        names = " and ".join({"query": "queries", "key": "keys", "value": "values"}[role] for role in normed)
        notes.append(f"The norm of {names} keeps its gain and loses its scale")
    if operands.capped:
        notes.append("Large scores are bent before the softmax; W_QK is that of small ones")
    if write.attention is not None and any(step.groups is not None for step in write.attention.steps):
        notes.append("The norm between attention and its output matrix keeps its gain and loses its scale")
    return notes
