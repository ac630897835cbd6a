"""Lower bounds on the log-probability increase, for the most negative units: `search` scores in their order.

The vocabulary is split into the likeliest tokens, whose change is computed, and the rest, whose sum is bounded by
Bennett's inequality from its mean, variance and largest deviation. The better known the rest, the fewer units need to
be scored; a loose bound costs time, never correctness.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.bases import Entry
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import normed, softcapped, working_dtype
from mainstem.model.anatomy import Readout

LIKELIEST = 64
CHUNK = 8192


@dataclass(frozen=True, eq=False)
class Base:
    """What all units of one sublayer share: the stream before them, its logits, and the directions of the bound."""

    entry: Entry
    x: Float[Tensor, " d_model"]
    u: Float[Tensor, " d_vocab"]
    log_p: float
    p: Float[Tensor, " d_vocab"]
    directions: Float[Tensor, "d_model top"]
    offset: Float[Tensor, " top"]


class Tails:
    """Lower bounds on D, for the most negative units, from the likeliest tokens and what the rest can do.

    With S the likeliest tokens of the base and the target, R the rest with mass P_R, distribution q, mean change mu:
    D >= d_t - log[sum_S p_i exp(d_i) + P_R exp(mu) B(s2, b)], B(s2, b) = (b^2 exp(-s2/b) + s2 exp(b)) / (b^2 + s2)
    (Bennett), with s2 >= the variance of d under q and b >= its largest deviation. Both are bounded by the length of
    the change of what the unembedding reads times the spread of its rows around their mean under q.
    """

    def __init__(self, readout: Readout, ids: Tensor, scale: Tensor | None) -> None:
        self.readout, self.ids, self.scale = readout, ids, scale
        self.dtype = working_dtype(readout)
        weight = readout.unembedding.to(self.dtype)
        self.lengths = weight.pow(2).sum(-1)
        self.made: dict[int, _Tail] = {}

    def _tail(self, base: Base) -> "_Tail":
        key = base.entry.base_node
        if key not in self.made:
            likeliest = base.p.topk(min(LIKELIEST, len(base.p))).indices
            inside = torch.cat([likeliest, self.ids]).unique()
            rest = base.p.clone()
            rest[inside] = 0
            mass = rest.sum()
            q = rest / mass.clamp_min(1e-30)
            weight = self.readout.unembedding.to(self.dtype)
            mean = q @ weight
            spread = (self.lengths - 2 * (weight @ mean) + mean.pow(2).sum()).clamp_min(0)
            spread[inside] = 0
            self.made[key] = _Tail(inside, float(mass), mean, float((q * spread).sum()), float(spread.max().sqrt()))
        return self.made[key]

    def bounds(self, group: Group, base: Base) -> Float[Tensor, " part"]:
        """A lower bound on D of every unit of a group."""
        tail, readout = self._tail(base), self.readout
        before = normed(readout, base.x[None], self.scale)[0]
        weight = readout.unembedding[tail.inside].to(self.dtype)
        out = []
        for start in range(0, len(group), CHUNK):
            index = torch.arange(start, min(start + CHUNK, len(group)), device=before.device)
            added = base.x + base.entry.vectors(group, index)
            change = (normed(readout, added, self.scale) - before).to(self.dtype)
            out.append(self._bound(tail, base, change, change @ weight.T * readout.scale))
        return torch.cat(out)

    def _bound(self, tail: "_Tail", base: Base, change: Tensor, inner: Tensor) -> Tensor:
        u = base.u[tail.inside]
        d = softcapped(self.readout, u + inner) - softcapped(self.readout, u)
        scale = abs(self.readout.scale)
        length = change.norm(dim=-1) * scale
        b = (length * tail.radius).clamp_min(1e-12)
        s2 = length.pow(2) * tail.variance
        mu = change @ tail.mean * self.readout.scale
        bennett = torch.log((b.pow(2) * torch.exp(-s2 / b - b) + s2) / (b.pow(2) + s2)) + b
        outside = mu + bennett
        if self.readout.softcap is not None:  # a cap has slope at most 1, so exp(d) <= 1 + exp(uncapped d)
            outside = torch.nn.functional.softplus(outside)
        if tail.mass > 0:
            outside = outside + math.log(tail.mass)
        else:
            outside = torch.full_like(outside, -torch.inf)
        within = (base.p[tail.inside].clamp_min(1e-45).log() + d).logsumexp(-1)
        places = torch.isin(tail.inside, self.ids)
        own = softcapped(self.readout, u[places])
        gain = (own + d[:, places]).logsumexp(-1) - own.logsumexp(-1)
        return gain - torch.logaddexp(within, outside)


@dataclass(frozen=True, eq=False)
class _Tail:
    """Tokens inside S, and of the rest: mass, mean row, mean squared and largest distance from it."""

    inside: Tensor
    mass: float
    mean: Float[Tensor, " d_in"]
    variance: float
    radius: float
