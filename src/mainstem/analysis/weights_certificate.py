"""Do factored weights give what the model computes? Rebuilt from them and a run's streams, norm scales put back.

`sides`: every query, key and value vector that attention received, from the stream before the norm; the scale of the
read's norm, and of the norm of queries or keys, is that of the run, and biases are added. `writes`: what a sublayer
added to the stream, from the heads' columns and their own results; the scale of a norm after the sublayer is free,
because one number is left out there. A forgotten gain, a head that reads another's keys, a missing centring or a wrong
rotary position is an error of the size of what is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.certificate import Check
from mainstem.analysis.stream_weights import StreamWeights
from mainstem.model.anatomy import Read
from mainstem.model.graph import Evaluated, NormNode, evaluate, maps_to, writes_behind
from mainstem.model.norms import PROBE
from mainstem.model.operands import OperandMap
from mainstem.run.moment import Moment
from mainstem.run.operands import AttentionOperands
from mainstem.units import Unit

SLACK = 50.0
"""How many roundings of the run's dtype are allowed, relative to what is compared."""


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of one prompt: the moment of each position, in order, and attention's operands of the sublayer."""

    weights: StreamWeights
    unit: Unit
    operands: AttentionOperands
    moments: Sequence[Moment]

    @cached_property
    def streams(self) -> list[Evaluated]:
        """The stream at each position."""
        return [evaluate(moment.anatomy.graph, moment.writes, moment.gates) for moment in self.moments]


def check_weights(weights: StreamWeights, unit: Unit, operands: AttentionOperands, moments: Sequence[Moment]) -> Check:
    """The weights of an attention sublayer's heads against a run.

    Args:
        weights: of the model.
        unit: the sublayer.
        operands: of the run, behind that sublayer.
        moments: of the run, one for each position, from the first.

    Raises:
        LevelRefusedError: if the heads' weights cannot be had.
    """
    run = _Run(weights, unit, operands, moments)
    roles = ["value"] if unit in weights.qk_refusals else ["query", "key", "value"]
    errors = {role: _side_error(run, role) for role in roles}
    write_error = _write_error(run)
    if write_error is not None:
        errors["write"] = write_error
    dtype = weights.anatomy.dtype
    tolerance = SLACK * max(torch.finfo(dtype).eps, PROBE)
    worst = max(errors, key=lambda name: errors[name])
    holds = errors[worst] <= tolerance
    return Check(len(errors), errors[worst], tolerance, holds, None if holds else f"{unit} {worst}")


def _side_error(run: _Run, role: str) -> float:
    """Relative error of all vectors of a role, rebuilt at all positions."""
    carrying, number = run.operands.side(role)
    read, core = run.weights.anatomy.reads[number], run.weights.anatomy.writes[run.operands.write].attention
    assert core is not None
    own = [carrying.head(head, core.n_heads) for head in range(core.n_heads)]
    factor = run.operands.scaling if role == "query" else 1.0
    values = run.weights.value(run.unit) if role == "value" else None
    read_at = [_stream_read(values, read) for values in run.streams]
    added = carrying.linear(_bias(read).expand(len(read_at), -1)) + carrying.constant()
    norms, last, off, size = _norm_scales(carrying), len(run.moments) - 1, 0.0, 0.0
    for moment, (x, scale) in zip(run.moments, read_at, strict=True):
        place = moment.position
        rows = getattr(run.weights, role)(run.unit, place, last) if values is None else values
        rebuilt = norms[own, place, None] * scale / factor * (rows @ x) + added[own, place]
        received = carrying.received[own, place]
        off += float((rebuilt - received).pow(2).sum())
        size += float(received.pow(2).sum())
    return (off / size) ** 0.5 if size else 0.0


def _norm_scales(carrying: OperandMap) -> Float[Tensor, "n_heads pos"]:
    """The scales of the norm on the way, 1 where there is none, by what the map makes of any rows with and without."""
    rows = carrying.probe()
    with_scale, without = carrying.linear(rows), carrying.unscaled().linear(rows)
    return (with_scale * without).sum(-1) / without.square().sum(-1)


def _stream_read(stream: Evaluated, read: Read) -> tuple[Tensor, float]:
    """The stream before a read's norm, and the norm's scale there."""
    x = stream.values[read.stream_node][0].double()
    return x, 1.0 if read.norm is None else float(read.norm.scale(x))


def _bias(read: Read) -> Float[Tensor, " row"]:
    """What the norm's bias and the matrix's own add to a read's result."""
    bias = torch.zeros(len(read.weight), dtype=torch.float64, device=read.weight.device)
    if read.bias is not None:
        bias = bias + read.bias.to(bias)
    if read.norm is not None and read.norm.bias is not None:
        bias = bias + read.weight.detach().double() @ read.norm.bias.detach().to(bias)
    return bias


def _write_error(run: _Run) -> float | None:
    """Relative error of what the sublayer wrote at the last position; None where a norm of the run is in between."""
    moment, anatomy = run.moments[-1], run.weights.anatomy
    core = anatomy.writes[run.operands.write].attention
    assert core is not None
    if any(step.groups is not None for step in core.steps):
        return None
    graph, indices = anatomy.graph, anatomy.writes_of(run.unit)
    values = run.streams[-1]
    results = moment.attention[core.site].result()
    rebuilt = torch.einsum("hdj,hj->d", run.weights.outputs(run.unit), results.to(torch.float64))
    written = torch.zeros_like(rebuilt)
    normed = False
    for i in indices:
        node = anatomy.write_nodes[i]
        end = next(n for n in anatomy.spine if i in writes_behind(graph, n))
        tail = maps_to(graph, end, values, moment.gates, node)[node]
        assert tail is not None
        normed = normed or any(isinstance(n, NormNode) for n in graph.nodes[node : end + 1])
        bias = anatomy.writes[i].bias
        value = moment.writes[i].double() - (0 if bias is None else bias.to(written)[None])
        written = written + tail(value[None])[0, 0]
    factor = float((written @ rebuilt) / rebuilt.pow(2).sum()) if normed else 1.0
    return float((written - factor * rebuilt).norm() / written.norm())
