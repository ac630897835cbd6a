"""Upper bounds on the log-probability increase from convexity: `search` scores the most positive units in their order.

Log-sum-exp is convex, so D(v) <= U(v) = [z_t(x + v) - z_t(x)] - p . [z(x + v) - z(x)]; U - D is the divergence
KL(p || softmax z(x + v)). Several target tokens' own log-sum-exp is computed exactly. With a softcap c tanh(u / c) the
exponential of it is convex below a threshold, where lse z' - lse z >= log(1 + sum p_i cap'(u_i) (u_i' - u_i)); units
that may leave that range get an infinite bound, and are scored exactly. With rivals nothing is normalised, and the
increase itself is a few inner products.

Cost: one inner product for each target token and one for the mean, for each unit.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.parts import Group
from mainstem.analysis.readout import softcapped
from mainstem.analysis.search_bases import Bases, Changes
from mainstem.units import Unit


def upper_bounds(bases: Bases, group: Group, owner: Unit) -> tuple[Float[Tensor, " part"], Float[Tensor, " part"]]:
    """U of every unit of a group, and the rounding to allow for; infinite where there is no bound."""
    if bases.target.against:
        return odds_increase(bases, group, owner)
    row = bases.row(owner)
    mean = bases.means.expected[row].double()
    changes = bases.changes(group, owner, torch.cat([bases.tokens(bases.own), mean[None]]))
    gain = own_gain(bases, row, changes.values[:, :-1])
    moved = changes.values[:, -1]
    if bases.readout.softcap is None:
        bound = gain - moved
    else:
        possible = moved > -1 + 1e-6
        bound = gain - torch.log1p(torch.where(possible, moved, 0))
        bound = torch.where(possible & _stays_convex(bases, group, owner, changes), bound, torch.inf)
    return torch.where(changes.trusted, bound, torch.inf), changes.rounding + bases.rounding[row]


def odds_increase(bases: Bases, group: Group, owner: Unit) -> tuple[Float[Tensor, " part"], Float[Tensor, " part"]]:
    """The increase of the log-odds against the rivals: no bound but the value itself, up to rounding."""
    row = bases.row(owner)
    changes = bases.changes(group, owner, bases.tokens(torch.cat([bases.own, bases.rivals])))
    count = len(bases.own)
    gain = own_gain(bases, row, changes.values[:, :count])
    u, moved = bases.rivals_u[row], changes.values[:, count:]
    lost = softcapped(bases.readout, u + moved) - softcapped(bases.readout, u)
    value = gain - lost.mean(-1)
    return torch.where(changes.trusted, value, torch.inf), changes.rounding + bases.rounding[row]


def own_gain(bases: Bases, row: int, moved: Float[Tensor, "part top"]) -> Float[Tensor, " part"]:
    """How much the log of the target's summed exponentials grows."""
    u = bases.own_u[row]
    before = softcapped(bases.readout, u)
    after = softcapped(bases.readout, u + moved)
    if len(u) == 1:
        return after[:, 0] - before
    return after.logsumexp(-1) - before.logsumexp(-1)


def _stays_convex(bases: Bases, group: Group, owner: Unit, changes: Changes) -> Tensor:
    """Whether no logit can leave the range in which the exponential of the softcap is convex."""
    readout, row, entry = bases.readout, bases.row(owner), bases.entries[owner]
    cap = readout.softcap
    assert cap is not None
    threshold = cap * math.atanh(math.sqrt(1 + 1 / cap**2) - 1 / cap)
    length = entry.squares(group, lambda rows: read_rows(bases, rows), bases.dtype).sqrt().to(bases.dtype)
    largest = float(readout.unembedding.to(bases.dtype).norm(dim=-1).max()) * abs(readout.scale)
    plain = bases.u[row].abs().max()
    if readout.bias is not None or (readout.norm is not None and readout.norm.bias is not None):
        plain = plain + bases.constants.abs().max()
    reach = bases.u[row].max() + changes.stretch.abs() * plain + changes.after * largest * length
    return reach <= threshold


def read_rows(bases: Bases, rows: Float[Tensor, "part d_model"]) -> Float[Tensor, "part d_in"]:
    """Vectors of the stream as the unembedding reads them, at a scale of 1, in their dtype."""
    readout = bases.readout
    if readout.norm is not None:
        rows = readout.norm.centre(rows)
        if readout.norm.gain is not None:
            rows = rows * readout.norm.gain.to(rows)
    return rows if readout.before is None else readout.before(rows)
