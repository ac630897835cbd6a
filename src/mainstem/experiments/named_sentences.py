"""Sentences that say two things independently: their subject, and the token before the last.

"Then Mary saw the lamp and": the last token is the same in all of them, so that whatever the last position knows of
either was moved there by attention. Words are one token each after a space. A third of each kind's words are held out:
training sentences have none of them, test sentences no others.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.errors import UsageError
from mainstem.lab.wording import NAMES, NOUNS

if TYPE_CHECKING:
    from mainstem.session import Model

SENTENCE = "Then {subject} saw the {previous} and"
WORDS = {"previous token": NOUNS, "subject": NAMES}
KINDS = tuple(WORDS)

FEWEST = 45
"""How many words of each kind have to be single tokens."""


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences of equal length.

    Attributes:
        ids: their tokens.
        types: by kind, which of its words each has.
        words: by kind, how many words there are.
        places: by kind, the position of the word.
    """

    ids: Int[Tensor, "batch pos"]
    types: dict[str, Int[Tensor, " batch"]]
    words: dict[str, int]
    places: dict[str, int]

    def part(self, which: slice) -> "Sentences":
        """Some of the sentences."""
        types = {kind: types[which] for kind, types in self.types.items()}
        return Sentences(self.ids[which], types, self.words, self.places)


def sentences(model: "Model", training: int, testing: int) -> Sentences:
    """Sentences drawn by the model's seed, those for training first.

    Raises:
        UsageError: if too few words are single tokens of the model's tokenizer.
    """
    generator = torch.Generator().manual_seed(model.seed)
    chosen, types = {}, {}
    for kind, words in WORDS.items():
        single = [word for word in words if len(model.encode(f"the {word}")) == len(model.encode("the")) + 1]
        if len(single) < FEWEST:
            text = f"{len(single)} of {len(words)} words are single tokens"
            raise UsageError(text, model.loaded.name, f"Take a model with {FEWEST} of them.")
        chosen[kind] = [single[i] for i in torch.randperm(len(single), generator=generator).tolist()]
        held = len(single) // 3
        counts = ((held, len(single) - held, training), (0, held, testing))
        types[kind] = torch.cat([_drawn(*count, generator) for count in counts])
    texts = [
        SENTENCE.format(
            previous=chosen["previous token"][int(types["previous token"][i])],
            subject=chosen["subject"][int(types["subject"][i])],
        )
        for i in range(training + testing)
    ]
    ids = torch.tensor([model.encode(text) for text in texts])
    places = {kind: _place(ids, types[kind]) for kind in KINDS}
    ids = ids.to(next(model.module.parameters()).device)
    return Sentences(ids, types, {kind: len(words) for kind, words in chosen.items()}, places)


def _drawn(first: int, words: int, count: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
    """As many of each of some words, in any order."""
    return first + torch.arange(count)[torch.randperm(count, generator=generator)] % words


def _place(ids: Int[Tensor, "batch pos"], types: Int[Tensor, " batch"]) -> int:
    """The position whose token says which type it is."""
    for place in range(ids.shape[1]):
        column = ids[:, place]
        if len(column.unique()) > 1 and all(len(column[types == kind].unique()) == 1 for kind in types.unique()):
            return place
    raise UsageError("No single token says what the sentences differ in", None, "Take another model.")
