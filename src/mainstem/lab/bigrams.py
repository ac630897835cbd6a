"""Bigram text with a repeated segment: text on which a model that copies is told from one that knows only pairs.

    start  b b b b b  s1 s2 s3 ... sn  b b b  s1 s2 s3 ... sn  b b
                      first copy              second copy

b is text of a sparse table: each token has a few random successors, the k-th with probability w_k, the same for all
tokens. A model of pairs predicts it as well as anything can, at the entropy of w; and each token also follows as many,
with the same probabilities, so that all are equally frequent. s1 ... sn are tokens that differ from each other,
uniformly drawn anew for each sequence: nothing predicts the first copy, and only a look back predicts the second.
`repeated` marks the tokens of the second copy except s1 itself. Where the segment lies, and how long it is, is drawn,
too (Olsson et al. 2022 measure on repeated random tokens; here they are part of the training text, so that induction is
worth learning).

The null has an independent segment in the place of the second copy, at the same places.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mainstem.errors import UsageError

START = 0
"""The first token of every sequence, and of nothing else."""


class RepeatedText(NamedTuple):
    """Sequences, and which of their tokens only a look back predicts."""

    ids: Int[Tensor, "batch pos"]
    repeated: Bool[Tensor, "batch pos"]


@dataclass(frozen=True)
class RepeatedBigrams:
    """Draws such text; called with a step it gives that step's ids, as `train` wants them.

    Attributes:
        d_vocab: tokens, of which token 0 is the start.
        length: of a sequence, its start included.
        batch: sequences of a step.
        segment: the shortest and the longest segment.
        successors: of each token in the table.
        seed: of the table and of the sequences.

    Raises:
        UsageError: two of the longest segments do not fit, or there are too few tokens.
    """

    d_vocab: int = 64
    length: int = 64
    batch: int = 32
    segment: tuple[int, int] = (8, 20)
    successors: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        shortest, longest = self.segment
        if not 2 <= shortest <= longest or 2 * longest + 1 > self.length:
            remedy = f"Two segments and the start fit in {self.length} tokens; the shortest is 2."
            raise UsageError(f"Segments of {shortest} to {longest} tokens", "segment", remedy)
        if self.d_vocab <= max(longest, self.successors):
            remedy = "A segment's tokens differ from each other, and a token's successors do."
            raise UsageError(f"{self.d_vocab - 1} tokens and a start", "d_vocab", remedy)

    @cached_property
    def table(self) -> Float[Tensor, "d_vocab d_vocab"]:
        """The probability of each token after each; row 0 is that of the first token, uniform."""
        generator = torch.Generator().manual_seed(self.seed)
        words = self.d_vocab - 1
        order = torch.randperm(words, generator=generator)
        shifts = torch.randperm(words, generator=generator)[: self.successors]
        chosen = order[(torch.arange(words)[:, None] + shifts) % words] + 1
        weights = torch.rand(self.successors, generator=generator) + 0.2
        table = torch.zeros(self.d_vocab, self.d_vocab)
        table[0, 1:] = 1 / words
        table[1:].scatter_(1, chosen, (weights / weights.sum()).expand(words, -1))
        return table

    @property
    def entropy(self) -> float:
        """Nats a token of the table's text."""
        return float(torch.special.entr(self.table[1]).sum())

    def __call__(self, step: int) -> Int[Tensor, "batch pos"]:
        """The ids of a step."""
        return self.sample(step).ids

    def sample(self, step: int, repeat: bool = True) -> RepeatedText:
        """The sequences of a step, and what is repeated; without `repeat` their null, marked at the same tokens."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + step)
        ids = self._bigrams(generator)
        shortest, longest = self.segment
        size = torch.randint(shortest, longest + 1, (self.batch, 1), generator=generator)
        free = self.length - 1 - 2 * size
        cuts = (torch.rand(self.batch, 2, generator=generator) * (free + 1)).long().sort(1).values
        first, second = 1 + cuts[:, :1], 1 + cuts[:, 1:] + size
        segments = [self._segment(generator) for _ in range(2)]
        at = torch.arange(self.length).expand(self.batch, -1)
        for begins, segment in ((first, segments[0]), (second, segments[0 if repeat else 1])):
            inside = (at >= begins) & (at < begins + size)
            ids = torch.where(inside, segment.gather(1, (at - begins).clamp(0, longest - 1)), ids)
        return RepeatedText(ids, (at > second) & (at < second + size))

    def _bigrams(self, generator: torch.Generator) -> Int[Tensor, "batch pos"]:
        below = self.table.cumsum(1)
        below[:, -1] = 1.0  # a sum of floats may end below the number that is drawn
        drawn = torch.rand(self.length, self.batch, 1, generator=generator)
        ids = torch.zeros(self.batch, self.length, dtype=torch.long)
        for i in range(1, self.length):
            ids[:, i] = torch.searchsorted(below[ids[:, i - 1]], drawn[i], right=True)[:, 0]
        return ids

    def _segment(self, generator: torch.Generator) -> Int[Tensor, "batch pos"]:
        return torch.rand(self.batch, self.d_vocab - 1, generator=generator).argsort(1)[:, : self.segment[1]] + 1
