"""What a command found over many prompts, as plain data: means with intervals, and what became of each prompt.

The keys of `PromptSetReading.as_dict` are a contract (schemas `mainstem/explain-prompts/1`, `mainstem/lens-prompts/1`,
`mainstem/steer-prompts/1`): keys may be added, never renamed. Nothing here imports torch.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from mainstem.results.patch import StabilityRow
from mainstem.results.reading import Reading


@dataclass(frozen=True)
class Mean:
    """A mean over prompts; `low` and `high` end its bootstrap interval of 95 %, None for one prompt."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class MeanRow:
    """What `name` is about (a unit, a state of the stream, the answers), and the mean of each quantity.

    `listed` says among the first of how many prompts a unit was, `sources` which source positions those had; both are
    None for what is no unit.
    """

    name: str
    means: dict[str, Mean]
    listed: int | None = None
    sources: list[int] | None = None


@dataclass(frozen=True)
class PromptRow:
    """One prompt: where it stands in the file, its tokens, its answers, and its own numbers and texts.

    `failed` says which certificate does not hold, and where; `counted` is whether it is part of the means all the same.
    """

    where: str
    tokens: list[str]
    ids: list[int]
    answers: list[str]
    wrong_answers: list[str]
    counted: bool = True
    failed: str | None = None
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSetReading(Reading):
    """The same command on many prompts, and what they say together.

    Attributes:
        provenance, model: as in every result.
        warnings: those of the prompts' results, each once, with `prompts`: on how many.
        of: the command.
        options: what was asked of each prompt.
        prompts: every prompt, in the order of the file.
        rows: the command's means: units by mean score, states of the stream, probabilities of the answers.
        outcomes: means that are not of the command's rows, such as the target's probability.
        verdicts: with a causal verdict, how many prompts have each; else empty.
        elsewhere: no unit that is missing from the rows has a mean score beyond this; None for other commands.
        stability: how well halves of the prompts agree about the rows' first quantity; None where that is undefined.
        notes: sentences that are no warnings.
    """

    of: str
    options: dict[str, Any]
    prompts: list[PromptRow]
    rows: list[MeanRow]
    outcomes: list[MeanRow] = field(default_factory=list)
    verdicts: dict[str, int] = field(default_factory=dict)
    elsewhere: float | None = None
    stability: StabilityRow | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """How many prompts the means are over."""
        return sum(prompt.counted for prompt in self.prompts)

    @property
    def failed(self) -> list[PromptRow]:
        """The prompts of which a certificate does not hold."""
        return [prompt for prompt in self.prompts if prompt.failed is not None]

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        found = {name: value for name, value in asdict(self).items() if name != "of"}
        return {"schema": f"mainstem/{self.of}-prompts/1", "command": self.of, **found, "counted": self.counted}
