"""What vectors of the stream say in the vocabulary, against a null; and the sigmoid of a single token.

Under the frozen norm values before the softmax add exactly, bs(x + v) = bs(x) + bs(v) (Yu et al. 2023, section 3), so a
vector promotes and suppresses tokens by itself: its logits, centred, because a shift common to all tokens is seen by no
probability. Any direction has a largest logit, so it is compared with that of random directions of the same norm
(uniform on the sphere): logits are linear in the vector, so one draw serves all vectors, scaled by their norms.

Cost: a product with the unembedding for each vector, and one for all random directions.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.bases import entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import before_softmax, frozen_scale, normed, require_linear, working_dtype
from mainstem.errors import LevelRefusedError, UnitError
from mainstem.units import Unit

DIRECTIONS = 200
LEVEL = 0.99
"""A unit is beyond the null if it exceeds this part of the random directions."""

CURVE = 81


@dataclass(frozen=True, eq=False)
class Part:
    """One part by its address: the group that it is in, the coefficient, and its vector in the stream."""

    unit: Unit
    group: Group
    index: int
    coefficient: float
    vector: Float[Tensor, " d_model"]


@dataclass(frozen=True, eq=False)
class Spread:
    """Largest centred logits of random directions of norm 1, sorted; each direction and its opposite count."""

    largest: Float[Tensor, " direction"]

    def threshold(self, size: float) -> float:
        """What `LEVEL` of the random directions of a norm stay below."""
        return float(self.largest.quantile(LEVEL)) * size


def find_part(decomposition: Decomposition, unit: Unit) -> Part | None:
    """The part of a decomposition that has an address, summed if several have it; None if none has."""
    found: Part | None = None
    for group in decomposition.groups:
        if group.kind != unit.kind or (group.sublayer is not None and group.sublayer != unit.sublayer):
            continue
        for index in group.places(unit):
            vector = group.vectors(torch.tensor([index], device=group.coefficients.device))[0]
            vector = vector if found is None else found.vector + vector
            found = Part(unit, group, index, float(group.coefficients[index]), vector)
    return found


def require_part(decomposition: Decomposition, unit: Unit) -> Part:
    """The part that has an address.

    Raises:
        UnitError: if there is none; says which there are.
    """
    found = find_part(decomposition, unit)
    if found is None:
        raise UnitError(f"The model has no unit {unit} here", None, existing(decomposition, unit))
    return found


def existing(decomposition: Decomposition, unit: Unit) -> str:
    """Which units there are in the layer of an address, or which layers: a sentence for an error's remedy."""
    layers = [u.layer for u in decomposition.moment.anatomy.sublayers() if u.layer is not None]
    if unit.layer is not None and unit.layer > max(layers, default=-1):
        return f"Its layers go from L0 to L{max(layers, default=0)}."
    near = [
        group
        for group in decomposition.groups
        if group.units[0].layer == unit.layer and group.kind not in ("bias", "rounding")
    ]
    ranges = [
        str(group.units[0]) if len(group) == 1 else f"{group.units[0]} to {group.units[len(group) - 1]}"
        for group in [g for g in near if g.kind == unit.kind] or near
    ]
    shown = ", ".join(ranges[:6]) + (", ..." if len(ranges) > 6 else "")
    return (
        f"There {'is' if len(ranges) == 1 else 'are'} {shown}." if ranges else "Ask `mainstem anatomy` what there is."
    )


def centred_logits(decomposition: Decomposition, vectors: Float[Tensor, "top d_model"]) -> Float[Tensor, "top d_vocab"]:
    """What vectors add to the logits, before a softcap and less their mean, under the frozen norm.

    Raises:
        LevelRefusedError: if the readout is not a norm and an unembedding.
    """
    logits = alone(decomposition, vectors)
    return logits - logits.mean(-1, keepdim=True)


def alone(decomposition: Decomposition, vectors: Float[Tensor, "top d_model"]) -> Float[Tensor, "top d_vocab"]:
    """bs(v): what vectors add to the values before the softmax, under the frozen norm."""
    readout = decomposition.moment.anatomy.readout
    require_linear(readout)
    scale = frozen_scale(readout, decomposition.moment.stream)
    x = normed(readout, vectors, scale, vectors=True).to(working_dtype(readout))
    return (x * readout.scale) @ readout.unembedding.to(x.dtype).T


def spread(decomposition: Decomposition, directions: int = DIRECTIONS, seed: int = 0) -> Spread:
    """The largest centred logits of random directions of norm 1."""
    stream = decomposition.moment.stream
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(directions, len(stream), generator=generator, dtype=torch.float64)
    drawn = (drawn / drawn.norm(dim=-1, keepdim=True)).to(stream.device)
    largest = []
    for rows in drawn.split(32):
        logits = centred_logits(decomposition, rows).double()
        largest += [logits.amax(-1), -logits.amin(-1)]
    return Spread(torch.cat(largest).sort().values)


@dataclass(frozen=True, eq=False)
class Curve:
    """The sigmoid of one token; see `mainstem.results.unit.Sigmoid` for the fields."""

    log_a: float
    log_b: float
    values: Float[Tensor, " point"]
    probabilities: Float[Tensor, " point"]
    value: float
    alone: float
    others: float
    before: float
    probability: float


def token_sigmoid(decomposition: Decomposition, part: Part, token: int) -> Curve:
    """p(w) as the unit's before-softmax value on a token grows from 0, and where the whole vector takes it.

    Args:
        decomposition: that the part is of.
        part: the unit.
        token: w.

    Raises:
        LevelRefusedError: if logits are capped or not linear, so that no sigmoid follows; or the unit has no base.
    """
    readout = decomposition.moment.anatomy.readout
    require_linear(readout)
    if readout.softcap is not None:
        raise LevelRefusedError("The logits are capped, so that p is no sigmoid of what adds", "the readout")
    places = entries(decomposition)
    owner = part.group.sublayer or part.group.units[0]
    if owner not in places:
        raise LevelRefusedError(f"{part.unit} is added to the stream at no one sublayer", str(part.unit))
    entry = places[owner]
    scale = frozen_scale(readout, decomposition.moment.stream)
    base = normed(readout, entry.base[None], scale).to(working_dtype(readout))
    x = before_softmax(readout, base)[0].double()
    v = alone(decomposition, _entering(entry, part)[None])[0].double()
    other = torch.ones_like(x, dtype=torch.bool)
    other[token] = False
    log_a, log_b, value = float(x[token]), float(x[other].logsumexp(0)), float(v[token])
    others = float((x + v)[other].logsumexp(0)) - log_b
    odds = log_a - log_b
    low, high = min(0.0, value, value - others), max(0.0, value, value - others, min(4.0 - odds, 40.0))
    values = torch.linspace(low, high, CURVE, dtype=torch.float64)
    return Curve(
        log_a=log_a,
        log_b=log_b,
        values=values,
        probabilities=torch.sigmoid(values + odds),
        value=value,
        alone=_sigmoid(value + odds),
        others=others,
        before=_sigmoid(odds),
        probability=_sigmoid(value - others + odds),
    )


def _entering(entry, part: Part) -> Float[Tensor, " d_model"]:
    """The part as it is added to the stream."""
    if part.group.units[part.index] != part.unit:  # a piece of a part: as its vector in the last stream value
        return part.vector
    index = torch.tensor([part.index], device=part.group.coefficients.device)
    return entry.vectors(part.group, index)[0]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def top_tokens(logits: Float[Tensor, " d_vocab"], count: int) -> tuple[Int[Tensor, " top"], Int[Tensor, " top"]]:
    """The ids of the largest and of the smallest logits, in order."""
    count = min(count, len(logits))
    return logits.topk(count).indices, logits.topk(count, largest=False).indices
