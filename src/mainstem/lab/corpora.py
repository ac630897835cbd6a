"""Texts to train small models on: tokens of a tokenizer that is made of the text itself, and a part that is held out.

    characters   one token a character
    bpe          byte pairs (Sennrich et al. 2016) over bytes, as many tokens as asked for

The tokenizer is a Transformers fast one. Saved beside a model (`corpus.tokenizer.save_pretrained(folder)`) it makes
`mainstem explain --model FOLDER "text"` work.

What is held out is the last tenth of each text, so that no window of training reaches into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mainstem.errors import ChoiceError, TextError
from mainstem.lab.texts import Text, open_text

Level = Literal["characters", "bpe"]

SOURCES = ("drama", "prose")
"""The public-domain texts that come with Mainstem."""

UNKNOWN = "\ufffd"
"""The token of a character that the text has not."""

HELD_OUT = 0.1


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        name: of the texts and the level.
        tokenizer: what made the tokens.
        train: ids of everything but the last tenth of each text.
        held_out: ids of the rest.
    """

    name: str
    tokenizer: PreTrainedTokenizerFast
    train: Int[Tensor, " token"]
    held_out: Int[Tensor, " token"]

    @property
    def d_vocab(self) -> int:
        """How many tokens there are."""
        return len(self.tokenizer)

    def batches(self, batch: int, length: int, seed: int = 0) -> Callable[[int], Int[Tensor, "batch pos"]]:
        """The batch of a step: windows of the training part that begin anywhere.

        Raises:
            TextError: it is shorter than a window.
        """
        self._check(self.train, length)
        offsets = torch.arange(length)

        def of(step: int) -> Int[Tensor, "batch pos"]:
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            begins = torch.randint(len(self.train) - length + 1, (batch, 1), generator=generator)
            return self.train[begins + offsets]

        return of

    def windows(self, length: int, most: int | None = None) -> Int[Tensor, "window pos"]:
        """Windows of what is held out, one after another; `most` of them, spread over all of it.

        Raises:
            TextError: it is shorter than a window.
        """
        self._check(self.held_out, length)
        whole = self.held_out[: len(self.held_out) // length * length].view(-1, length)
        count = len(whole) if most is None else min(most, len(whole))
        return whole[torch.arange(count) * len(whole) // count]

    def _check(self, ids: Tensor, length: int) -> None:
        if len(ids) < length:
            raise TextError(f"A part of {len(ids)} tokens is shorter than a window of {length}", self.name)


def open_corpus(sources: Sequence[str] = SOURCES, level: Level = "characters", d_vocab: int = 512) -> Corpus:
    """Makes a corpus of texts.

    Args:
        sources: texts, as `mainstem.lab.texts.open_text` names them.
        level: of its tokens.
        d_vocab: tokens of `bpe`, 256 at least: its bytes.

    Raises:
        TextError: as `open_text`.
        ChoiceError: an unknown level.
    """
    if level not in get_args(Level):
        raise ChoiceError("level", level, get_args(Level))
    texts = [open_text(source) for source in sources]
    cuts = [round(len(text.text) * (1 - HELD_OUT)) for text in texts]
    kept = [text.text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    made = _characters(texts) if level == "characters" else _bpe(kept, d_vocab)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    rest = [text.text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    name = f"{' and '.join(text.name for text in texts)}, {level if level == 'characters' else f'{d_vocab} byte pairs'}"
    return Corpus(name, tokenizer, _ids(made, kept), _ids(made, rest))


def _ids(made: Tokenizer, texts: Sequence[str]) -> Int[Tensor, " token"]:
    return torch.tensor([i for text in texts for i in made.encode(text).ids])


def _characters(texts: Sequence[Text]) -> Tokenizer:
    """Byte pairs without a merge: one token a character."""
    characters = sorted(set().union(*(text.text for text in texts)) | {UNKNOWN})
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(characters)}, [], unk_token=UNKNOWN))
    made.decoder = decoders.Fuse()  # type: ignore[assignment]
    return made


def _bpe(texts: Sequence[str], d_vocab: int) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=d_vocab, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    made.train_from_iterator(texts, trainer)
    return made
