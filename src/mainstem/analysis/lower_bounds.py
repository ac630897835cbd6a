"""Lower bounds on the log-probability increase, for the most negative units: `search` scores in their order.

With S the likeliest tokens of the base and the target, R the rest with mass P_R, distribution q, and mean change mu:
D >= d_t - log[sum_S p_i exp(d_i) + P_R exp(mu) B(s2, b)], B(s2, b) = (b^2 exp(-s2 / b) + s2 exp(b)) / (b^2 + s2)
(Bennett's inequality), s2 >= the variance of d under q, b >= its largest deviation upwards. The changes of S and the
mean are computed; what R can do is bounded in one of two ways:

- by `Reach`, weight-only numbers of each neuron (extremes, mean and squares of what its column does to all logits):
  d = k a, so d <= k max a, and Var_q d <= q_max sum over R of (d - mu)^2, and <= (max - mu) (mu - min);
- otherwise by the length of what the unembedding reads of the unit, times the spread of its rows around their middle
  m, their plain mean: |d_i - m . v| <= |v| |w_i - m|, so one pass over the unembedding serves all bases.

Under a recomputed norm d = stretch u + after (what the unit alone does), and the two terms' bounds add up. A softcap
has slope at most 1, so exp of a capped change is at most 1 + exp of the uncapped one. A loose bound costs time, never
correctness. Cost: |S| + 2 inner products a unit, and per base one product with the unembedding.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.parts import Columns, Group, scalar_of
from mainstem.analysis.readout import softcapped
from mainstem.analysis.search_bases import Bases, Changes, mean_rows
from mainstem.analysis.upper_bounds import odds_increase, own_gain, read_rows
from mainstem.model.reach import Reach
from mainstem.units import Unit

LIKELIEST = 32
ROWS = 1024
SAFETY = 1 + 1e-4
"""Sizes that were computed in float32 are taken a little larger."""


class LowerBounds:
    """Lower bounds on D of the units of groups, each with its sublayer; `reach` by a group's first address."""

    def __init__(
        self, bases: Bases, groups: Sequence[tuple[Group | None, Unit]], reach: Mapping[str, Reach] | None = None
    ) -> None:
        self.bases, self.reach = bases, reach or {}
        p = bases.p
        likeliest = p.topk(min(LIKELIEST, p.shape[-1])).indices
        own = bases.own.expand(len(p), -1)
        self.inside = [torch.cat(pair).unique() for pair in zip(likeliest, own, strict=True)]
        rest = p.clone()
        for row, inside in zip(rest, self.inside, strict=True):
            row[inside] = 0
        self.mass = rest.sum(-1)
        self.q = rest.div_(self.mass.clamp_min(1e-30)[:, None])
        self.largest = self.q.amax(-1)
        self.mean = mean_rows(bases.readout, self.q)
        if bases.readout.softcap is None:
            bases.means = bases.means_of_p(self._expected())

    def _expected(self) -> Float[Tensor, "base d_in"]:
        """The mean of the unembedding's rows under p, from those of S and the mean of the rest."""
        weight = self.bases.readout.unembedding
        own = [p[inside] @ weight[inside].to(p) for p, inside in zip(self.bases.p, self.inside, strict=True)]
        return torch.stack(own) + self.mass[:, None] * self.mean

    @cached_property
    def middle(self) -> Float[Tensor, " d_in"]:
        """The mean of the unembedding's rows."""
        return self.bases.readout.unembedding.mean(0, dtype=self.mean.dtype)

    @cached_property
    def spread(self) -> tuple[Float[Tensor, " base"], Float[Tensor, " base"]]:
        """Of the rest's rows around the middle: mean square under q, and the largest distance."""
        pieces = self.bases.readout.unembedding.split(ROWS)
        distances = torch.cat([torch.linalg.vector_norm(rows.to(self.middle) - self.middle, dim=-1) for rows in pieces])
        farthest = torch.stack([distances.index_fill(0, inside, 0).max() for inside in self.inside])
        return self.q @ distances.pow(2) * SAFETY, farthest * SAFETY

    @cached_property
    def plain(self) -> tuple[Float[Tensor, " base"], Float[Tensor, " base"], Float[Tensor, " base"]]:
        """Of the rest's logits without constants: the lowest and the highest, and the deviation under q."""
        bases = self.bases
        found = []
        for row, (q, inside) in enumerate(zip(self.q, self.inside, strict=True)):
            u = bases.u[row] - bases.constants
            u = u - q @ u
            u[inside] = 0
            found.append(torch.stack([*u.aminmax(), (q @ u.pow(2)).sqrt() * SAFETY]))
        low, high, deviation = torch.stack(found, -1)
        return low + self.centre, high + self.centre, deviation

    @cached_property
    def centre(self) -> Float[Tensor, " base"]:
        """The mean under q of the logits without constants."""
        return torch.stack([q @ (u - self.bases.constants) for q, u in zip(self.q, self.bases.u, strict=True)])

    def bounds(self, group: Group, owner: Unit) -> tuple[Float[Tensor, " part"], Float[Tensor, " part"]]:
        """A lower bound on D of every unit of a group, and the rounding to allow for."""
        bases = self.bases
        if bases.target.against:
            value, rounding = odds_increase(bases, group, owner)
            return torch.where(value.isfinite(), value, -torch.inf), rounding
        row = bases.row(owner)
        inside = self.inside[row]
        rows = torch.cat([bases.tokens(inside), self.mean[row][None].double(), self.middle[None].double()])
        changes = bases.changes(group, owner, rows)
        moved, mean = changes.values[:, :-2], changes.values[:, -2]
        high, variance = self._rest(group, owner, changes)
        outside = mean + _bennett(variance, (high - mean).clamp_min(1e-9))
        if bases.readout.softcap is not None:
            outside = torch.nn.functional.softplus(outside)
        mass = float(self.mass[row])
        outside = outside + math.log(mass) if mass > 0 else torch.full_like(outside, -torch.inf)
        u = bases.u[row, inside]
        changed = softcapped(bases.readout, u + moved) - softcapped(bases.readout, u)
        within = (bases.p[row, inside].clamp_min(1e-45).log() + changed).logsumexp(-1)
        gain = own_gain(bases, row, moved[:, torch.searchsorted(inside, bases.own)])
        bound = gain - torch.logaddexp(within, outside)
        bound = torch.where(changes.trusted & ~bound.isnan(), bound, -torch.inf)
        return bound, changes.rounding + bases.rounding[row]

    def _rest(self, group: Group, owner: Unit, changes: Changes) -> tuple[Tensor, Tensor]:
        """The highest change of a token outside S, and a bound on the changes' variance under q."""
        bases, row = self.bases, self.bases.row(owner)
        own = changes.values
        if bases.scale is None:  # what the unit alone does is what the stretch does not explain
            u = bases.u[row] - bases.constants
            plain = torch.cat([u[self.inside[row]], self.centre[row][None], u.mean()[None]])
            own = own - changes.stretch[:, None] * plain
        numbers = self._known(group, owner)
        if numbers is None:
            high, variance = self._by_length(group, owner, changes, own)
        else:
            factor, reach = numbers
            high, variance = self._by_reach(row, changes.after * group.coefficients.to(own) * factor, reach, own)
        if bases.scale is not None:
            return high, variance
        stretch = changes.stretch
        plain_low, plain_high, plain_deviation = (value[row] for value in self.plain)
        high = high + torch.maximum(stretch * plain_high, stretch * plain_low)
        return high, (stretch.abs() * plain_deviation + variance.sqrt()).pow(2)

    def _by_length(self, group: Group, owner: Unit, changes: Changes, own: Tensor) -> tuple[Tensor, Tensor]:
        """What the unit alone does to the rest, from the length of what the unembedding reads of it."""
        bases, row = self.bases, self.bases.row(owner)
        squares, farthest = (value[row] for value in self.spread)
        square = bases.entries[owner].squares(group, lambda v: read_rows(bases, v), bases.dtype)
        length = changes.after * square.sqrt().to(changes.after) * abs(bases.readout.scale) * SAFETY
        mean, middle = own[:, -2], own[:, -1]
        variance = length.pow(2) * squares - (mean - middle).pow(2) / SAFETY
        return middle + length * farthest, variance.clamp_min(0)

    def _known(self, group: Group, owner: Unit) -> tuple[float, Reach] | None:
        """The numbers of a group of neurons and the factor that its tail is, where there are both."""
        reach = self.reach.get(str(group.units[0])) if isinstance(group, Columns) else None
        factor = scalar_of(self.bases.entries[owner].tails[group.node]) if reach is not None else None
        return None if reach is None or factor is None else (factor, reach)

    def _by_reach(self, row: int, k: Tensor, reach: Reach, own: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the weight-only numbers of neurons, each times its `k`."""
        known, mean = own[:, :-2], own[:, -2]
        high, low = torch.maximum(k * reach.high, k * reach.low), torch.minimum(k * reach.high, k * reach.low)
        total = k.pow(2) * reach.squares + self.q.shape[1] * (k * reach.mean - mean).pow(2)
        total = total * SAFETY - (known - mean[:, None]).pow(2).sum(-1) / SAFETY
        slack = (SAFETY - 1) * (high - low)
        high, low = high + slack, low - slack
        bounded = ((high - mean) * (mean - low)).clamp_min(0)
        return high, torch.minimum(self.largest[row] * total.clamp_min(0), bounded)


def _bennett(variance: Tensor, b: Tensor) -> Tensor:
    """log of the largest E exp(X) with E X = 0, Var X <= variance and X <= b; stable for large b."""
    squares = b.pow(2)
    return torch.log((squares * torch.exp(-variance / b - b) + variance) / (squares + variance)) + b
