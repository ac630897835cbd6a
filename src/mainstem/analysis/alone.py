"""What units say alone, for a few tokens at a time: exact searches for scores that need the vocabulary for each unit.

log p(w | v), the softmax of a unit's vector alone: log-sum-exp is convex, so log p(w | v) <= u_w - mean(u) - log V with
u the unit's logits, two inner products for each unit; units are scored exactly in the order of that bound. The rank of
w in u depends on the unit's direction and on the sign of its coefficient alone, so that one pass over the units of a
model serves many prompts. All under the frozen norm.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.attribution import Scored
from mainstem.analysis.bases import Entry, entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import frozen_scale, normed, require_linear, token_direction, working_dtype

CHUNK = 128
SLACK = 1e-4


def owners(decomposition: Decomposition, kinds: set[str]) -> list[tuple[Group, Entry]]:
    """The groups of some kinds with the entries of their sublayers."""
    places = entries(decomposition)
    return [(g, places[g.sublayer or g.units[0]]) for g in decomposition.groups if g.kind in kinds]


def top_alone(decomposition: Decomposition, token: int, kinds: set[str], count: int) -> list[Scored]:
    """The units with the largest log p(w | v), exactly."""
    readout = decomposition.moment.anatomy.readout
    require_linear(readout)
    scale = frozen_scale(readout, decomposition.moment.stream)
    weight = readout.unembedding.double()
    both = torch.stack([weight[token], weight.mean(0)])
    directions = torch.stack([token_direction(readout, row, scale) for row in both], -1)
    groups = owners(decomposition, kinds)
    bounds = []
    for group, entry in groups:
        own, mean = entry.dot(group, directions).unbind(-1)
        bounds.append(own - mean - math.log(len(weight)))
    if not bounds:
        return []
    flat = torch.cat(bounds)
    starts = torch.tensor([0, *[len(b) for b in bounds]]).cumsum(0)
    order, found = flat.argsort(descending=True), []
    for places in order.split(CHUNK):
        kth = sorted((s.score for s in found), reverse=True)[count - 1] if len(found) >= count else -math.inf
        if float(flat[places[0]]) < kth - SLACK:
            break
        for place in places.tolist():
            number = int(torch.searchsorted(starts, place, right=True)) - 1
            group, entry = groups[number]
            index = place - int(starts[number])
            found.append(Scored(group.units[index], group, index, 0.0))
        fresh = found[-len(places) :]
        vectors = torch.cat([_entering(groups, one) for one in fresh])
        x = normed(readout, vectors, scale, vectors=True).to(working_dtype(readout))
        u = (x @ readout.unembedding.to(x.dtype).T * readout.scale).double()
        scores = (u[:, token] - u.logsumexp(-1)).tolist()
        found[-len(places) :] = [Scored(s.unit, s.group, s.index, v) for s, v in zip(fresh, scores, strict=True)]
    return sorted(found, key=lambda part: (-part.score, part.unit.sort_key))[:count]


def _entering(groups: Sequence[tuple[Group, Entry]], part: Scored) -> Float[Tensor, "1 d_model"]:
    entry = next(entry for group, entry in groups if group is part.group)
    return entry.vectors(part.group, torch.tensor([part.index], device=part.group.coefficients.device))


def ranks_alone(
    decomposition: Decomposition, tokens: Int[Tensor, " token"], kinds: set[str]
) -> list[tuple[Int[Tensor, "part token"], Int[Tensor, "part token"]]]:
    """For each group the rank of each token in what a unit says with a positive and with a negative coefficient.

    The same for all prompts, where nothing between the units and the stream depends on the run.
    """
    readout = decomposition.moment.anatomy.readout
    require_linear(readout)
    one = torch.ones(1, dtype=torch.float64, device=tokens.device)
    weight = readout.unembedding.to(torch.float32)
    out = []
    for group, entry in owners(decomposition, kinds):
        up, down = [], []
        for index in torch.arange(len(group), device=tokens.device).split(CHUNK):
            x = normed(readout, entry.directions(group, index), one, vectors=True).to(weight.dtype)
            u = x @ weight.T
            own, ordered = u[:, tokens].contiguous(), _sorted(u)
            up.append(len(weight) - torch.searchsorted(ordered, own, right=True) + 1)
            down.append(torch.searchsorted(ordered, own) + 1)
        out.append((torch.cat(up), torch.cat(down)))
    return out


def _sorted(values: Float[Tensor, "part d_vocab"]) -> Float[Tensor, "part d_vocab"]:
    """Each row in ascending order; on the CPU by NumPy, which is several times faster."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.numpy(), -1))
