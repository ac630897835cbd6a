"""Text with planted skip trigrams: [source] ... [destination] -> [out], and nothing else to be known.

    perfect ... are -> perfect      keep ... in -> mind      keep ... at -> bay      and five more

A sequence is random words. Some sources stand in its first half; in its second half come destinations, each followed by
a word: by `out` if the source of one of its trigrams stands earlier, by a random word otherwise. So neither source nor
destination predicts `out` alone. Two trigrams share the source keep. A head of one layer can only learn them in
factored form, f1(source, destination) f2(source, out), and that forces two more that are not planted: keep ... in ->
bay and keep ... at -> mind (Elhage et al. 2021, "skip-trigram bugs"). The first three are examples of Elhage et al.'s.

Words are tokens; `tokenizer` is saved beside a model that is trained on this.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mainstem.errors import UsageError


class SkipTrigram(NamedTuple):
    """After `source` anywhere earlier, `destination` is followed by `out`."""

    source: str
    destination: str
    out: str


PLANTED = (
    SkipTrigram("perfect", "are", "perfect"),
    SkipTrigram("keep", "in", "mind"),
    SkipTrigram("keep", "at", "bay"),
    SkipTrigram("letter", "was", "written"),
    SkipTrigram("river", "near", "flooded"),
    SkipTrigram("winter", "under", "snow"),
    SkipTrigram("doctor", "with", "medicine"),
    SkipTrigram("garden", "of", "roses"),
)
"""What is planted."""

FORCED = (SkipTrigram("keep", "in", "bay"), SkipTrigram("keep", "at", "mind"))
"""What the second and the third force on a model that has them in factored form."""

# fmt: off
FILLERS = (
    "ash", "bell", "boat", "bread", "candle", "cloud", "coin", "door", "dust", "field", "fire", "glass", "hand", "hill",
    "horse", "house", "lamp", "leaf", "light", "moon", "night", "oak", "path", "rain", "road", "rope", "sand", "ship",
    "silver", "sky", "song", "star", "stone", "storm", "street", "table", "tower", "tree", "voice", "wall", "wind",
    "wood",
)
# fmt: on
"""Words that mean nothing here."""


class PlantedText(NamedTuple):
    """Sequences, and which of their tokens the trigrams predict."""

    ids: Int[Tensor, "batch pos"]
    planted: Bool[Tensor, "batch pos"]


@dataclass(frozen=True)
class SkipTrigramText:
    """Draws such text; called with a step it gives that step's ids, as `train` wants them.

    Attributes:
        trigrams: what is planted; no source of one is a destination of another.
        length: of a sequence.
        batch: sequences of a step.
        sources: different sources in a sequence.
        destinations: in a sequence.
        seed: of the sequences.

    Raises:
        UsageError: sources or destinations do not fit, or a word is both.
    """

    trigrams: tuple[SkipTrigram, ...] = PLANTED
    length: int = 24
    batch: int = 64
    sources: int = 2
    destinations: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        both = self._all("source") & self._all("destination")
        if both:
            raise UsageError(
                f"{', '.join(sorted(both))} is both source and destination", "trigrams", "Use other words."
            )
        if self.sources > min(len(self._all("source")), self.length // 2) or 4 * self.destinations > self.length:
            what = f"{self.sources} sources and {self.destinations} destinations in {self.length} words"
            raise UsageError(what, None, "Sources differ, and a destination takes two words of the second half.")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The vocabulary, in the order of ids."""
        return tuple(dict.fromkeys([*(word for trigram in self.trigrams for word in trigram), *FILLERS]))

    def id_of(self, word: str) -> int:
        """A word's id."""
        return self.words.index(word)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Words between spaces as tokens."""
        made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(self.words)}, unk_token=FILLERS[0]))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
        return PreTrainedTokenizerFast(tokenizer_object=made)

    def __call__(self, step: int) -> Int[Tensor, "batch pos"]:
        """The ids of a step."""
        return self.sample(step).ids

    def sample(self, step: int) -> PlantedText:
        """The sequences of a step, and which of their tokens are the outs of planted trigrams."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + step)
        fillers = torch.tensor([self.id_of(word) for word in FILLERS])
        ids = fillers[torch.randint(len(fillers), (self.batch, self.length), generator=generator)]
        half = self.length // 2
        present = self._some("source", self.sources, generator)
        places = torch.rand(self.batch, half, generator=generator).argsort(1)[:, : self.sources]
        ids.scatter_(1, places, present)
        asked = self._any("destination", generator)
        slots = (self.length - half) // 2
        places = half + 2 * torch.rand(self.batch, slots, generator=generator).argsort(1)[:, : self.destinations]
        ids.scatter_(1, places, asked)
        planted = torch.zeros(self.batch, self.length, dtype=torch.bool)
        chance = torch.rand(self.batch, self.destinations, len(self.trigrams), generator=generator)
        source, destination, out = torch.tensor([[self.id_of(word) for word in each] for each in self.trigrams]).T
        holds = (present[:, None, :, None] == source).any(2) & (asked[..., None] == destination)
        chosen = (chance * holds).argmax(2)
        some = holds.any(2)
        ids.scatter_(1, places + 1, torch.where(some, out[chosen], ids.gather(1, places + 1)))
        return PlantedText(ids, planted.scatter_(1, places + 1, some))

    def _all(self, role: str) -> set[str]:
        return {getattr(trigram, role) for trigram in self.trigrams}

    def _ids(self, role: str) -> Int[Tensor, " type"]:
        return torch.tensor(sorted(self.id_of(word) for word in self._all(role)))

    def _some(self, role: str, count: int, generator: torch.Generator) -> Int[Tensor, "batch chosen"]:
        """Different words of a role for each sequence."""
        ids = self._ids(role)
        return ids[torch.rand(self.batch, len(ids), generator=generator).argsort(1)[:, :count]]

    def _any(self, role: str, generator: torch.Generator) -> Int[Tensor, "batch chosen"]:
        """Words of a role for each sequence, which may be the same."""
        ids = self._ids(role)
        return ids[torch.randint(len(ids), (self.batch, self.destinations), generator=generator)]
