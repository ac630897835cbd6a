"""Exact top-k units by log-probability increase, scoring few of them: a bound from convexity decides which.

For stream value x, part v, logits z(.), p = softmax z(x): D(v) = log p_t(x + v) - log p_t(x). Log-sum-exp is convex,
so lse z(x + v) >= lse z(x) + p . (z(x + v) - z(x)), hence D(v) <= U(v) = [z_t(x + v) - z_t(x)] - p . [z(x + v) - z(x)],
and U - D = KL(p || softmax z(x + v)) exactly. U needs two inner products per unit (and a squared norm where the scale
is recomputed), not a product with the vocabulary. Units are scored exactly in the order of U, in chunks, until the next
U is not above the k-th best: nothing that was left out can belong to the result.

With several target tokens their own log-sum-exp is computed exactly. With a softcap c tanh(u / c) the exponential of it
is convex below a threshold, where lse z' - lse z >= log(1 + sum p_i cap'(u_i) (u_i' - u_i)); units that may leave that
range are scored exactly. A contrast is a difference of logits and needs no bound.

Cost: O(d_model) per unit and one product with the vocabulary per sublayer and per scored unit. Memory: chunks only.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.bases import Entry, entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.increase import log_probability
from mainstem.analysis.lower_bounds import Base, Tails
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import (
    NormConvention,
    before_softmax,
    frozen_scale,
    logits_of,
    normed,
    require_linear,
    softcapped,
    token_direction,
    working_dtype,
)
from mainstem.model.anatomy import Readout
from mainstem.targets import Target
from mainstem.units import Unit

SLACK = 1e-4
FIRST_CHUNK = 16
LARGEST_CHUNK = 64


@dataclass(frozen=True, eq=False)
class Found:
    """One unit of a search: its increase, the bound on it, and the gap between them, all in nats."""

    unit: Unit
    group: Group
    index: int
    increase: float
    bound: float
    kl: float


@dataclass(frozen=True, eq=False)
class Search:
    """The result of a search: exact up to `slack` nats; units within the slack are ties, ordered by address."""

    found: list[Found]
    units: int
    scored: int
    slack: float


class IncreaseSearch:
    """Searches one decomposition for the units with the largest increase of one target."""

    def __init__(self, decomposition: Decomposition, target: Target, norm: NormConvention, kinds: set[str]) -> None:
        self.readout: Readout = decomposition.moment.anatomy.readout
        require_linear(self.readout)
        self.decomposition, self.target, self.norm = decomposition, target, norm
        self.dtype = working_dtype(self.readout)
        self.final_scale = frozen_scale(self.readout, decomposition.moment.stream)
        self.scale = self.final_scale if norm == "frozen" else None
        self.ids = torch.tensor(target.ids, device=self.final_scale.device)
        places = entries(decomposition)
        self.groups = [g for g in decomposition.groups if g.kind in kinds]
        self.owners = [g.sublayer or g.units[0] for g in self.groups]
        units = list(dict.fromkeys(self.owners))
        used = {places[unit].base_node: places[unit] for unit in units}
        shared = dict(zip(used, self._bases(list(used.values())), strict=True))
        self.bases = {unit: replace(shared[places[unit].base_node], entry=places[unit]) for unit in units}

    def _bases(self, used: list[Entry]) -> list[Base]:
        """For all distinct bases at once: two products with the unembedding."""
        if not used:
            return []
        readout = self.readout
        states = torch.stack([entry.base for entry in used])
        one = torch.ones(1, dtype=torch.float64, device=states.device)
        own = [token_direction(readout, row, one) for row in readout.unembedding[self.ids]]
        out = []
        for chunk, entries_ in zip(states.split(LARGEST_CHUNK), _chunks(used, LARGEST_CHUNK), strict=True):
            u = before_softmax(readout, normed(readout, chunk, self.scale).to(self.dtype))
            z = softcapped(readout, u)
            log_p = log_probability(z, self.target)
            p = z.softmax(-1)
            slope = p if readout.softcap is None else p * (1 - (z / readout.softcap).pow(2))
            means = slope @ readout.unembedding.to(self.dtype)
            for i, entry in enumerate(entries_):
                directions = torch.stack([*own, token_direction(readout, means[i], one)], -1)
                offset = entry.base @ directions
                made = (float(log_p[i]), p[i], directions.to(self.dtype), offset.to(self.dtype))
                out.append(Base(entry, entry.base, u[i], *made))
        return out

    def bounds(self, group: Group, base: Base) -> Float[Tensor, " part"]:
        """U of every unit of a group."""
        dots = base.entry.dot(group, base.directions)
        if self.scale is not None:
            delta = dots * self.scale.to(dots)
        else:
            before, after = self._scales(group, base)
            delta = after[:, None] * (base.offset + dots) - before * base.offset
        own, mean = delta[:, :-1], delta[:, -1]
        u = base.u[self.ids]
        gain = softcapped(self.readout, u + own).logsumexp(-1) - softcapped(self.readout, u).logsumexp(-1)
        if self.readout.softcap is None:
            return gain - mean
        lowest = torch.log1p(mean.clamp_min(-1 + 1e-6))
        bound = torch.where(mean > -1 + 1e-6, gain - lowest, torch.inf)
        return torch.where(self._stays_convex(group, base), bound, torch.inf)

    def _scales(self, group: Group, base: Base) -> tuple[Tensor, Tensor]:
        """The norm's scale before and after each unit is added."""
        norm = self.readout.norm
        if norm is None:
            one = torch.ones((), dtype=self.dtype, device=base.u.device)
            return one, one.expand(len(group))
        x = norm.centre(base.x)
        cross = base.entry.dot(group, x)
        square = base.entry.squares(group, norm.centred)
        size = x.pow(2).sum()
        width = len(x)
        before = (size / width + norm.eps).rsqrt().to(self.dtype)
        after = ((size + 2 * cross + square).clamp_min(0) / width + norm.eps).rsqrt().to(self.dtype)
        return before, after

    def _stays_convex(self, group: Group, base: Base) -> Tensor:
        """Whether no logit can leave the range in which the exponential of the softcap is convex."""
        cap = self.readout.softcap
        assert cap is not None
        threshold = cap * math.atanh(math.sqrt(1 + 1 / cap**2) - 1 / cap)
        norm = self.readout.norm
        largest = float(self.readout.unembedding.to(self.dtype).norm(dim=-1).max()) * abs(self.readout.scale)
        size = base.entry.squares(group, norm.centred if norm else False).sqrt().to(self.dtype)
        gain = 1.0 if norm is None or norm.gain is None else float(norm.gain.abs().max())
        if self.scale is not None:
            reach = float(base.u.max()) + largest * gain * float(self.scale) * size
        else:
            width = len(base.x)
            reach = torch.full_like(size, largest * gain * width**0.5)
        return reach <= threshold

    def score(self, bases: list[Base], vectors: Float[Tensor, "top d_model"]) -> tuple[Tensor, Tensor]:
        """Exact increases of vectors as they enter the stream, each on its own base, and their KL gaps."""
        states = torch.stack([base.x for base in bases]) + vectors
        logits = logits_of(self.readout, states, self.scale)
        after = log_probability(logits, self.target)
        before = torch.tensor([base.log_p for base in bases], dtype=after.dtype, device=after.device)
        p = torch.stack([base.p for base in bases])
        divergence = (p.clamp_min(1e-45).log() - logits.log_softmax(-1)).mul_(p).sum(-1)
        return after - before, divergence

    def top(self, count: int, negative: bool = False, exhaustive: bool = False) -> Search:
        """The `count` units with the largest increase or, with `negative`, the smallest."""
        pairs = [(g, self.bases[o]) for g, o in zip(self.groups, self.owners, strict=True)]
        if negative:
            tails = Tails(self.readout, self.ids, self.scale)
            bounds = [-tails.bounds(group, base) for group, base in pairs]
        else:
            bounds = [self.bounds(group, base) for group, base in pairs]
        sign = -1 if negative else 1
        total = sum(len(b) for b in bounds)
        if not total:
            return Search([], 0, 0, SLACK)
        flat = torch.cat(bounds) + SLACK / 2  # what float32 may have rounded away
        starts = torch.tensor([0, *[len(b) for b in bounds]]).cumsum(0)
        order = flat.argsort(descending=True)
        best: list[tuple[float, float, float, int]] = []
        done, chunk = 0, FIRST_CHUNK
        while done < total:
            kth = sorted((s[0] for s in best), reverse=True)[count - 1] if len(best) >= count else -math.inf
            if not exhaustive and float(flat[order[done]]) < kth - SLACK:
                break
            places = order[done : done + chunk]
            best += self._score_places(places, starts, flat, sign)
            done += len(places)
            chunk = min(2 * chunk, LARGEST_CHUNK)
        found = [self._found(entry, starts, sign) for entry in sorted(best, key=lambda s: -s[0])[: 2 * count]]
        return Search(order_ties(found, sign)[:count], total, done, SLACK)

    def _score_places(
        self, places: Tensor, starts: Tensor, flat: Tensor, sign: int
    ) -> list[tuple[float, float, float, int]]:
        which = torch.searchsorted(starts.to(places.device), places, right=True) - 1
        order, bases, vectors = [], [], []
        for number in which.unique().tolist():
            chosen = places[which == number]
            base = self.bases[self.owners[number]]
            vectors.append(base.entry.vectors(self.groups[number], chosen - int(starts[number])))
            bases += [base] * len(chosen)
            order.append(chosen)
        chosen = torch.cat(order)
        values, gaps = self.score(bases, torch.cat(vectors))
        values = sign * values
        return list(zip(values.tolist(), flat[chosen].tolist(), gaps.tolist(), chosen.tolist(), strict=True))

    def _found(self, entry: tuple[float, float, float, int], starts: Tensor, sign: int) -> Found:
        increase, bound, gap, place = entry
        number = int(torch.searchsorted(starts, torch.tensor(place), right=True)) - 1
        index = place - int(starts[number])
        group = self.groups[number]
        return Found(group.units[index], group, index, sign * increase, sign * (bound - SLACK / 2), gap)


def _chunks(items: list[Entry], size: int) -> list[list[Entry]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def order_ties(found: list[Found], sign: int = 1) -> list[Found]:
    """By score; units whose scores differ by less than the slack are ties, in the order of their addresses."""
    out: list[Found] = []
    run: list[Found] = []
    for item in sorted(found, key=lambda f: -sign * f.increase):
        if run and abs(run[0].increase - item.increase) > SLACK:
            out += sorted(run, key=lambda f: f.unit.sort_key)
            run = []
        run.append(item)
    return out + sorted(run, key=lambda f: f.unit.sort_key)
