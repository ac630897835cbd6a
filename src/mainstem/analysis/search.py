"""Exact top-k units by log-probability increase, scoring few of them: a bound from convexity decides which.

For stream value x, part v, logits z(.), p = softmax z(x): D(v) = log p_t(x + v) - log p_t(x). Log-sum-exp is convex,
so lse z(x + v) >= lse z(x) + p . (z(x + v) - z(x)), hence D(v) <= U(v) = [z_t(x + v) - z_t(x)] - p . [z(x + v) - z(x)],
and U - D = KL(p || softmax z(x + v)) exactly. U needs two inner products per unit (and a squared norm where the scale
is recomputed), not a product with the vocabulary. Units are scored exactly in the order of U, in chunks, until the next
U is not above the k-th best: nothing that was left out can belong to the result. See `upper_bounds` for sets, rivals
and softcaps, `lower_bounds` for the most negative.

A continuation's score is a sum over its steps (`steps`), and the sum of the steps' bounds is a bound on it.

Cost: O(d_model) per unit and one product with the vocabulary per sublayer and per scored unit. Memory: chunks only.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.lower_bounds import LowerBounds
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.search_bases import Bases
from mainstem.analysis.steps import slots
from mainstem.analysis.upper_bounds import upper_bounds
from mainstem.model.reach import Reach
from mainstem.targets import Target
from mainstem.units import Unit

SLACK = 1e-4
SPARE = 8
"""How many more units than wanted are scored at first: a chunk costs a pass over the unembedding, however small."""
CHUNKS = (64, 64, 128)
"""How many units are then scored at once; the last for good: bounds are loose, and large products are faster."""
FIRST = 1024
"""So many units are put in the order of their bounds at first: to sort all takes as long as to score some tens."""


@dataclass(frozen=True, eq=False)
class Found:
    """One unit of a search: its increase, the bound on it, and the gap between them, all in nats.

    `increases` holds its increase at each step of the target, `groups` its group there (None: not there); `kl` is NaN
    for a contrast, where nothing is normalised.
    """

    unit: Unit
    groups: tuple[Group | None, ...]
    index: int
    increase: float
    increases: tuple[float, ...]
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
    """Searches the units of some kinds for the largest increase of a target.

    Args:
        steps: a decomposition and the target there, for each step; one but for continuations.
        norm: whether the final scale is used for every vector, or each has its own.
        kinds: the kinds of units.
        reach: weight-only numbers of neurons, for the most negative units.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Decomposition, Target]],
        norm: NormConvention,
        kinds: set[str],
        reach: Mapping[str, Reach] | None = None,
    ) -> None:
        self.slots = slots([made for made, _ in steps], kinds)
        self.reach = reach
        owners = [slot.owner for slot in self.slots]
        self.steps = [Bases(made, target, norm, owners) for made, target in steps] if owners else []
        self.starts = torch.tensor([0, *[len(slot) for slot in self.slots]]).cumsum(0)

    def for_targets(self, targets: Sequence[Target]) -> "IncreaseSearch":
        """The same search for other targets, one for each step; the streams are not read again."""
        other = copy(self)
        other.__dict__.pop("_lower", None)
        other.steps = [bases.for_target(target) for bases, target in zip(self.steps, targets, strict=False)]
        return other

    @cached_property
    def _lower(self) -> list[LowerBounds]:
        return [
            LowerBounds(bases, [(slot.groups[step], slot.owner) for slot in self.slots], self.reach)
            for step, bases in enumerate(self.steps)
        ]

    def bounds(self, negative: bool) -> tuple[Float[Tensor, " unit"], Float[Tensor, " unit"]]:
        """For every unit a bound on its increase, or with `negative` on minus it, and the rounding to allow for."""
        bounds, roundings = [], []
        for slot in self.slots:
            total = torch.zeros(len(slot), dtype=torch.float64, device=self.steps[0].x.device)
            rounding = torch.zeros_like(total)
            for step, group in enumerate(slot.groups):
                if group is None:
                    continue
                if negative:
                    bound, allowed = self._lower[step].bounds(group, slot.owner)
                    bound = -bound
                else:
                    bound, allowed = upper_bounds(self.steps[step], group, slot.owner)
                total += bound
                rounding += allowed
            bounds.append(total)
            roundings.append(rounding)
        made = torch.stack([torch.cat(bounds), torch.cat(roundings)])
        made[made.isnan()] = torch.inf  # where nothing is known nothing is left out
        return made[0], made[1]

    def top(self, count: int, negative: bool = False, exhaustive: bool = False) -> Search:
        """The `count` units with the largest increase or, with `negative`, the smallest."""
        if not self.slots:
            return Search([], 0, 0, SLACK)
        sign, total = -1 if negative else 1, int(self.starts[-1])
        bounds, rounding = self.bounds(negative)
        allowed = bounds + rounding + SLACK / 2
        order = _Order(allowed)
        scores = torch.empty(0, len(self.steps), dtype=torch.float64, device=bounds.device)
        gaps = best = torch.empty(0, dtype=torch.float64, device=bounds.device)
        done, kth, chunks = 0, -math.inf, chain(CHUNKS, repeat(CHUNKS[-1]))
        while done < total and (exhaustive or float(allowed[order.upto(done + 1)[done]]) >= kth - SLACK):
            wanted = total if exhaustive else max(count + SPARE - done, SPARE)
            if done >= count and not exhaustive:
                wanted = min(int((allowed >= kth - SLACK).sum()) - done, next(chunks))
            made, apart = self.scores(order.upto(done + min(wanted, CHUNKS[-1]))[done:])
            scores, gaps = torch.cat([scores, made]), torch.cat([gaps, apart])
            done, best = len(scores), sign * scores.sum(-1)
            kth = float(best.topk(count).values[-1]) if done >= count else -math.inf
        kept = torch.nonzero(best >= kth - SLACK).flatten()
        places = order.upto(done)[kept]
        numbers = (self._slot_of(places), sign * bounds[places], gaps[kept])
        rows = zip(places.tolist(), scores[kept], *(each.tolist() for each in numbers), strict=True)
        return Search(order_ties([self._found(*row) for row in rows], sign)[:count], total, done, SLACK)

    def scores(self, places: Int[Tensor, " top"]) -> tuple[Float[Tensor, "top step"], Float[Tensor, " top"]]:
        """Exact increases of a chunk of units at every step, 0 where they are not there, and the summed divergences."""
        out = torch.zeros(len(places), len(self.steps), dtype=torch.float64, device=places.device)
        gaps = torch.zeros_like(out[:, 0])
        for step, bases in enumerate(self.steps):
            rows, which, vectors = self._entering(places, step)
            if not len(which):
                continue
            log_p, gap = bases.read_anew(rows, vectors)
            change = log_p - bases.log_p[rows]
            out[which, step] = torch.where(vectors.any(-1), change, 0.0)  # what writes nothing changes nothing
            gaps[which] += gap
        return out, gaps

    def _entering(self, places: Int[Tensor, " top"], step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of those units that are there at a step: the rows of their bases, their places, their vectors."""
        bases, device = self.steps[step], places.device
        numbers = self._slot_of(places)
        rows, which, vectors = [], [], [torch.empty(0, bases.x.shape[1], dtype=torch.float64, device=device)]
        for number in numbers.unique().tolist():
            slot, chosen = self.slots[number], torch.nonzero(numbers == number).flatten()
            group = slot.groups[step]
            if group is not None:
                index = places[chosen] - int(self.starts[number])
                vectors.append(bases.entries[slot.owner].vectors(group, index))
                rows += [bases.row(slot.owner)] * len(chosen)
                which.append(chosen)
        empty = torch.empty(0, dtype=torch.long, device=device)
        return torch.tensor(rows, dtype=torch.long, device=device), torch.cat([empty, *which]), torch.cat(vectors)

    def _slot_of(self, places: Int[Tensor, " top"]) -> Int[Tensor, " top"]:
        return torch.searchsorted(self.starts.to(places.device), places, right=True) - 1

    def _found(self, place: int, scores: Float[Tensor, " step"], number: int, bound: float, gap: float) -> Found:
        slot, index = self.slots[number], place - int(self.starts[number])
        return Found(slot.units[index], slot.groups, index, float(scores.sum()), tuple(scores.tolist()), bound, gap)


class _Order:
    """Units in the order of numbers that they have, largest first, as far as it was asked for."""

    def __init__(self, numbers: Float[Tensor, " unit"]) -> None:
        self.numbers = numbers
        self.known = numbers.topk(min(len(numbers), FIRST)).indices

    def upto(self, end: int) -> Int[Tensor, " top"]:
        """The first ones."""
        if end > len(self.known):
            rest = torch.ones_like(self.numbers, dtype=torch.bool).index_fill(0, self.known, False).nonzero()[:, 0]
            self.known = torch.cat([self.known, rest[self.numbers[rest].argsort(descending=True)]])
        return self.known[:end]


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
