"""Every score that units can be ranked by, behind one interface: what each is, and all of them in one call.

x is the stream that the unit's sublayer read, v the unit's vector as it enters the stream (see `bases`), m its
coefficient (pattern weight, activation; 1 for whole vectors), w the target. The scores compared by Yu and Ananiadou
(EMNLP 2024, table 2) and two rivals from the literature on gradients:

    increase              log p(w | x + v) - log p(w | x), nats
    additive, direct      shares of log p + log d_vocab, and of the logit (see `attribution`)
    log-probability       log p(w | v): the softmax of the unit's vector alone
    probability-increase  p(w | x + v) - p(w | x)
    norm                  size of v / m: of the vector that the coefficient multiplies (an FFN neuron's column)
    coefficient           |m|
    reciprocal-rank       1 / rank of w among all tokens in the logits of v alone; ranks from 1
    coefficient-norm      |m| x norm: the size of v (Geva et al. 2022)
    coefficient-rank      |m| / rank
    gradient              the change of log p(w) per relative change of the unit, in the real model
    integrated-gradients  the same, integrated while its layer is turned on (Dai et al. 2022)

Norm conventions: under `frozen` v alone is read by the final norm's scale and gain and the unembedding, with no bias
(as in the method's published code); under `recompute` as the model would read a stream that is v, biases included.
`additive` is defined under `frozen` only. norm, coefficient, coefficient-norm and the two gradients know no convention.

Those that need the model run again (`Rule.measured`) come from `mainstem.causal.gradients`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.attribution import Scored, attribute, best_of
from mainstem.analysis.bases import CHUNK, Entry, entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import NORMS, NormConvention, check_norm
from mainstem.analysis.recomputed import direct_recomputed
from mainstem.analysis.vocabulary import VOCABULARY_SCORES, vocabulary_scores
from mainstem.errors import ChoiceError, NotFiniteError, UsageError
from mainstem.targets import Target


@dataclass(frozen=True)
class Rule:
    """What a score allows: `signed` if its smallest values speak against the target, norms, rivals of the target.

    `measured` scores need the model to run again.
    """

    signed: bool = True
    norms: tuple[str, ...] = NORMS
    rivals: bool = True
    measured: bool = False


RULES: dict[str, Rule] = {
    "increase": Rule(),
    "additive": Rule(norms=("frozen",)),
    "direct": Rule(),
    "log-probability": Rule(),
    "probability-increase": Rule(rivals=False),
    "norm": Rule(signed=False),
    "coefficient": Rule(signed=False),
    "reciprocal-rank": Rule(signed=False, rivals=False),
    "coefficient-norm": Rule(signed=False),
    "coefficient-rank": Rule(signed=False, rivals=False),
    "gradient": Rule(measured=True),
    "integrated-gradients": Rule(measured=True),
}
RANKINGS: tuple[str, ...] = tuple(RULES)
PUBLISHED: tuple[str, ...] = (
    "increase",
    "log-probability",
    "probability-increase",
    "norm",
    "coefficient",
    "reciprocal-rank",
    "coefficient-norm",
    "coefficient-rank",
)
"""The scores of the published comparison; its ninth row is the model itself."""

CONSTANT = ("embedding", "bias", "rounding")
"""Kinds of parts that are no units to rank."""


def check_score(name: str, norm: str = "frozen", negative: bool = False, rivals: bool = False) -> None:
    """Refuses a score that is unknown, or that the norm, the direction or the rivals do not go with.

    Raises:
        ChoiceError: if the score or the norm is unknown.
        UsageError: if the score is not defined so.
    """
    if name not in RULES:
        raise ChoiceError("score", name, RANKINGS)
    check_norm(norm)
    rule = RULES[name]
    if norm not in rule.norms:
        raise UsageError(
            f"The score {name!r} is defined under the {rule.norms[0]} norm only",
            f"--norm {norm}",
            f"Use --norm {rule.norms[0]}, or another score.",
        )
    if negative and not rule.signed:
        raise UsageError(
            f"The score {name!r} is a size: its smallest values do not speak against a token",
            "--negative",
            "Leave out --negative, or use a score with a sign, such as increase.",
        )
    if rivals and not rule.rivals:
        raise UsageError(
            f"The score {name!r} is of a token, not of its contrast with rivals",
            "--against",
            "Leave out the rivals, or use another score, such as increase.",
        )


def chosen_groups(decomposition: Decomposition, kinds: Iterable[str] | None = None) -> list[Group]:
    """The groups of the chosen kinds, in the decomposition's order; all that hold units by default."""
    if kinds is None:
        return [group for group in decomposition.groups if group.kind not in CONSTANT]
    wanted = set(kinds)
    return [group for group in decomposition.groups if group.kind in wanted]


def score_all(
    decomposition: Decomposition,
    target: Target,
    names: Sequence[str],
    norm: NormConvention = "frozen",
    kinds: Iterable[str] | None = None,
) -> dict[str, list[Float[Tensor, " part"]]]:
    """Several scores of every unit at once, float64, one tensor for each of `chosen_groups(decomposition, kinds)`.

    Scores that read the vocabulary share one product with the unembedding for each chunk of units (two under
    `recompute`): never units x vocabulary at once. Cost: 2 x units x d_model x d_vocab operations for all of them
    together; the others cost an inner product or a norm per unit.

    Args:
        decomposition: of any level.
        target: a token, a set, or a token against rivals.
        names: which scores (see the module); not those that are measured.
        norm: `frozen` or `recompute`.
        kinds: of the units; all by default.

    Raises:
        ChoiceError, UsageError: as `check_score`; a measured score needs `Trace.scores`.
        LevelRefusedError: if a score needs a readout that is a norm and an unembedding, and there is none.
        NotFiniteError: if a score is NaN or infinite; names the unit.
    """
    for name in names:
        check_score(name, norm, rivals=bool(target.against))
        if RULES[name].measured:
            raise UsageError(f"The score {name!r} needs the model to run again", None, "Ask the trace: Trace.scores.")
    groups = chosen_groups(decomposition, kinds)
    vocabulary = [name for name in VOCABULARY_SCORES if name in names]
    if "coefficient-rank" in names and "reciprocal-rank" not in vocabulary:
        vocabulary.append("reciprocal-rank")
    found = vocabulary_scores(decomposition, target, vocabulary, norm, groups) if vocabulary else {}
    if {"norm", "coefficient-norm"} & set(names):
        found["norm"] = _norms(decomposition, groups)
    sizes = [group.coefficients.double().abs() for group in groups]
    found["coefficient"] = sizes
    for name, factor in (("coefficient-norm", "norm"), ("coefficient-rank", "reciprocal-rank")):
        if name in names:
            found[name] = [m * other for m, other in zip(sizes, found[factor], strict=True)]
    for name in {"additive", "direct"} & set(names):
        found[name] = _linear(decomposition, target, name, norm, groups)
    out = {name: found[name] for name in names}
    for name, scores in out.items():
        require_finite(groups, scores, name)
    return out


def _linear(decomposition: Decomposition, target: Target, name: str, norm: str, groups: list[Group]) -> list[Tensor]:
    if name == "direct" and norm == "recompute":
        scores = direct_recomputed(decomposition, target).scores
    else:
        scores = attribute(decomposition, target, name).scores  # type: ignore[arg-type]
    by_group = {id(group): own for group, own in zip(decomposition.groups, scores, strict=True)}
    return [by_group[id(group)].double() for group in groups]


def _norms(decomposition: Decomposition, groups: list[Group]) -> list[Tensor]:
    places = entries(decomposition)
    return [_norms_of(places[group.sublayer or group.units[0]], group) for group in groups]


def _norms_of(entry: Entry, group: Group) -> Tensor:
    out = []
    for start in range(0, len(group), CHUNK):
        index = torch.arange(start, min(start + CHUNK, len(group)), device=entry.base.device)
        out.append(entry.directions(group, index).norm(dim=-1))
    return torch.cat(out) if out else entry.base.new_zeros(0)


def require_finite(groups: Sequence[Group], scores: Sequence[Tensor], name: str) -> None:
    """NotFiniteError naming the first unit whose score is NaN or infinite."""
    for group, own in zip(groups, scores, strict=True):
        bad = (~torch.isfinite(own)).nonzero().flatten()
        if len(bad):
            raise NotFiniteError(
                f"The score {name!r} of {group.units[int(bad[0])]} is {float(own[bad[0]])}",
                None,
                "Use a wider dtype, such as --dtype float32, or another score.",
            )


@dataclass(frozen=True, eq=False)
class Scores:
    """Several scores of the units of one decomposition: `values[name]` has one tensor for each of `groups`."""

    decomposition: Decomposition
    groups: list[Group]
    norm: NormConvention
    values: dict[str, list[Float[Tensor, " part"]]]

    def top(self, name: str, count: int, negative: bool = False) -> list[Scored]:
        """The `count` units with the largest score (smallest, with `negative`), ties ordered by address."""
        if name not in self.values:
            raise ChoiceError("score", name, tuple(self.values))
        check_score(name, self.norm, negative)
        return best_of(self.groups, self.values[name], count, negative=negative)
