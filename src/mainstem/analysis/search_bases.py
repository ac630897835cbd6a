"""What all units of one sublayer share in a search: the stream that they are added to, and what the target reads there.

Many sublayers read the same stream (parallel blocks), so each distinct stream is read once, all of them together.
`Changes` are the inner products that bounds are made of: how much a unit moves single logits, or the mean logit of a
distribution, under either norm convention.

Cost: two products of the distinct streams with the vocabulary. Memory: streams x a piece of the vocabulary, or, for the
most negative units and under a softcap, streams x vocabulary; never units x vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.bases import Entry, entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import (
    NormConvention,
    before_softmax,
    before_softmax_of,
    expected_rows,
    frozen_scale,
    normed,
    require_linear,
    softcapped,
    token_direction,
    working_dtype,
)
from mainstem.model.anatomy import Readout
from mainstem.targets import Target
from mainstem.units import Unit

CHUNK = 64
PIECE = 4096
LOWEST = -80.0
"""Logits further below the largest add nothing to a sum of exponentials."""
CANCELLED = 1e-3
"""Where adding a unit leaves less than this share of the squares of stream and unit, no bound is trusted."""


@dataclass(frozen=True, eq=False)
class Changes:
    """How units move what some directions read: `values` [part, direction], and the rounding to allow for.

    `stretch` is how much the norm's scale grows, after / before - 1, and `after` the scale that the unit itself gets;
    `trusted` is False where float32 cannot tell.
    """

    values: Float[Tensor, "part direction"]
    rounding: Float[Tensor, " part"]
    stretch: Float[Tensor, " part"]
    after: Float[Tensor, " part"]
    trusted: Tensor


@dataclass(frozen=True, eq=False)
class Means:
    """What is expected of the vocabulary at some bases, p being the softmax of their logits.

    Attributes:
        total: the log of the summed exponentials of the logits.
        largest: the largest magnitude of a logit, before a softcap.
        expected: E_p of the unembedding's rows, each times the softcap's slope.
        negentropy: sum p log p, float64.
        bias: E_p of the unembedding's biases; None if it has none.
    """

    total: Float[Tensor, " base"]
    largest: Float[Tensor, " base"]
    expected: Float[Tensor, "base d_in"]
    negentropy: Float[Tensor, " base"]
    bias: Float[Tensor, " base"] | None

    @classmethod
    def of(
        cls,
        readout: Readout,
        read: Float[Tensor, "base d_in"],
        total: Float[Tensor, " base"],
        largest: Float[Tensor, " base"],
        expected: Float[Tensor, "base d_in"],
        bias: Float[Tensor, " base"] | None,
    ) -> "Means":
        """Of bases whose logits are linear in what is read: sum p z follows from what is expected."""
        return cls(total, largest, expected, mean_logit(readout, read, expected, bias) - total.double(), bias)


def mean_logit(
    readout: Readout,
    read: Float[Tensor, "unit d_in"],
    expected: Float[Tensor, "unit d_in"],
    bias: Float[Tensor, " unit"] | None,
) -> Float[Tensor, " unit"]:
    """What distributions expect of the logits of what is read, where these are linear in it; see `Means`."""
    mean = (read.double() * expected.double()).sum(-1) * readout.scale
    return mean if bias is None else mean + bias.double()


def means_of(readout: Readout, read: Float[Tensor, "base d_in"]) -> Means:
    """The means at bases whose logits are linear in what is read, piece by piece of the vocabulary, each read once."""
    peak = torch.full_like(read[:, :1], -torch.inf)
    summed, largest, bias = torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(peak)
    expected = torch.zeros_like(read)
    for start in range(0, len(readout.unembedding), PIECE):
        piece = slice(start, start + PIECE)
        u = before_softmax(readout, read, piece)
        high, low = u.amax(-1, keepdim=True), u.amin(-1, keepdim=True)
        largest = torch.maximum(largest, torch.maximum(high, -low))
        higher = torch.maximum(peak, high)
        weights = u.sub_(higher).clamp_min_(LOWEST).exp_()
        shrinking = (peak - higher).exp()
        summed = summed * shrinking + weights.sum(-1, keepdim=True)
        expected = expected * shrinking + weights @ readout.unembedding[piece].to(weights)
        if readout.bias is not None:
            bias = bias * shrinking + weights @ readout.bias[piece, None].to(weights)
        peak = higher
    total, expected, bias = summed.log() + peak, expected / summed, bias / summed
    own_bias = None if readout.bias is None else bias[:, 0]
    return Means.of(readout, read, total[:, 0], largest[:, 0], expected, own_bias)


def mean_rows(readout: Readout, weights: Float[Tensor, "base d_vocab"]) -> Float[Tensor, "base d_in"]:
    """Sums of the unembedding's rows, weighted; weights below 1e-30 are left out, far below rounding.

    Products with numbers near the least that a float can be are several times slower.
    """
    return torch.cat([expected_rows(readout, torch.threshold(rows, 1e-30, 0.0)) for rows in weights.split(CHUNK)])


class Bases:
    """The distinct streams at one destination that units are added to, read for one target.

    Attributes:
        x: [base, d_model] float64.
        read: [base, d_in] float64, what the unembedding reads.
        own_u, rivals_u: [base, top], the logits of the target's tokens and of its rivals, before a softcap.
    """

    def __init__(self, made: Decomposition, target: Target, norm: NormConvention, owners: Sequence[Unit]) -> None:
        self.readout = made.moment.anatomy.readout
        require_linear(self.readout)
        self.dtype = working_dtype(self.readout)
        self.scale = frozen_scale(self.readout, made.moment.stream) if norm == "frozen" else None
        places = entries(made)
        self.entries = {unit: places[unit] for unit in dict.fromkeys(owners)}
        nodes = {entry.base_node: entry.base for entry in self.entries.values()}
        self._rows = {node: row for row, node in enumerate(nodes)}
        self.x = torch.stack(list(nodes.values()))
        self.read = normed(self.readout, self.x, self.scale)
        self._ask(target)

    def _ask(self, target: Target) -> None:
        self.target = target
        self.own = torch.tensor(target.ids, device=self.x.device)
        self.rivals = torch.tensor(target.against, dtype=torch.long, device=self.x.device)
        read = self.read.to(self.dtype)
        self.own_u = before_softmax(self.readout, read, self.own)
        self.rivals_u = before_softmax(self.readout, read, self.rivals)

    def for_target(self, target: Target) -> "Bases":
        """The same streams read for another target; what does not depend on it is shared."""
        _ = self.means  # computed before copying, so that all copies have them
        other = copy(self)
        other.__dict__.pop("log_p", None)
        other._ask(target)
        return other

    @cached_property
    def log_p(self) -> Float[Tensor, " base"]:
        """The target's log-probability at each base, or its log-odds."""
        own = softcapped(self.readout, self.own_u).logsumexp(-1)
        rivals = softcapped(self.readout, self.rivals_u)
        return (own - (rivals.mean(-1) if self.target.against else self.means.total)).double()

    @cached_property
    def u(self) -> Float[Tensor, "base d_vocab"]:
        """Logits before a softcap."""
        return before_softmax_of(self.readout, self.read.to(self.dtype))

    @cached_property
    def z(self) -> Float[Tensor, "base d_vocab"]:
        """Logits."""
        return softcapped(self.readout, self.u)

    @cached_property
    def p(self) -> Float[Tensor, "base d_vocab"]:
        """Probabilities. Who reads them before `means` spares a pass over the unembedding."""
        return self.z.softmax(-1)

    @cached_property
    def means(self) -> "Means":
        """What is expected of the vocabulary at each base; in one pass over it where no probabilities are there yet."""
        if "p" in self.__dict__ or self.readout.softcap is not None:
            return self.means_of_p()
        return means_of(self.readout, self.read.to(self.dtype))

    def means_of_p(self, expected: Float[Tensor, "base d_in"] | None = None) -> "Means":
        """The means from probabilities; `expected` where it is known."""
        cap, p, z = self.readout.softcap, self.p, self.z
        likeliest, place = p.max(-1, keepdim=True)
        total = (z.gather(-1, place) - likeliest.log()).squeeze(-1)
        if expected is None:
            expected = mean_rows(self.readout, p if cap is None else p * (1 - (z / cap).pow(2)))
        bias = None if self.readout.bias is None else p @ self.readout.bias.to(p)
        largest = torch.maximum(self.u.amax(-1), -self.u.amin(-1))
        if cap is None:
            return Means.of(self.readout, self.read.to(self.dtype), total, largest, expected, bias)
        entropy = torch.stack([row @ (own - t) for row, own, t in zip(p, z, total, strict=True)])
        return Means(total, largest, expected, entropy.double(), bias)

    @cached_property
    def rounding(self) -> Float[Tensor, " base"]:
        """What rounding can change a logit by."""
        return 16 * torch.finfo(self.dtype).eps * self.means.largest

    def row(self, owner: Unit) -> int:
        """Which of the distinct streams a sublayer reads."""
        return self._rows[self.entries[owner].base_node]

    @cached_property
    def constants(self) -> Float[Tensor, " d_vocab"]:
        """What the biases of the final norm and of the unembedding add to each logit."""
        norm, readout = self.readout.norm, self.readout
        added = torch.zeros_like(self.read[0])
        if norm is not None and norm.bias is not None:
            added = norm.bias.double() if readout.before is None else readout.before(norm.bias.double())
        return before_softmax(readout, added[None].to(self.dtype))[0]

    def read_anew(
        self, rows: Int[Tensor, " unit"], vectors: Float[Tensor, "unit d_model"]
    ) -> tuple[Float[Tensor, " unit"], Float[Tensor, " unit"]]:
        """The target's log-probability after each vector is added to its base, and KL(p || after); NaN for a contrast.

        A piece of the vocabulary at a time, small enough to stay in the processor's cache.
        """
        x = normed(self.readout, self.x[rows] + vectors, self.scale).to(self.dtype)
        single = [softcapped(self.readout, before_softmax(self.readout, x, ids)) for ids in (self.own, self.rivals)]
        own = single[0].double().logsumexp(-1)
        if self.target.against:
            return own - single[1].double().mean(-1), torch.full_like(own, torch.nan)
        before = self.means.total[rows, None]
        peak = torch.full_like(before, -torch.inf)
        summed = torch.zeros_like(peak)
        capped = torch.zeros_like(peak) if self.readout.softcap is not None else None
        for start in range(0, len(self.readout.unembedding), PIECE):
            piece = slice(start, start + PIECE)
            z = softcapped(self.readout, before_softmax(self.readout, x, piece)) - before
            if capped is not None:
                capped += (self.p[rows, piece] * z).sum(-1, keepdim=True)
            higher = torch.maximum(peak, z.amax(-1, keepdim=True))
            summed = summed * (peak - higher).exp() + z.sub_(higher).clamp_min_(LOWEST).exp_().sum(-1, keepdim=True)
            peak = higher
        total = (summed.log() + peak).double().squeeze(-1)  # of what is left after subtracting the total before
        means = self.means
        if capped is None:
            bias = None if means.bias is None else means.bias[rows]
            mean = mean_logit(self.readout, x, means.expected[rows], bias) - before.double()[:, 0]
        else:
            mean = capped.double()[:, 0]
        gap = means.negentropy[rows] - mean + total
        return own - total - before.double().squeeze(-1), gap.clamp_min(0)

    def tokens(self, ids: Tensor) -> Float[Tensor, "top d_in"]:
        """Rows of the unembedding, float64."""
        return self.readout.unembedding[ids].double()

    def changes(self, group: Group, owner: Unit, rows: Float[Tensor, "direction d_in"]) -> Changes:
        """How each unit of a group moves the inner products of rows with what the unembedding reads."""
        entry, row, norm = self.entries[owner], self.row(owner), self.readout.norm
        x = self.x[row]
        one = torch.ones(1, dtype=torch.float64, device=x.device)
        directions = token_direction(self.readout, rows.double(), one)
        if self.scale is not None or norm is None:
            values = entry.dot(group, (directions * (one if self.scale is None else self.scale)).to(self.dtype).T)
            still = torch.zeros_like(values[:, 0])
            after = still + (1.0 if self.scale is None else float(self.scale))
            return Changes(values, self._rounding(values), still, after, torch.ones_like(still, dtype=torch.bool))
        x = norm.centre(x)
        dots = entry.dot(group, torch.cat([directions, x[None]]).to(self.dtype).T)
        before, after, trusted = self._scales(group, entry, x, dots[:, -1].double())
        offset = directions @ self.x[row]
        stretch = after / before - 1
        values = (stretch[:, None] * (before * offset) + after[:, None] * dots[:, :-1]).to(self.dtype)
        return Changes(values, self._rounding(values), stretch.to(self.dtype), after.to(self.dtype), trusted)

    def _scales(self, group: Group, entry: Entry, x: Tensor, cross: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The norm's scale before and after each unit is added, float64."""
        norm = self.readout.norm
        assert norm is not None
        square = entry.squares(group, norm.centre if norm.centred else None, self.dtype)
        size, width = x.pow(2).sum(), x.shape[0]
        added = size + 2 * cross + square
        before = (size / width + norm.eps).rsqrt()
        after = (added.clamp_min(0) / width + norm.eps).rsqrt()
        return before, after, added > CANCELLED * (size + square)

    def _rounding(self, values: Tensor) -> Tensor:
        return 16 * torch.finfo(self.dtype).eps * values.abs().amax(-1)
