"""The stream before the final norm as a sum of parts, at one destination.

stream = sum over writes of tail(write) + biases + roundings; each level refines one kind of sublayer: attention's
write is sum over heads of W_O z_h, a head's sum over sources of pattern x W_O v (its subvalues) or over the coordinates
of its value (attention neurons), an MLP's write is sum over neurons of activation x column. The equations are those
of Elhage et al. 2021 (attention) and Geva et al. 2021 (neurons); tails carry post-norms, gates and multipliers.

Removing a subvalue subtracts pattern x W_O v; the pattern is not renormalised.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.parts import Columns, Group, Subvalues, UnitGrid, Vectors, joined
from mainstem.analysis.readout import before_softmax, normed, working_dtype
from mainstem.errors import CertificateError, ChoiceError, LevelRefusedError
from mainstem.model.anatomy import Write
from mainstem.model.expert_rows import ExpertRows
from mainstem.model.graph import Evaluated, LinearMap, SumNode, bias_of, evaluate, maps_to_root
from mainstem.run.moment import Moment
from mainstem.units import Unit

Level = Literal["sublayers", "heads", "subvalues", "attention_neurons", "neurons", "units"]
LEVELS: tuple[str, ...] = get_args(Level)
"""`units` refines attention to subvalues and MLPs to neurons at once."""

ATTENTION = {"heads", "subvalues", "attention_neurons", "units"}
NEURONS = {"neurons", "units"}


@dataclass(frozen=True)
class SumCertificate:
    """Whether the parts of one decomposition are the stream; made by `mainstem.analysis.certificate.certify`.

    Attributes:
        relative_error: norm of the remainder over norm of the stream.
        tolerance: the bound on it, known before the comparison.
        worst_dimension: the largest entry of the remainder over the stream's root mean square.
        failed: the first layer and part that do not hold, None if all do.
        remainder: [d_model] float64, observed minus parts.
    """

    level: str
    position: int
    parts: int
    relative_error: float
    tolerance: float
    worst_dimension: float
    holds: bool
    failed: str | None
    remainder: Float[Tensor, " d_model"]

    def require(self) -> None:
        """Raises CertificateError naming the first layer and part that fail."""
        if not self.holds:
            raise CertificateError(
                "The parts do not add up to what the model computed",
                self.failed,
                relative_error=self.relative_error,
                tolerance=self.tolerance,
            )


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Parts at one destination.

    `groups` hold the parts; `evaluated` the stream values of the run in the order of the anatomy's graph; `maps` how a
    vector added at each of its nodes reaches the stream.
    """

    level: Level
    moment: Moment
    groups: list[Group]
    evaluated: Evaluated
    maps: list[LinearMap | None]
    certificate: SumCertificate | None = None

    @property
    def position(self) -> int:
        """The destination, counted from the prompt's first token."""
        return self.moment.position

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    @cached_property
    def before_softmax(self) -> Float[Tensor, " d_vocab"]:
        """What the readout makes of the stream at the destination, before a softcap; float64 where it is a sum."""
        readout = self.moment.anatomy.readout
        x = normed(readout, self.moment.stream, None)
        return before_softmax(readout, x[None].to(working_dtype(readout)))[0].double()

    def total(self) -> Tensor:
        """The sum of all parts, [d_model] float64."""
        return torch.stack([group.total() for group in self.groups]).sum(0)


def decompose(moment: Moment, level: Level = "sublayers") -> Decomposition:
    """All parts of the stream at the moment's destination.

    Raises:
        ChoiceError: if the level is unknown.
        LevelRefusedError: if a sublayer cannot be split to it, with the reason.
    """
    if level not in LEVELS:
        raise ChoiceError("level", level, LEVELS)
    anatomy = moment.anatomy
    refused = {} if level == "units" else anatomy.refusals(level)
    if refused:
        unit, reason = next(iter(refused.items()))
        raise LevelRefusedError(f"No {level.replace('_', ' ')} at {unit}", reason=reason)
    run = evaluate(anatomy.graph, moment.writes, moment.gates)
    maps = maps_to_root(anatomy.graph, run, moment.gates)
    return Decomposition(level, moment, groups_to(moment, run, maps, level), run, maps)


def groups_to(moment: Moment, run: Evaluated, maps: list[LinearMap | None], level: Level) -> list[Group]:
    """The parts of the stream value that `maps` lead to: the one before the final norm, or one that is read."""
    groups: list[Group] = []
    for i, write in enumerate(moment.anatomy.writes):
        tail = maps[moment.anatomy.write_nodes[i]]
        if tail is not None:
            groups.extend(_write_groups(moment, i, write, tail, level))
    return join_pieces(groups + _constants(moment, run, maps), level)


def _write_groups(moment: Moment, index: int, write: Write, tail: LinearMap, level: str) -> list[Group]:
    refused = level in write.refusals or any(k in write.refusals for k in ("subvalues", "neurons"))
    node = moment.anatomy.write_nodes[index]
    found: list[Group]
    if not refused and write.attention is not None and level in ATTENTION:
        found = _attention_groups(moment, index, write, tail, level)
    elif not refused and write.neurons and level in NEURONS:
        found = [_neuron_group(moment, index, write, tail)]
    elif not refused and write.experts is not None and level in NEURONS:
        return _expert_groups(moment, write, node, tail)
    else:
        return [_whole(moment, index, write, tail)]
    if write.bias is not None:
        bias = write.bias.double().to(moment.stream.device)[None]
        found.append(_vectors([Unit.bias_of(write.unit)], "bias", bias, node, tail, write.unit))
    return found


def _vectors(
    units, kind: str, values: Tensor, node: int, tail: LinearMap, sublayer: Unit | None, bound=None
) -> Vectors:
    ones = torch.ones(len(values), dtype=torch.float64, device=values.device)
    return Vectors(units, kind, ones, node, tail, sublayer, bound, values)


def _whole(moment: Moment, index: int, write: Write, tail: LinearMap) -> Vectors:
    kind = "embedding" if write.unit.kind == "embedding" else "sublayer"
    return _vectors([write.unit], kind, moment.writes[index], moment.anatomy.write_nodes[index], tail, None)


def product_bound(matrix: Tensor, z: Tensor, dtype: torch.dtype, extra: Tensor | None = None) -> Tensor:
    """Error to expect of matrix @ z in `dtype`: sqrt(n) roundings of the sum and one of the result, plus `extra` on z.

    The probabilistic form of the standard bound (Higham and Mary 2019): gamma_n with sqrt(n) in place of n; half
    precisions accumulate in float32. Errors on the entries of z are independent, so they add in quadrature.
    """
    unit = torch.finfo(dtype).eps / 2
    inner = torch.finfo(torch.float32).eps / 2 if torch.finfo(dtype).bits < 32 else unit
    work = torch.float64 if matrix.dtype == torch.float64 else torch.float32  # a bound needs no more
    weight = matrix.to(work)
    size = weight.abs() @ (z.to(work).abs() * (inner * z.shape[-1] ** 0.5))
    if extra is not None:
        size = size + (weight.pow(2) @ extra.to(work).pow(2)).sqrt()
    return (size + unit * (weight @ z.to(work)).abs()).double()


def _attention_groups(moment: Moment, index: int, write: Write, tail: LinearMap, level: str) -> list[Group]:
    heads = moment.attention[write.attention.site]  # type: ignore[union-attr]
    assert write.projection is not None
    matrix = write.projection.columns(slice(None))
    z = moment.sources[index]
    channels = heads.core.channels.to(z.device)
    unit, node = write.unit, moment.anatomy.write_nodes[index]
    layer, nth = unit.layer, unit.nth
    assert layer is not None
    n_heads, n_sources = heads.pattern.shape
    if level == "heads":
        blocks = matrix.double()[:, channels]  # [d_model, n_heads, d_value]
        values = torch.einsum("dhj,hj->hd", blocks, z.double()[channels])
        units = [Unit.head(layer, h, nth=nth) for h in range(n_heads)]
        bound = cache(lambda: product_bound(matrix, z, write.dtype))
        return [_vectors(units, "head", values, node, tail, unit, bound)]

    @cache
    def bound() -> Tensor:
        return product_bound(matrix, z, write.dtype, _value_error(heads, channels, z))

    if level == "attention_neurons":
        width = channels.shape[1]
        grid = UnitGrid(n_heads * width, lambda i: Unit.attention_neuron(layer, i // width, i % width, nth=nth))
        columns = matrix[:, channels.reshape(-1)]
        if not bool((heads.multiplier == 1).all()):
            columns = columns.double() * heads.multiplier[channels.reshape(-1)]
        return [Columns(grid, "attention_neuron", heads.result().reshape(-1), node, tail, unit, bound, columns)]
    grid = UnitGrid(n_heads * n_sources, lambda i: Unit.subvalue(layer, i // n_sources, i % n_sources, nth=nth))
    coefficients, group = heads.pattern.reshape(-1), heads.group()
    own = (heads.pattern, heads.value, matrix, heads.multiplier, channels, group)
    return [Subvalues(grid, "attention_subvalue", coefficients, node, tail, unit, bound, *own)]


def _value_error(heads, channels: Tensor, z: Tensor) -> Tensor:
    """Error to expect of W_O's input recomputed from pattern and values."""
    sizes = heads.summed(heads.value.double().abs())
    error = sizes * (heads.uncertainty[:, None] + torch.finfo(z.dtype).eps)
    spread = torch.zeros_like(heads.multiplier)
    spread[channels.reshape(-1)] = error.reshape(-1)
    return spread * heads.multiplier.abs() + z.double().abs() * torch.finfo(z.dtype).eps


def _neuron_group(moment: Moment, index: int, write: Write, tail: LinearMap) -> Columns:
    assert write.projection is not None
    matrix = write.projection.columns(slice(None))
    activations = moment.sources[index]
    layer, nth, first = write.unit.layer, write.unit.nth, write.first_neuron
    assert layer is not None
    if write.shared_expert is None:
        grid = UnitGrid(len(activations), lambda i: Unit.ffn_neuron(layer, first + i, nth=nth))
        kind = "ffn_neuron"
    else:
        expert = write.shared_expert
        grid = UnitGrid(len(activations), lambda i: Unit.shared_neuron(layer, expert, i, nth=nth))
        kind = "expert_neuron"

    @cache
    def bound() -> Tensor:
        return product_bound(matrix, activations, write.dtype)

    return Columns(grid, kind, activations, moment.anatomy.write_nodes[index], tail, write.unit, bound, matrix)


def _expert_groups(moment: Moment, write: Write, node: int, tail: LinearMap) -> list[Group]:
    site = write.experts
    assert site is not None
    parts = moment.experts[f"{site.path}#{site.call}"]
    groups: list[Group] = []
    constant = parts.constant[0].clone()
    for rows in parts.rows:
        for row in range(len(rows.expert)):
            groups.append(_expert_group(rows, row, write, node, tail))
            if rows.bias is not None:
                constant = constant + rows.weight[0, row] * rows.bias[row].double()
    if constant.any():
        groups.append(_vectors([Unit.bias_of(write.unit)], "bias", constant[None], node, tail, write.unit))
    return groups


def _expert_group(rows: ExpertRows, row: int, write: Write, node: int, tail: LinearMap) -> Columns:
    layer, nth, expert = write.unit.layer, write.unit.nth, int(rows.expert[row])
    assert layer is not None
    matrix = rows.of(row)
    weight = rows.weight[0, row]
    coefficients = rows.hidden[row].double() * weight
    grid = UnitGrid(len(coefficients), lambda i: Unit.expert_neuron(layer, expert, i, nth=nth))

    @cache
    def bound() -> Tensor:
        return product_bound(matrix, rows.hidden[row], write.dtype) * weight.abs() * 4

    return Columns(grid, "expert_neuron", coefficients, node, tail, write.unit, bound, matrix)


def _constants(moment: Moment, run: Evaluated, maps: list[LinearMap | None]) -> list[Group]:
    """Biases that norms and additions add on the way, and the rounding of each sum, by sublayer."""
    groups: list[Group] = []
    for i, node in enumerate(moment.anatomy.graph.nodes):
        tail, owner = maps[i], moment.anatomy.owners[i]
        if tail is None or owner is None:
            continue
        bias = bias_of(node)
        if bias is not None:
            value = bias.double().to(moment.stream.device)[None]
            groups.append(_vectors([Unit.bias_of(owner)], "bias", value, i, tail, None))
        rounding = run.rounding[i]
        if isinstance(node, SumNode) and rounding is not None and rounding.any():
            groups.append(_vectors([Unit.rounding_of(owner)], "rounding", rounding, i, tail, None))
    return groups


def join_pieces(groups: list[Group], level: Level) -> list[Group]:
    """One part for each address: what a unit writes in several pieces (an adapter beside its matrix) is one part.

    Biases and roundings are joined among sublayers only; in finer levels each keeps its own place.
    """
    found: dict[object, list[Group]] = {}
    for group in groups:
        apart = level != "sublayers" and group.kind in ("bias", "rounding")
        found.setdefault(id(group) if apart else (group.kind, group.sublayer, group.units[0]), []).append(group)
    return [joined(pieces) for pieces in found.values()]
