"""Random repeated tokens: text on which nothing but repetition can be known.

After Olsson et al. 2022: 25 different random tokens, without the most and the least common, repeated four times, after
a beginning-of-sequence token. How common a token is shows in its id: vocabularies are made in the order of merges, so
the first and the last tenth of the ids is left out, and special tokens.

The control has four blocks that are drawn independently of each other instead: the same kind of text at the same
positions, without repetition.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.errors import PairError
from mainstem.lab.pairs import Encoder

PERIOD = 25
REPEATS = 4
LEFT_OUT = 0.1


@dataclass(frozen=True)
class RandomTokens:
    """Draws texts.

    Attributes:
        pool: the tokens to draw from.
        first: the token before each text; None where the model has none, so that a random one stands there.
    """

    pool: Sequence[int]
    first: int | None

    @classmethod
    def of(cls, encoder: Encoder) -> "RandomTokens":
        """Those of a model's vocabulary.

        Raises:
            PairError: if it has too few tokens.
        """
        tokenizer = encoder.tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        size = encoder.d_vocab if tokenizer is None else min(encoder.d_vocab, len(tokenizer))  # type: ignore[arg-type]
        rest = int(LEFT_OUT * size)
        pool = [token for token in range(rest, size - rest) if token not in special]
        if len(pool) < PERIOD:
            raise PairError(
                f"{PERIOD} different random tokens cannot be had from a vocabulary of {size}: {len(pool)} are left "
                "without special tokens, the most and the least common",
                remedy="Take a model with more tokens.",
            )
        return cls(pool, getattr(tokenizer, "bos_token_id", None))

    def text(self, rng: random.Random, repeats: int = REPEATS, repeated: bool = True) -> list[int]:
        """One text: the first token, then the blocks."""
        first = rng.choice(self.pool) if self.first is None else self.first
        block = rng.sample(self.pool, PERIOD)
        others = [block if repeated else rng.sample(self.pool, PERIOD) for _ in range(repeats - 1)]
        return [first, *block, *(token for other in others for token in other)]
