"""What each part is worth: direct logit attribution, and the score that adds up to the log-probability.

direct (DLA): s_F * W_U[t] . (gain * centre(v)), the part's share of the target's logit (before a softcap) under the
frozen norm of the destination; with the constants of the readout the parts sum to that logit.

With rivals both are about the difference to the mean of theirs; for a direction in the stream, direct is the inner
product with it, and there is no probability to add up to.

additive: A(v) = s_F (gain * (w_t - integral over tau in [0, 1] of E_softmax(tau z)[w])) . v, integrated gradients of
the log-probability along the ray from zero logits to the model's: the parts sum to log p_t + log d_vocab. With a
softcap z is the capped logits of tau u, and the integrand carries the cap's slope.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import (
    frozen_scale,
    log_probability,
    normed,
    require_linear,
    softcapped,
    token_direction,
    working_dtype,
)
from mainstem.errors import ChoiceError, TargetError
from mainstem.targets import Target
from mainstem.units import Unit

Score = Literal["direct", "additive"]
SCORES: tuple[str, ...] = get_args(Score)
POINTS = 32


@dataclass(frozen=True, eq=False)
class Functional:
    """A linear function of the stream: `direction` [d_model], and what the readout's own constants add to it.

    `total` is what all parts and constants should sum to.
    """

    score: Score
    direction: Float[Tensor, " d_model"]
    constants: dict[Unit, float]
    total: float


@dataclass(frozen=True, eq=False)
class Attribution:
    """Scores of all parts under one functional.

    Attributes:
        scores: one tensor for each group of the decomposition.
        unexplained: total minus everything, in nats.
    """

    functional: Functional
    decomposition: Decomposition
    scores: list[Float[Tensor, " _"]]
    unexplained: float

    @property
    def positives(self) -> float:
        """The sum of the positive scores."""
        return float(sum(score.clamp_min(0).sum() for score in self.scores))

    @property
    def net(self) -> float:
        """The sum of all scores."""
        return float(sum(score.sum() for score in self.scores))

    def top(self, count: int, kinds: set[str] | None = None, negative: bool = False) -> list["Scored"]:
        """The parts with the largest (or, with `negative`, smallest) scores, ties ordered by address."""
        return best_of(self.decomposition.groups, self.scores, count, kinds, negative)


@dataclass(frozen=True, eq=False)
class Scored:
    """One part with its score.

    For a continuation the score is a sum: `shares` are its terms by step, `groups` the part's group at each step (None:
    not there), and `group` the one at the step where the share is largest. Both are empty for other targets.
    """

    unit: Unit
    group: Group
    index: int
    score: float
    shares: tuple[float, ...] = ()
    groups: tuple[Group | None, ...] = ()

    @classmethod
    def at_steps(cls, unit: Unit, groups: tuple[Group | None, ...], index: int, shares: Sequence[float]) -> "Scored":
        """A part whose score is the sum of its shares at the steps of a target."""
        there = [step for step, group in enumerate(groups) if group is not None]
        group = groups[max(there, key=lambda step: abs(shares[step]))]
        assert group is not None
        if len(groups) == 1:
            return cls(unit, group, index, float(shares[0]))
        return cls(unit, group, index, float(sum(shares)), tuple(shares), groups)

    def at(self, step: int) -> "Scored | None":
        """The part at one step, None if it is not there."""
        if not self.groups:
            return self
        group = self.groups[step]
        return None if group is None else Scored(self.unit, group, self.index, self.shares[step])

    @property
    def coefficient(self) -> float:
        """The pattern's weight for subvalues, the activation for neurons, 1 for whole vectors."""
        return float(self.group.coefficients[self.index])

    def vector(self) -> Float[Tensor, " d_model"]:
        """The part in the stream before the final norm."""
        return self.group.vectors(torch.tensor([self.index], device=self.group.coefficients.device))[0]


def best_of(
    groups: Sequence[Group],
    scores: Sequence[Tensor],
    count: int,
    kinds: set[str] | None = None,
    negative: bool = False,
) -> list[Scored]:
    """The parts with the largest (or, with `negative`, smallest) of the groups' scores, ties ordered by address."""
    found: list[Scored] = []
    for group, own in zip(groups, scores, strict=True):
        if kinds is not None and group.kind not in kinds:
            continue
        best = own.sort(descending=not negative, stable=True)
        for value, index in zip(best.values[:count].tolist(), best.indices[:count].tolist(), strict=True):
            found.append(Scored(group.units[index], group, index, value))
    sign = 1 if negative else -1
    return sorted(found, key=lambda part: (sign * part.score, part.unit.sort_key))[:count]


def functional(decomposition: Decomposition, target: Target, score: Score = "direct") -> Functional:
    """The linear function of the stream that a score is, at the decomposition's destination.

    Raises:
        ChoiceError: if the score is unknown.
        TargetError: if the target has no such score here.
        LevelRefusedError: if the readout is not linear after its norm.
    """
    if score not in SCORES:
        raise ChoiceError("score", score, SCORES)
    if target.direction:
        return _along(decomposition, target, score)
    if target.continuation:
        raise TargetError(
            "A continuation has a destination for each of its tokens, and this is one destination",
            remedy="Explain it (`Trace.explain` runs its steps), or ask for one token at a time.",
        )
    readout = decomposition.moment.anatomy.readout
    require_linear(readout)
    scale = frozen_scale(readout, decomposition.moment.stream)
    weights, constant, total = (
        direct_weights(decomposition, target) if score == "direct" else _additive(decomposition, target)
    )
    constants: dict[Unit, float] = {}
    if readout.norm is not None and readout.norm.bias is not None:
        bias = readout.norm.bias.double()
        carried = bias if readout.before is None else readout.before(bias)
        constants[Unit.bias_of("norm")] = float(weights @ carried) * readout.scale
    if constant:
        constants[Unit.bias_of("unembed")] = constant
    return Functional(score, token_direction(readout, weights, scale), constants, total)


def _along(decomposition: Decomposition, target: Target, score: Score) -> Functional:
    """The inner product with a direction: the readout has no part in it."""
    stream = decomposition.moment.stream.double()
    if score != "direct":
        raise no_probability(score)
    if len(target.direction) != len(stream):
        raise TargetError(
            f"The direction has {len(target.direction)} numbers and the stream {len(stream)}",
            remedy=f"Give d_model = {len(stream)} numbers.",
        )
    direction = torch.tensor(target.direction, dtype=torch.float64, device=stream.device)
    return Functional("direct", direction, {}, float(direction @ stream))


def no_probability(score: str) -> TargetError:
    """The error for a score of a direction that is about probabilities."""
    return TargetError(f"A direction has no probability, and no score {score!r}", remedy="Use the score 'direct'.")


def _weights_of(target: Target, size: int, device: torch.device) -> Tensor:
    """How the target weighs the tokens' logits: its token (mean over a set) minus the mean of its rivals."""
    weights = torch.zeros(size, dtype=torch.float64, device=device)
    weights[list(target.ids)] += 1 / len(target.ids)
    if target.against:
        weights[list(target.against)] -= 1 / len(target.against)
    return weights


def direct_weights(decomposition: Decomposition, target: Target) -> tuple[Tensor, float, float]:
    """Weights over W_U's input, the unembedding bias's share, and the logit (or difference of logits) itself."""
    readout = decomposition.moment.anatomy.readout
    per_token = _weights_of(target, readout.unembedding.shape[0], readout.unembedding.device)
    chosen = per_token.nonzero().flatten()
    weights = per_token[chosen] @ readout.unembedding[chosen].double()
    constant = 0.0 if readout.bias is None else float(per_token @ readout.bias.double())
    u = decomposition.before_softmax
    return weights, constant, float(per_token @ u)


def _additive(decomposition: Decomposition, target: Target) -> tuple[Tensor, float, float]:
    """Gauss-Legendre quadrature along the ray; only W_U-sized products with distributions are needed."""
    readout = decomposition.moment.anatomy.readout
    u = decomposition.before_softmax
    per_token = _weights_of(target, len(u), u.device)
    slope = torch.zeros_like(u)
    for tau, weight in zip(*quadrature(POINTS), strict=True):
        z = softcapped(readout, tau * u)
        rate = torch.ones_like(u) if readout.softcap is None else 1 - (z / readout.softcap).pow(2)
        gradient = _gradient(z, target, per_token)
        slope += weight * rate * gradient
    dtype = working_dtype(readout)
    weights = (slope.to(dtype) @ readout.unembedding.to(dtype)).double()
    constant = 0.0 if readout.bias is None else float(slope @ readout.bias.double())
    z = softcapped(readout, u)
    uniform = -math.log(len(target.ids)) if target.against else math.log(len(u) / len(target.ids))
    return weights, constant, float(log_probability(z[None], target)) + uniform


def _gradient(z: Tensor, target: Target, per_token: Tensor) -> Tensor:
    """Gradient of log p over the logits: the distribution within the set less that over all, or the rivals' mean."""
    out = torch.zeros_like(z)
    ids = torch.tensor(target.ids, device=z.device)
    out[ids] = z[ids].softmax(0)
    return out + per_token.clamp_max(0) if target.against else out - z.softmax(-1)


def quadrature(points: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(points)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def attribute(decomposition: Decomposition, target: Target, score: Score = "direct") -> Attribution:
    """The score of every part; one inner product each.

    Raises:
        ChoiceError: if the score is unknown.
        LevelRefusedError: if the readout is not linear after its norm.
    """
    made = functional(decomposition, target, score)
    scores = [group.dot(made.direction) for group in decomposition.groups]
    explained = float(sum(s.sum() for s in scores)) + sum(made.constants.values())
    return Attribution(made, decomposition, scores, made.total - explained)


def promoted(
    decomposition: Decomposition, vectors: Float[Tensor, "top d_model"], count: int
) -> tuple[Int[Tensor, "top _"], Int[Tensor, "top _"]]:
    """The tokens that vectors of the stream promote and suppress most, under the frozen norm, logits centred.

    Centring removes the shift that is common to all tokens, which no probability sees.
    """
    readout = decomposition.moment.anatomy.readout
    scale = frozen_scale(readout, decomposition.moment.stream)
    x = normed(readout, vectors, scale, vectors=True).to(working_dtype(readout))
    logits = x @ readout.unembedding.to(x.dtype).T
    centred = logits - logits.mean(-1, keepdim=True)
    count = min(count, centred.shape[-1])
    return centred.topk(count).indices, centred.topk(count, largest=False).indices


def nats(decomposition: Decomposition, remainder: Float[Tensor, " d_model"], target: Target) -> float:
    """What an unexplained remainder of the stream is worth on the target's log-probability, to first order; or NaN."""
    readout = decomposition.moment.anatomy.readout
    if readout.opaque is not None or target.direction:
        return float("nan")
    u = decomposition.before_softmax
    z = softcapped(readout, u)
    per_token = _weights_of(target, len(u), u.device)
    rate = torch.ones_like(u) if readout.softcap is None else 1 - (z / readout.softcap).pow(2)
    gradient = _gradient(z, target, per_token)
    dtype = working_dtype(readout)
    weights = ((rate * gradient).to(dtype) @ readout.unembedding.to(dtype)).double()
    scale = frozen_scale(readout, decomposition.moment.stream)
    return float(token_direction(readout, weights, scale) @ remainder.double())
