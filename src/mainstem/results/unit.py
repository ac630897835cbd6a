"""What one unit says in the vocabulary, as plain data: tokens, the null beside them, and the sigmoid of one token.

Nothing here imports torch.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenLogit:
    """A token and what a unit adds to its logit, less what it adds to the mean of all (frozen norm)."""

    token: str
    id: int
    logit: float


@dataclass(frozen=True)
class Null:
    """What random directions of the unit's norm give: the mean and standard deviation of their largest centred logit.

    Attributes:
        directions: how many were drawn; each and its opposite count.
        z_promotes, z_suppresses: by how many standard deviations the unit's largest (smallest) exceeds that mean.
        promotes_beyond, suppresses_beyond: whether it exceeds that of 99 in 100 random directions.
        beyond_null: whether either does.
    """

    directions: int
    null_max_mean: float
    null_max_deviation: float
    z_promotes: float
    z_suppresses: float
    promotes_beyond: bool
    suppresses_beyond: bool
    beyond_null: bool


@dataclass(frozen=True)
class Sigmoid:
    """p(w) as a unit's before-softmax value l on the token w grows, all other tokens left alone: A e^l / (A e^l + B).

    A = e^bs_w(x) and B, the sum of e^bs over the other tokens, at the stream value x that the unit's sublayer read;
    frozen norm (Yu et al. 2023, section 3).

    Attributes:
        log_a, log_b: their logarithms.
        values, probabilities: the curve.
        value: the unit's own l.
        alone: p on the curve there: what the unit would do by this token alone.
        others: log B' / B, what it does to the other tokens together; p is on the curve at value - others.
        before, probability: p without the unit, and with the whole vector.
    """

    token: str
    id: int
    log_a: float
    log_b: float
    values: list[float]
    probabilities: list[float]
    value: float
    alone: float
    others: float
    before: float
    probability: float


@dataclass(frozen=True)
class UnitReading:
    """One unit read in the vocabulary, at one destination.

    `coefficient` is the pattern's weight for subvalues, the activation for neurons, 1 for whole vectors; its sign is
    in all that is listed. `size` is the norm of the unit's vector in the stream before the final norm.
    """

    unit: str
    kind: str
    coefficient: float
    size: float
    promotes: list[TokenLogit]
    suppresses: list[TokenLogit]
    null: Null
    sigmoids: list[Sigmoid] = field(default_factory=list)
    source: str | None = None

    @property
    def beyond_null(self) -> bool:
        """Whether the tokens say more than those of a random direction would."""
        return self.null.beyond_null
