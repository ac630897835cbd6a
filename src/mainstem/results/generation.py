"""What a model wrote with edits and without, as plain data: the result of `generate`, `compare` and `mainstem steer`.

The keys of `Compared.as_dict` are a contract (schema `mainstem/steer/1`): keys may be added, never renamed. Nothing
here imports torch, so a result that was saved can be rendered without a model.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mainstem.results.reading import Reading


@dataclass(frozen=True)
class Generated:
    """A text that the model wrote.

    Attributes:
        tokens, ids: what was written after the prompt.
        log_probabilities: of each written token, in nats.
        text: the same as one text.
        stopped: whether the model ended it.
        cached: whether keys and values were kept from token to token.
        difference: the largest difference of a log-probability to that of one pass over the whole text without a cache;
            None for a model that attends both ways, whose pass over the whole text is another.
        note: why no cache was used, where the model has one.
    """

    tokens: list[str]
    ids: list[int]
    log_probabilities: list[float]
    text: str
    stopped: bool
    cached: bool
    difference: float | None
    note: str | None = None


@dataclass(frozen=True)
class Likelihood:
    """How probable a text is after the prompt: the sum of its tokens' log-probabilities, in nats, without and with."""

    text: str
    tokens: list[str]
    plain: float
    edited: float


@dataclass(frozen=True)
class Compared(Reading):
    """Side by side: what the model writes without the edits and with them.

    Attributes:
        provenance: versions, model, dtype, seed, date.
        warnings: what to keep in mind when reading it, each a code, a sentence and a number.
        model: its name, size and dtype.
        prompt: `text` (None for token ids), `tokens`, `ids`.
        edits: each edit in words, in the order in which they are made.
        count: how many tokens were asked for.
        temperature: 0 for the likeliest token each time.
        plain, edited: the two texts.
        same: how many written tokens they begin with in common.
        continuations: how probable chosen texts are in both.
        notes: sentences that are no warnings.
    """

    SCHEMA: ClassVar = "mainstem/steer/1"
    COMMAND: ClassVar = "steer"

    prompt: dict[str, Any]
    edits: list[str]
    count: int
    temperature: float
    plain: Generated
    edited: Generated
    same: int
    continuations: list[Likelihood] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
