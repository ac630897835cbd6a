"""The result of `heads` as plain data: what each head does, beside a null, and what is lost without the heads found.

The keys of `as_dict` are a contract (schema `mainstem/heads/1`): keys may be added, never renamed. Nothing here imports
torch, so a result that was saved can be rendered without a model.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from mainstem.results.reading import Reading


@dataclass(frozen=True)
class HeadRow:
    """One head's score for one behaviour.

    Attributes:
        head: its address.
        layer, index: where it is.
        score: its mean over examples: attention to what the behaviour looks at; for copying from -1 to 1.
        control: the same on tokens that are not repeated, at the same positions; for copying the same for tokens that
            are not attended to; None where there is none.
        excess: score - control; the score itself without one.
        without_sink: the score as a part of the attention that does not go to the first position.
        sink: the attention that does.
        null: the mean of its own null measures.
        p, q: how often the pooled null is as large, and the false discovery rate at which the head passes.
        rank, rank_without_sink: among all heads, from 1.
        found: whether q is small and the excess large enough.
    """

    head: str
    layer: int
    index: int
    score: float
    control: float | None
    excess: float
    without_sink: float | None
    sink: float | None
    null: float
    p: float
    q: float
    rank: int
    rank_without_sink: int | None
    found: bool


@dataclass(frozen=True)
class BehaviourReading:
    """One behaviour on one kind of text, all heads in the order of their scores.

    Attributes:
        name: `prefix`, `legacy`, `duplicate`, `previous`, `first`, `copying` or `copying-alone`.
        data: `random` (repeated random tokens) or `text`.
        threshold: how large the excess of a head that counts as found is.
        null: how many measures the pooled null has, its 0.95 and 1 quantiles.
        heads: all heads.
    """

    name: str
    data: str
    threshold: float
    null: dict[str, float]
    heads: list[HeadRow]

    def found(self) -> list[str]:
        """The addresses of the heads found."""
        return [row.head for row in self.heads if row.found]


@dataclass(frozen=True)
class Control:
    """Other heads of the same layers taken out, once for each draw: by how much the loss rises."""

    heads: list[list[str]]
    repeated: list[float]
    first: list[float]


@dataclass(frozen=True)
class AblationRow:
    """Heads of one behaviour taken out together, by one method.

    Attributes:
        behaviour, heads, method: what was taken out, and how: `zero`, `mean` or `resample`.
        repeated: by how much the loss rises on the second copy of random tokens, in nats for each token.
        first: the same on the first copy, where nothing can be known.
        control: the same for random heads of the same layers.
        ratio: `repeated` over the mean size of the controls'; None where they do nothing at all.
    """

    behaviour: str
    heads: list[str]
    method: str
    repeated: float
    first: float
    control: Control
    ratio: float | None


@dataclass(frozen=True)
class InContext:
    """The in-context-learning score: how much lower the loss of a token is with a long context than with a short one.

    Attributes:
        mean, low, high: loss late - loss early of the same tokens, nats, with its bootstrap interval; negative: better.
        early, late: how many tokens come before, about; the published 50 and 500 scaled to `context`.
        context: how long a context is.
        tokens: how many tokens were compared.
        without: the mean without the heads found for `prefix`, at their means; None if it was not asked for.
    """

    mean: float
    low: float
    high: float
    early: int
    late: int
    context: int
    tokens: int
    without: float | None = None


@dataclass(frozen=True)
class HeadsReading(Reading):
    """What was found about the heads of a model.

    Attributes:
        tokens: the random tokens: `period`, `repeats`, `examples`, `first` (what stands in front), `pool`.
        text: the text: `windows`, `length`.
        heads: the addresses that are listed, of `count` in all.
        behaviours: what was measured.
        looks_first: by kind of text, for each head the part of destinations that look most at the first position.
        loss: the mean loss on the first and on later copies of random tokens, nats.
        in_context: the in-context-learning score; None where there is no text.
        ablations: heads taken out; empty if it was not asked for.
    """

    SCHEMA: ClassVar = "mainstem/heads/1"
    COMMAND: ClassVar = "heads"

    tokens: dict[str, Any]
    text: dict[str, Any]
    count: int
    heads: list[str]
    behaviours: list[BehaviourReading]
    looks_first: dict[str, dict[str, float]]
    loss: dict[str, float]
    in_context: InContext | None
    ablations: list[AblationRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self) -> list[dict[str, Any]]:
        """Every head's score for every behaviour as a row of a table."""
        return [
            {"behaviour": one.name, "data": one.data, **asdict(row)} for one in self.behaviours for row in one.heads
        ]

    def about(self) -> dict[str, Any]:
        """The document without the rows of `cells`."""
        document = self.as_dict()
        for one in document["behaviours"]:
            del one["heads"]
        return document

    def get(self, name: str, data: str = "random") -> BehaviourReading:
        """A behaviour that was measured on a kind of text."""
        return next(one for one in self.behaviours if (one.name, one.data) == (name, data))
