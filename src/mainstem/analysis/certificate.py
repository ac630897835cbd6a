"""Certificates: the parts add up to what the model computed, and what was read is what the anatomy says.

`sum`: the parts against the observed stream before the final norm; each sublayer's parts against its observed write;
and the stream that enters each block against the observed one, so that a failure has a place. `reads`: every query,
key, value, gate and up projection recomputed from the stream value, norm and matrix that the anatomy names, against
the observed one. (`labels`, which needs interventions, is in `mainstem.run.labels`.)

Tolerances are error bounds from the dtypes and the sizes of the terms, set before anything is compared: the
probabilistic rounding bound of each product (see `product_bound`), of each norm and of each factor on the way, carried
to the stream like the parts themselves, added in quadrature, times `SAFETY`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.analysis.decompose import Decomposition, SumCertificate, product_bound
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import logits_of, normed
from mainstem.model.anatomy import Anatomy
from mainstem.model.graph import Gates, LinearMap, NormNode, SumNode, stream_values
from mainstem.units import Unit

SAFETY = 4.0
FLOOR = 1e-12


@dataclass(frozen=True)
class Check:
    """One comparison: how many things, the worst relative error, the tolerance there, and whether all hold."""

    checked: int
    worst: float
    tolerance: float
    holds: bool
    where: str | None = None


def certify(decomposition: Decomposition) -> SumCertificate:
    """The sum certificate of a decomposition."""
    moment = decomposition.moment
    observed = moment.stream.double()
    remainder = observed - decomposition.total()
    size = float(observed.norm())
    error = float(remainder.norm()) / size
    tolerance = max(FLOOR, SAFETY * float(_expected_error(decomposition).norm()) / size)
    failed = _first_failure(decomposition)
    if failed is None and not error <= tolerance:
        failed = "the stream before the final norm"
    return SumCertificate(
        level=decomposition.level,
        position=decomposition.position,
        parts=len(decomposition),
        relative_error=error,
        tolerance=tolerance,
        worst_dimension=float(remainder.abs().max() / observed.pow(2).mean().sqrt()),
        holds=failed is None,
        failed=failed,
        remainder=remainder,
    )


def _pieces(decomposition: Decomposition) -> list[Group]:
    return [piece for group in decomposition.groups for piece in group.pieces]


def _spread(tail: LinearMap, bound: Tensor) -> Tensor:
    """A bound carried to the stream."""
    out = torch.zeros_like(bound)
    if tail.diag is not None:
        out = out + tail.diag[0].abs() * bound
    if tail.left is not None and tail.right is not None:
        out = out + tail.left[0].abs() @ (tail.right[0].abs().T @ bound)
    return out


def _expected_error(decomposition: Decomposition) -> Tensor:
    """[d_model]: the errors to expect, in quadrature."""
    moment, run = decomposition.moment, decomposition.evaluated
    squares = torch.zeros_like(moment.stream, dtype=torch.float64)
    for piece in _pieces(decomposition):
        if piece.bound is not None:
            squares += _spread(piece.tail, piece.bound()).pow(2)
    for i, node in enumerate(moment.anatomy.graph.nodes):
        tail = decomposition.maps[i]
        if tail is not None and not exact_node(node):
            squares += _spread(tail, run.values[i][0].double().abs() * node_rounding(node)).pow(2)
    return squares.sqrt()


def exact_node(node) -> bool:
    """Whether the node's arithmetic is reproduced bit by bit: a plain sum, or a write."""
    if isinstance(node, NormNode):
        return False
    if isinstance(node, SumNode):
        plain = all(t.gate is None and isinstance(t.factor, float) and t.factor == 1.0 for t in node.terms)
        return plain and len(node.terms) == 2 and node.bias is None
    return True


def node_rounding(node) -> float:
    """Rounding of a norm or factor: norms compute in float32 at best, and round a few times."""
    if isinstance(node, NormNode):
        return 4 * max(torch.finfo(node.dtype).eps, torch.finfo(torch.float32).eps)
    return 2 * torch.finfo(node.dtype).eps


def _first_failure(decomposition: Decomposition) -> str | None:
    """The first block whose entering stream is not the observed one, or sublayer whose parts are not its write."""
    moment, run = decomposition.moment, decomposition.evaluated
    bad = _bad_sublayers(decomposition)
    for block, observed in zip(moment.anatomy.blocks, moment.block_inputs, strict=True):
        expected = run.values[block.input_node][0].double()
        unit = 16 * len(moment.anatomy.graph.nodes) ** 0.5 * torch.finfo(observed.dtype).eps
        unit = max(unit, 64 * torch.finfo(torch.float32).eps)
        if not float((expected - observed.double()).norm()) <= unit * float(expected.norm()):
            return f"the stream that enters block {block.layer} ({block.path})"
        for unit_ in (u for u in bad if u.layer == block.layer):
            return f"the {decomposition.level} of {unit_}"
    return f"the {decomposition.level} of {bad[0]}" if bad else None


def _bad_sublayers(decomposition: Decomposition) -> list[Unit]:
    moment = decomposition.moment
    found = []
    pieces = _pieces(decomposition)
    refined = dict.fromkeys(piece.sublayer for piece in pieces if piece.sublayer is not None)
    for unit in refined:
        members = [piece for piece in pieces if piece.sublayer == unit]
        index = [i for i in moment.anatomy.writes_of(unit) if _is_refined(decomposition, i)]
        if not index:
            continue
        observed = torch.stack([moment.writes[i][0].double() for i in index]).sum(0)
        total = torch.stack([group.written for group in members]).sum(0)
        bound = torch.stack([g.bound().pow(2) for g in members if g.bound is not None] or [observed * 0]).sum(0).sqrt()
        slack = SAFETY * float(bound.norm()) + FLOOR * float(observed.norm())
        if not float((observed - total).norm()) <= slack:
            found.append(unit)
    return found


def _is_refined(decomposition: Decomposition, index: int) -> bool:
    """Whether a write of a refined sublayer was itself taken apart."""
    node = decomposition.moment.anatomy.write_nodes[index]
    whole = any(
        piece.sublayer is None and piece.kind == "sublayer" and piece.node == node for piece in _pieces(decomposition)
    )
    return decomposition.maps[node] is not None and not whole


def check_reads(decomposition: Decomposition) -> Check:
    """Every read of the anatomy, and what each expert met there reads, recomputed at the destination."""
    moment, run = decomposition.moment, decomposition.evaluated
    found: list[tuple[str, float, float]] = []
    for read, observed in zip(moment.anatomy.reads, moment.reads, strict=True):
        x = run.values[read.node][0].double()
        errors = _product_error(read.weight, read.bias, x, observed, read.dtype)
        found.append((f"{'/'.join(read.roles)} of {read.unit} ({read.module})", *errors))
    for read in moment.anatomy.expert_reads:
        x = run.values[read.node][0].double()
        for made in moment.expert_reads[read.site]:
            for row, expert in enumerate(made.rows.expert.tolist()):
                bias = None if made.rows.bias is None else made.rows.bias[row]
                errors = _product_error(made.rows.of(row), bias, x, made.result[row], made.result.dtype)
                found.append((f"expert {expert} of {read.unit} ({read.site.path})", *errors))
    found.append(("the readout: final norm, unembedding, scale and softcap", *_readout_error(decomposition)))
    return summary(found)


def _product_error(
    weight: Tensor, bias: Tensor | None, x: Tensor, observed: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """What a matrix gave in the run against weight @ x + bias: relative error and its bound."""
    expected = weight.double() @ x
    if bias is not None:
        expected = expected + bias.double()
    slack = x.abs() * 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    bound = SAFETY * float(product_bound(weight, x, dtype, slack).norm())
    size = float(observed.double().norm()) or 1.0
    return float((expected - observed.double()).norm()) / size, bound / size


def summary(found: list[tuple[str, float, float]]) -> Check:
    """One check of (name, relative error, tolerance) triples; the place is the first that does not hold."""
    if not found:
        return Check(0, 0.0, 0.0, True)
    failed = [name for name, error, bound in found if not error <= bound]
    _, worst, tolerance = max(found, key=lambda row: row[1] if row[1] == row[1] else float("inf"))
    return Check(len(found), worst, tolerance, not failed, failed[0] if failed else None)


def _readout_error(decomposition: Decomposition) -> tuple[float, float]:
    """The readout applied to the observed stream against the model's own logits: relative error and its bound."""
    moment = decomposition.moment
    readout, observed = moment.anatomy.readout, moment.logits.double()
    stream = moment.stream[None] if readout.opaque is not None else moment.stream[None].double()
    expected = logits_of(readout, stream)[0].double()
    size = float(observed.norm())
    dtypes = (moment.logits.dtype, readout.unembedding.dtype, torch.float32)
    bound = 4 * SAFETY * max(torch.finfo(dtype).eps for dtype in dtypes)
    if readout.opaque is None:  # logits are sums of terms that may be larger than they are
        x = normed(readout, moment.stream, None)
        spread = float(readout.unembedding.float().norm()) * float(x.pow(2).mean().sqrt()) * abs(readout.scale)
        bound *= max(1.0, spread / size)
    return float((expected - observed).norm()) / size, bound


def stream_errors(anatomy: Anatomy, writes: list[Tensor], gates: Gates, stream: Tensor) -> Tensor:
    """Relative error of the sum of all writes at every position, [pos]: whole sublayers, in the model's own dtype.

    Args:
        anatomy: of the model.
        writes: for each write [pos, d_model].
        gates: for each gate [pos, 1 or d_model].
        stream: [pos, d_model] what the model computed.
    """
    expected = stream_values(anatomy.graph, writes, gates)
    size = stream.double().norm(dim=-1).clamp_min(1e-300)
    return (expected.double() - stream.double()).norm(dim=-1) / size
