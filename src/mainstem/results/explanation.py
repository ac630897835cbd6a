"""The result of `explain`: who wrote a prediction, with its certificates, as plain data.

The keys of `as_dict` are a contract (schema `mainstem/explain/1`): keys may be added, never renamed.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mainstem.causal.outcomes import Verification
from mainstem.results.reading import CheckSummary, Reading


@dataclass(frozen=True)
class Token:
    """The target, or one of its rivals, at the destination; `rank` from 1.

    A set has its probabilities summed, the id of its first token and the rank of its best; a continuation has its
    tokens' probabilities multiplied, the id of its first token and the rank of its worst. A direction has none.
    """

    token: str
    id: int | None
    probability: float | None
    log_probability: float | None
    rank: int | None


@dataclass(frozen=True)
class Certificate:
    """The three certificates of one result."""

    level: str
    position: int
    relative_error: float
    max_relative_error: float
    tolerance: float
    holds: bool
    parts: int
    nats: float | None
    worst_dimension: float
    labels: CheckSummary
    reads: CheckSummary
    failed: str | None = None


@dataclass(frozen=True)
class LayerRow:
    """One state of the stream: the target's lens after `unit` wrote, and what that added, in nats.

    Both are None for a direction. `top` is the likeliest token, for a continuation at each of its steps.
    """

    unit: str
    lens_log_probability: float | None
    log_probability_increase: float | None
    direct: float | None
    top: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ValueRow:
    """One unit that wrote the prediction.

    `coefficient` is the pattern's weight for subvalues, the activation for neurons; `increase` is the log-probability
    increase in nats, `additive` its share of log p + log V in nats, `direct` its share of the logit. In a ranking by
    increase, `bound` is the bound that the search used and `kl` the divergence of the two distributions: bound minus
    increase, where there is no softcap. `score` is what the values are ranked by. `direct` is the inner product with a
    direction, which has neither of the others. For a continuation `steps` are the terms of the score, and
    `coefficient`, `promotes` and `suppresses` are those of the step where the term is largest.
    """

    unit: str
    kind: str
    coefficient: float
    increase: float | None
    additive: float | None
    direct: float
    promotes: list[str]
    suppresses: list[str]
    source: str | None = None
    bound: float | None = None
    kl: float | None = None
    score: float | None = None
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class QueryRow:
    """One earlier unit that activates the value unit `of`.

    `share` is its signed part of the quantity (see `Queries`); `promotes` and `suppresses` are what it reads as in
    vocabulary space: through W_V and W_O of the head where that is its way out (`through`), else as it was written.
    """

    unit: str
    kind: str
    of: str
    share: float
    coefficient: float
    promotes: list[str]
    suppresses: list[str]
    through: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Queries:
    """What activates one value unit: the largest shares, and the account that they are part of.

    `quantity` is what the shares add up to: positives + negatives (= net) + constant = observed, with the relative
    error of that sum. `side` is value, query or key; `position` the destination, `reads` the position whose stream is
    read; `constant` is what biases of the read add.
    """

    of: str
    kind: str
    side: str
    quantity: str
    level: str
    position: int
    reads: int
    observed: float
    positives: float
    negatives: float
    net: float
    constant: float
    relative_error: float
    tolerance: float
    holds: bool
    rows: list[QueryRow] = field(default_factory=list)

    def sums(self) -> dict[str, Any]:
        """The account alone, without its rows."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


@dataclass(frozen=True)
class QueryTotals:
    """Query layers, heads or neurons over several value units: `rows` of unit, position and score, in nats.

    `values` are the value units, `left_out` those whose shares cancel so far that their ratios mean nothing, `refused`
    those that have no key, each with the reason.
    """

    over: str
    rows: list[dict[str, Any]]
    values: list[str]
    left_out: list[str]
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation(Reading):
    """One prediction explained; `steps` are the tokens of a continuation, each as it is predicted."""

    SCHEMA: ClassVar = "mainstem/explain/1"
    COMMAND: ClassVar = "explain"

    prompt: dict[str, Any]
    position: int
    target: Token
    against: list[Token]
    norm: str
    score: str
    certificate: Certificate
    layers: list[LayerRow]
    values: list[ValueRow]
    kinds: list[str]
    account: dict[str, float]
    search: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    queries: list[QueryRow] = field(default_factory=list)
    query_sums: list[dict[str, Any]] = field(default_factory=list)
    query_refusals: list[dict[str, str]] = field(default_factory=list)
    verification: Verification | None = None
    target_kind: str = "token"
    steps: list[Token] = field(default_factory=list)
