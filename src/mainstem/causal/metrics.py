"""Metrics of a patched run: numbers that say how much of the clean run's answer is there.

A metric is a pure, differentiable function of the logits at one destination, for a batch of runs; logits go in in the
model's dtype and everything after that is float64. With r the answers, w the wrong answers, z the logits and p their
softmax:

    logit-difference   mean of z_r - mean of z_w                     logits; says which answer wins, and is linear in z
    probability        sum of p_r                                    hides what pushes an answer below 0 or beyond 1
    log-probability    logsumexp of log p_r                          nats; of the set's summed probability
    kl                 sum over tokens of p_clean (log p_clean - log p)      nats; 0 for the clean run, needs no answers

`normalised` puts a metric between its values on the corrupted run (0) and on the clean one (1): (m - m_corrupted) /
(m_clean - m_corrupted) (Wang et al. 2022, "Interpretability in the Wild"; Heimersheim and Nanda 2024, "How to use and
interpret activation patching"). It serves both directions of patching.

Where the two runs' metrics are equal up to rounding, the score would be noise divided by noise and is refused. Rounding
is what an error of e = 2 eps(dtype of the logits) max |logit| in every logit does to the metric: e for logits and
nats, e times the probability for a probability, and e squared (KL grows with the square of a small change) plus the
float64 sum's own rounding for `kl`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.errors import ChoiceError, MetricError, TargetError
from mainstem.targets import check_token_id

MetricName = Literal["logit-difference", "probability", "log-probability", "kl"]

METRICS: tuple[MetricName, ...] = get_args(MetricName)


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric, with the tokens or the run that it compares with.

    Attributes:
        name: which of `METRICS`.
        answers: ids of the right answers; all but `kl` need one at least.
        wrong_answers: ids of the wrong ones; `logit-difference` needs one at least, the others ignore them.
        clean_logits: [d_vocab] of the clean run at the destination; `kl` needs them.

    Raises:
        ChoiceError: if there is no metric of that name.
        MetricError: if it lacks its answers, its wrong answers or the clean run.
        TargetError: if a token is named twice, or is an answer and a wrong one.
    """

    name: MetricName
    answers: tuple[int, ...] = ()
    wrong_answers: tuple[int, ...] = ()
    clean_logits: Float[Tensor, " d_vocab"] | None = None

    def __post_init__(self) -> None:
        if self.name not in METRICS:
            raise ChoiceError("metric", self.name, METRICS)
        if self.name == "kl" and self.clean_logits is None:
            raise MetricError("The KL divergence needs the clean run", None, "Give the clean run's logits.")
        if self.name != "kl" and not self.answers:
            raise MetricError(f"The metric {self.name} has no answer", None, "Name one answer at least, or take kl.")
        if self.name == "logit-difference" and not self.wrong_answers:
            raise MetricError(
                "A logit difference needs wrong answers", None, "Name one at least, or take log-probability."
            )
        _check_distinct(self.answers, self.wrong_answers)

    def __call__(self, logits: Float[Tensor, "run d_vocab"]) -> Float[Tensor, " run"]:
        """The metric of each run, in float64.

        Raises:
            TokenError: if an answer is outside the vocabulary.
        """
        for token in (*self.answers, *self.wrong_answers):
            check_token_id(token, logits.shape[-1])
        z = logits.double()
        if self.name == "logit-difference":
            return z[:, list(self.answers)].mean(-1) - z[:, list(self.wrong_answers)].mean(-1)
        log_p = z.log_softmax(-1)
        if self.name == "kl":
            assert self.clean_logits is not None
            return _divergence(self.clean_logits.to(z).log_softmax(-1), log_p)
        log_probability = log_p[:, list(self.answers)].logsumexp(-1)
        return log_probability if self.name == "log-probability" else log_probability.exp()


@dataclass(frozen=True, eq=False)
class OwnMetric:
    """A caller's own function of logits; it gets a copy of them, and what it gives is checked."""

    function: Callable[[Float[Tensor, "run d_vocab"]], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise MetricError(f"{self.function!r} is no metric", None, f"Give a function, or {', '.join(METRICS)}.")

    @property
    def name(self) -> str:
        """The function's name."""
        return metric_name(self.function)

    def __call__(self, logits: Float[Tensor, "run d_vocab"]) -> Float[Tensor, " run"]:
        """The metric of each run.

        Raises:
            MetricError: if it is not one number for each run.
        """
        found = self.function(logits.clone())
        if not isinstance(found, Tensor) or found.shape != logits.shape[:1] or found.is_complex():
            shape = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise MetricError(
                f"The metric gives {shape} for logits of shape {list(logits.shape)}",
                self.name,
                "Give a tensor of one number for each run: its shape is [run].",
            )
        return found


def checked_metric(metric: Any) -> "Metric | OwnMetric":
    """A metric as it is, or a caller's own with its results checked.

    Raises:
        MetricError: if it cannot be called.
    """
    return metric if isinstance(metric, Metric) else OwnMetric(metric)


def metric_name(metric: Callable[..., Any]) -> str:
    """A metric's name, or that of a function."""
    return str(getattr(metric, "name", None) or getattr(metric, "__qualname__", type(metric).__name__))


@dataclass(frozen=True, eq=False)
class Recovery:
    """A metric scaled so that the corrupted run has 0 and the clean run 1; made by `normalised`.

    Attributes:
        metric: what is scaled.
        clean, corrupted: its values on the two runs.
    """

    metric: Metric
    clean: float
    corrupted: float

    def __call__(self, logits: Float[Tensor, "run d_vocab"]) -> Float[Tensor, " run"]:
        """The recovery of each run, in float64; beyond 0 and 1 where a run is beyond the two."""
        return (self.metric(logits) - self.corrupted) / (self.clean - self.corrupted)


def normalised(
    metric: Metric, clean_logits: Float[Tensor, " d_vocab"], corrupted_logits: Float[Tensor, " d_vocab"]
) -> Recovery:
    """The recovery between two runs.

    Args:
        metric: what to scale.
        clean_logits: of the clean run at the destination, in the dtype that the model computed.
        corrupted_logits: likewise of the corrupted run.

    Raises:
        MetricError: if the metric is the same on both runs up to the rounding of their dtype, or is not finite.
    """
    both = torch.stack([clean_logits, corrupted_logits]).detach()
    clean, corrupted = metric(both).tolist()
    tolerance = _rounding(metric, both, max(abs(clean), abs(corrupted)))
    if not math.isfinite(clean - corrupted):
        raise MetricError(f"The metric {metric.name} is {clean} on the clean run and {corrupted} on the corrupted one")
    if abs(clean - corrupted) <= tolerance:
        raise MetricError(
            f"The metric {metric.name} is {clean:.6g} on the clean run and {corrupted:.6g} on the corrupted one: "
            f"rounding cannot tell them apart (tolerance {tolerance:.2g}), so there is nothing to recover",
            remedy="Change the corrupted prompt or the answers, or ask for the metric itself, not normalised.",
        )
    return Recovery(metric, clean, corrupted)


def _rounding(metric: Metric, logits: Float[Tensor, "run d_vocab"], size: float) -> float:
    """How far rounding of the logits can move the metric."""
    finite = logits[logits.isfinite()].double()
    largest = float(finite.abs().max()) if len(finite) else 0.0
    error = 2 * torch.finfo(logits.dtype).eps * largest
    if metric.name == "kl":
        return error**2 + 2 * torch.finfo(torch.float64).eps * largest
    return error * size if metric.name == "probability" else error


def _divergence(log_p: Float[Tensor, " d_vocab"], log_q: Float[Tensor, "run d_vocab"]) -> Float[Tensor, " run"]:
    """KL(p || q) of each run; tokens that p excludes count nothing, also where q excludes them too."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def _check_distinct(answers: tuple[int, ...], wrong_answers: tuple[int, ...]) -> None:
    for ids in (answers, wrong_answers):
        if len(set(ids)) < len(ids):
            twice = next(token for token in ids if ids.count(token) > 1)
            raise TargetError(f"The answer id:{twice} is named twice", remedy="Name each answer once.")
    if shared := sorted(set(answers) & set(wrong_answers)):
        shown = ", ".join(f"id:{token}" for token in shared)
        raise TargetError(f"An answer is right and wrong at once ({shown})", remedy="Name other wrong answers.")
