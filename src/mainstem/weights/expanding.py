"""The path expansion of one run of an attention-only model: what the run leaves free is read, the rest refused."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.path_expansion import Layer, PathExpansion
from mainstem.analysis.readout import frozen_scale, require_linear
from mainstem.errors import CertificateError, LevelRefusedError
from mainstem.model.anatomy import Read
from mainstem.run.moment import Moment
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.tracing import Trace

TOLERANCE = 1e-4
"""Of the logits, relative to the largest."""


def path_expansion(trace: "Trace", row: int = 0) -> PathExpansion:
    """The logits of a run at every position as sums over paths through its heads.

    Raises:
        LevelRefusedError: if the model has sublayers other than attention, or a readout that is no norm and
            unembedding.
        CertificateError: if the sum is not what the model computed.
    """
    anatomy, weights = trace.model.anatomy, trace.model.weights
    require_linear(anatomy.readout)
    if anatomy.readout.softcap is not None:
        raise LevelRefusedError("No path expansion", "the readout", "a softcap bends the logits")
    sublayers = [unit for unit in anatomy.sublayers() if unit.layer is not None]
    for unit in sublayers:
        if unit.place != "attn":
            reason = "only models of nothing but attention are sums over paths of heads"
            raise LevelRefusedError("No path expansion", str(unit), reason)
    weights.require_heads()
    weights.require_one_stream()
    count = len(trace.ids(row))
    trace.run.keep(range(count), row)
    moments = [trace.run.moment(position, row) for position in range(count)]
    streams = torch.stack([moment.stream for moment in moments])
    expansion = PathExpansion(
        layers=[_layer(trace, unit, moments, row) for unit in sublayers],
        embedding=torch.stack([moment.block_inputs[0] for moment in moments]).double(),
        scale=torch.cat([frozen_scale(anatomy.readout, stream) for stream in streams]),
        readout=anatomy.readout,
        logits=torch.stack([moment.logits for moment in moments]).double(),
    )
    error = expansion.error(expansion.orders())
    if not error <= TOLERANCE:
        raise CertificateError("Paths do not sum to the logits", "path expansion", None, error, TOLERANCE)
    return expansion


def _layer(trace: "Trace", unit: Unit, moments: list[Moment], row: int) -> Layer:
    anatomy, weights = trace.model.anatomy, trace.model.weights
    heads = tuple(head for head in weights.heads if head.sublayer == unit)
    ov = weights.ov(unit)
    index = next(i for i in anatomy.writes_of(unit) if anatomy.writes[i].attention is not None)
    write, core = anatomy.writes[index], anatomy.writes[index].attention
    assert core is not None
    read = next(read for read in anatomy.reads if read.unit == unit and "value" in read.roles)
    streams = [trace.run.stream(block.layer, row) for block in anatomy.blocks if block.layer == unit.layer]
    scale = torch.ones(len(moments), dtype=torch.float64)
    if read.norm is not None:
        scale = read.norm.scale(streams[0].double())[:, 0]
    pattern = torch.zeros(len(heads), len(moments), len(moments), dtype=torch.float64)
    for position, moment in enumerate(moments):
        seen = moment.attention[core.site].pattern
        pattern[:, position, : seen.shape[1]] = seen
    constant = torch.zeros(anatomy.sizes.d_model, dtype=torch.float64)
    bias = _value_bias(trace, index, read, [head.head_index or 0 for head in heads], row)
    added = torch.einsum("hdj,hj->hd", ov.left, bias)
    return Layer(heads, pattern, ov, scale, added, constant if write.bias is None else write.bias.double())


def _value_bias(trace: "Trace", index: int, read: Read, heads: list[int], row: int) -> Float[Tensor, "head d_value"]:
    """What biases of the norm and of the value's matrix add to each head's values, at every position alike."""
    carrying, _ = trace.run.operands(index, row).side("value")
    bias = torch.zeros(len(read.weight), dtype=torch.float64)
    if read.bias is not None:
        bias = bias + read.bias.detach().to(bias)
    if read.norm is not None and read.norm.bias is not None:
        bias = bias + read.weight.detach().double() @ read.norm.bias.detach().to(bias)
    core = trace.model.anatomy.writes[index].attention
    assert core is not None
    own = [carrying.head(head, core.n_heads) for head in heads]
    constant = carrying.constant()[:, 0]
    return torch.stack(
        [matrix @ bias[used] + constant[n] for n, (used, matrix) in zip(own, carrying.matrices(own, 0), strict=True)]
    )
