"""What an ablation does, as plain data: the rows of a causal verdict, without torch."""

from dataclasses import dataclass, field
from typing import Literal

Method = Literal["zero", "mean", "resample"]
Verdict = Literal["not causal", "causal", "causal and specific"]
RANDOM = ("random anywhere", "random, same layers", "norm-matched, same layers")
NAMED = ("top of unrelated tokens", "top of rivals of its kind", "top of the runner-up")


@dataclass(frozen=True)
class Outcome:
    """The target in one run, or its mean over several; `reciprocal_rank` averages to the MRR."""

    probability: float
    log_probability: float
    rank: float
    reciprocal_rank: float


@dataclass(frozen=True)
class AblationRow:
    """One set taken out by one method."""

    name: str
    method: Method
    units: int
    draws: int
    outcome: Outcome


@dataclass(frozen=True)
class Control:
    """The target's probability over the draws of one control, all zeroed.

    Attributes:
        name: which control.
        draws: how many sets.
        mean, min, max: of the probability.
        largest_drop: the most that a draw lowered the log-probability, in nats.
        norm: the sum of the norms of a draw's writes over that of the top units', on average.
        beaten: whether the top units lowered the log-probability by more than every draw.
    """

    name: str
    draws: int
    mean: float
    min: float
    max: float
    largest_drop: float
    norm: float
    beaten: bool


@dataclass(frozen=True)
class Verification:
    """The causal verdict on a ranking.

    Attributes:
        ablated: addresses of the top units of each kind, and the probability without them.
        before: the target in the unchanged run.
        everywhere: taken out at all positions instead of at the destination alone.
        rows: FFN neurons alone, attention neurons alone, both; by each method.
        kept: all other neurons at their means: all but the top units, all but as many random ones of the same layers.
        controls: what taking out as many other units does.
        elsewhere: what taking out the top units does to the predictions of other prompts.
        verdict: of the three.
        notes: what to know about it.
    """

    ablated: dict
    before: Outcome
    everywhere: bool
    rows: list[AblationRow]
    kept: list[AblationRow]
    controls: list[Control]
    verdict: Verdict
    elsewhere: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
