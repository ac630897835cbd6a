"""The keys of neurons: of MLPs, of shared experts and of the routed experts that were chosen at the destination.

For a neuron act(g) the key is its input row, and what is explained is the pre-activation g. For a gated neuron
m = act(g) u the local linearisation act'(g) u w_gate + act(g) w_up counts twice (K . x / m is 2.0 to 2.3); the key here
is K = a w_gate + b w_up with b = integral act(s g) ds and a = u integral s act'(s g) ds over s in [0, 1], for which
K . x = m exactly, by integration by parts (integrated gradients along the ray from zero, see `ray_gradient`). The
activation of an expert's neuron is meant before the router's weight.

Limits: neurons of experts that read scaled rows of the stream, or rows of several values, have no key.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.certificate import SAFETY
from mainstem.analysis.decompose import decompose, product_bound
from mainstem.analysis.keys import Key, evaluated
from mainstem.analysis.unit_tokens import existing
from mainstem.errors import LevelRefusedError, NotChosenError, UnitError
from mainstem.model.activation import Activation, ray_gradient
from mainstem.model.anatomy import Write
from mainstem.run.moment import Moment
from mainstem.units import Unit

REMEDY = "Ask for the queries of another unit."


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a matrix that reads the stream: `result` is what the model computed, `node` what is read."""

    weight: Float[Tensor, " d_model"]
    bias: float
    result: float
    dtype: torch.dtype
    node: int
    stream_node: int


@dataclass(frozen=True, eq=False)
class Neuron:
    """A neuron at a destination: its number among those of its `activation`, its rows, and what it was."""

    place: int
    activation: Activation
    rows: list[Row]
    observed: float
    dtype: torch.dtype

    @property
    def quantity(self) -> tuple[str, float]:
        """What its key sums to, and what the model computed for it."""
        return ("pre-activation", self.rows[0].result) if len(self.rows) == 1 else ("activation", self.observed)


def neuron_of(moment: Moment, unit: Unit) -> Neuron:
    """A neuron by its address.

    Raises:
        UnitError: if the model has no such neuron; NotChosenError: if its expert was not chosen at the destination.
        LevelRefusedError: if how it comes from what reads the stream is not understood.
    """
    if unit.expert is not None and not unit.shared:
        return _experts_neuron(moment, unit)
    anatomy = moment.anatomy
    index, place = _neuron_write(moment, unit)
    write = anatomy.writes[index]
    made = write.activation
    if made is None:
        raise _refused(unit, "its activation was not seen")
    rows = []
    for number, column in _entries(unit, made, place):
        read = anatomy.reads[made.reads[number]]
        bias = 0.0 if read.bias is None else float(read.bias[column])
        result = float(moment.reads[made.reads[number]].reshape(-1)[column])
        rows.append(Row(read.weight[column], bias, result, read.dtype, read.node, read.stream_node))
    return Neuron(place, made, rows, float(moment.sources[index][place]), write.dtype)


def _neuron_write(moment: Moment, unit: Unit) -> tuple[int, int]:
    """The write that a neuron of an MLP or of a shared expert belongs to, and its number there."""
    assert unit.neuron is not None
    for i in moment.anatomy.writes_of(unit.sublayer):
        write = moment.anatomy.writes[i]
        if "neurons" in write.refusals:
            raise LevelRefusedError(f"No neurons at {write.unit}", None, write.refusals["neurons"], REMEDY)
        if write.neurons and write.projection is not None and write.shared_expert == unit.expert:
            place = unit.neuron - write.first_neuron
            if 0 <= place < write.projection.n_in:
                return i, place
    raise _missing(moment, unit)


def _missing(moment: Moment, unit: Unit) -> UnitError:
    return UnitError(f"The model has no neuron {unit}", None, existing(decompose(moment, "units"), unit))


def _entries(unit: Unit, made: Activation, place: int) -> list[tuple[int, int]]:
    """Of which of the activation's reads, and which entry of it, a neuron is made."""
    try:
        entries = made.entries
    except LevelRefusedError as error:
        raise _refused(unit, error.reason) from error
    return list(zip(entries.read[place].tolist(), entries.column[place].tolist(), strict=True))


def _experts_neuron(moment: Moment, unit: Unit) -> Neuron:
    """A neuron of a routed expert; `rows` are those of the expert's own matrices."""
    assert unit.neuron is not None
    write = _experts_write(moment, unit)
    site = write.experts
    assert site is not None
    chosen = {
        int(e): rows.hidden[row]
        for rows in moment.experts[f"{site.path}#{site.call}"].rows
        for row, e in enumerate(rows.expert.tolist())
    }
    if unit.expert not in chosen:
        there = ", ".join(map(str, sorted(chosen))) or "none"
        what = f"Expert {unit.expert} of {unit.sublayer} was not chosen"
        raise NotChosenError(what, f"position {moment.position}", f"Chosen there: {there}.")
    read = next((read for read in moment.anatomy.expert_reads if read.site == site), None)
    found = (
        {}
        if read is None
        else {
            one.number: (one, row)
            for one in moment.expert_reads[site]
            for row, expert in enumerate(one.rows.expert.tolist())
            if expert == unit.expert
        }
    )
    if read is None or not found:
        raise _refused(unit, "what the experts read is no one value of the stream as it is")
    made = next(iter(found.values()))[0].activation
    rows = []
    for number, column in _entries(unit, made, unit.neuron):
        if number not in found:
            raise _refused(unit, "one of the matrices that it comes from was not seen")
        one, row = found[number]
        bias = 0.0 if one.rows.bias is None else float(one.rows.bias[row, column])
        result = one.result[row, column]
        rows.append(Row(one.rows.of(row)[column], bias, float(result), result.dtype, read.node, read.stream_node))
    hidden = chosen[unit.expert][unit.neuron]
    return Neuron(unit.neuron, made, rows, float(hidden), hidden.dtype)


def _experts_write(moment: Moment, unit: Unit) -> Write:
    assert unit.expert is not None and unit.neuron is not None
    for write in (moment.anatomy.writes[i] for i in moment.anatomy.writes_of(unit.sublayer)):
        if "neurons" in write.refusals:
            raise LevelRefusedError(f"No neurons at {write.unit}", None, write.refusals["neurons"], REMEDY)
        if write.experts is not None and unit.expert < write.n_experts and unit.neuron < write.expert_width:
            return write
    raise _missing(moment, unit)


def _refused(unit: Unit, reason: str | None) -> LevelRefusedError:
    return LevelRefusedError(f"No key for {unit}", None, reason, REMEDY)


def neuron_key(moment: Moment, unit: Unit) -> Key:
    """The key of a neuron at the moment's destination.

    Raises:
        UnitError: if there is no such neuron, or its expert was not chosen.
        LevelRefusedError: if how it comes from what reads the stream is not understood.
    """
    neuron = neuron_of(moment, unit)
    first = neuron.rows[0]
    if any(row.node != first.node for row in neuron.rows):
        raise _refused(unit, "its two rows read different stream values")
    point = torch.tensor([row.result for row in neuron.rows], dtype=torch.float64, device=first.weight.device)
    quantity, observed = neuron.quantity
    slopes, slack = torch.ones_like(point), 0.0
    if len(neuron.rows) > 1:
        slopes, slack = ray_gradient(lambda points: neuron.activation.of(neuron.place, points), point)
        slack += 8 * max(torch.finfo(neuron.dtype).eps, torch.finfo(torch.float32).eps) * abs(observed)
    x = evaluated(moment).values[first.node][0].double()
    direction, constant = torch.zeros_like(x), 0.0
    for slope, row in zip(slopes.tolist(), neuron.rows, strict=True):
        direction = direction + slope * row.weight.double()
        constant += slope * row.bias
        slack += abs(slope) * _row_error(row, x)
    return Key(unit, "value", quantity, moment, first.node, first.stream_node, direction, constant, observed, slack)


def _row_error(row: Row, x: Tensor) -> float:
    """Error to expect of a row's result, the norm's own rounding included."""
    extra = x.abs() * 8 * max(torch.finfo(row.dtype).eps, torch.finfo(torch.float32).eps)
    return SAFETY * float(product_bound(row.weight[None], x, row.dtype, extra).norm())
