"""A `Target` is what is explained: a token, a set of tokens, a contrast, a continuation, a direction.

`parse_target` reads a target from text, literally: "Paris" and " Paris" are two tokens of most
vocabularies, and neither is put in the other's place. Because the wrong one of the two is easily typed, a
target carries the id of the other spelling (`alternative`), so that a caller who knows the probabilities can
say which is likelier. `id:7042` names a token by its id.

"Literally" means as running text continues. Some tokenizers put a space before the first word of whatever
they are given, and then "Paris" alone would be read as " Paris"; so the text is encoded after a line break,
and the line break's own tokens are taken off. Where that cannot be done the text is encoded alone.

A continuation is any text. Limits: any other text has to be one token; one that splits into several is an
error that shows the pieces. Tokens
that no text encodes to are reached by id only, and so are all tokens of a model without a tokenizer. A target knows
nothing of probabilities. No torch, and no transformers: any object with the three methods of `Tokenizer` serves.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mainstem.errors import TargetError, TokenError

TargetKind = Literal["token", "set", "contrast", "continuation", "direction"]

_ANCHOR = "\n"  # merges with hardly any text that follows, unlike a space or a letter
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for a piece of a character
_PIECES_SHOWN = 8


class Tokenizer(Protocol):
    """What this module needs of a tokenizer; those of Transformers have it."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, token_ids: Any, /) -> Any:
        """The text of a list of ids."""
        ...

    def convert_ids_to_tokens(self, ids: Any, /) -> Any:
        """The vocabulary's own spelling of an id, or None if there is none."""
        ...


@dataclass(frozen=True)
class Target:
    """What is explained.

    Attributes:
        ids: The target token, or a set of tokens whose probabilities add up; empty for the last two kinds.
        against: The rivals' ids; the target is then a contrast.
        continuation: Ids of a continuation, in order, teacher-forced.
        direction: A direction in the stream, d_model numbers.
        text: How to show it.
        against_texts: How to show the rivals.
        alternative: The id of the other spelling, with or without the leading space, if it is one token.
        alternative_text: How to show the other spelling.

    Raises:
        TargetError: Nothing is named, two kinds are mixed, a token is its own rival, a direction is no direction.
    """

    ids: tuple[int, ...] = ()
    against: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    direction: tuple[float, ...] = ()
    text: str = ""
    against_texts: tuple[str, ...] = ()
    alternative: int | None = None
    alternative_text: str | None = None

    def __post_init__(self) -> None:
        named = [bool(self.ids), bool(self.continuation), bool(self.direction)]
        if sum(named) != 1:
            problem = "names nothing" if not any(named) else "mixes tokens, a continuation and a direction"
            raise TargetError(f"The target {problem}")
        if self.against and not self.ids:
            raise TargetError("Only tokens can have rivals", remedy="Drop the rivals, or name a token.")
        if not all(math.isfinite(number) for number in self.direction):
            raise TargetError("The direction has NaN or infinity in it", remedy="Give finite numbers.")
        if self.direction and not any(self.direction):
            raise TargetError("The direction is zero everywhere", remedy="Give one that points somewhere.")
        if shared := sorted(set(self.ids) & set(self.against)):
            shown = ", ".join(f"id:{token}" for token in shared)
            raise TargetError(
                f"The target {self.text!r} is its own rival ({shown}); such a contrast is zero everywhere",
                remedy="Name another token as the rival.",
            )

    @property
    def kind(self) -> TargetKind:
        """Which of the five kinds it is; a set against rivals is a contrast."""
        if self.direction:
            return "direction"
        if self.continuation:
            return "continuation"
        if self.against:
            return "contrast"
        return "token" if len(self.ids) == 1 else "set"

    @property
    def token_id(self) -> int:
        """The only target token.

        Raises:
            TargetError: The target is a set, a continuation or a direction.
        """
        if len(self.ids) != 1:
            raise TargetError(f"The target {self.text!r} is not a single token", remedy="Name one token as the target.")
        return self.ids[0]


def parse_target(
    text: str | Sequence[str], tokenizer: Tokenizer | None, d_vocab: int, against: str | Sequence[str] = ()
) -> Target:
    """The target that a text, or several for a set, names; with rivals, a contrast.

    Args:
        text: One token's text, taken literally, or `id:NUMBER`; a sequence of these makes a set.
        tokenizer: The model's; None if it came without one, and then tokens are named by id only.
        d_vocab: Tokens that the unembedding knows; may differ from the tokenizer's count.
        against: The rivals, each written like `text`.

    Raises:
        TokenError: A text is empty, not exactly one token, or given without a tokenizer; an id is outside the
            vocabulary.
        TargetError: No token is named, or one is its own rival.
    """
    texts = [text] if isinstance(text, str) else list(text)
    rivals = [against] if isinstance(against, str) else list(against)
    # A token named twice is in a set once.
    ids = tuple(dict.fromkeys(parse_token(one, tokenizer, d_vocab) for one in texts))
    against_ids = tuple(dict.fromkeys(parse_token(one, tokenizer, d_vocab) for one in rivals))
    alternative = _alternative(texts[0], ids[0], tokenizer, d_vocab) if len(ids) == 1 else None
    return Target(
        ids=ids,
        against=against_ids,
        text=" | ".join(token_text(tokenizer, token) for token in ids),
        against_texts=tuple(token_text(tokenizer, token) for token in against_ids),
        alternative=alternative,
        alternative_text=None if alternative is None else token_text(tokenizer, alternative),
    )


def parse_continuation(text: str | Sequence[int], tokenizer: Tokenizer | None, d_vocab: int) -> Target:
    """The continuation that a text names, literally, or token ids.

    Raises:
        TokenError: The text is empty, there is no tokenizer for it, or an id is outside the vocabulary.
    """
    if not isinstance(text, str):
        ids = [int(token) for token in text]
    elif tokenizer is None:
        raise TokenError("This model came without a tokenizer", remedy="Give the continuation as token ids, in Python.")
    else:
        ids = literal_ids(tokenizer, text)
    if not ids:
        raise TokenError("The continuation is empty")
    checked = tuple(check_token_id(token, d_vocab) for token in ids)
    parts = [token_text(tokenizer, token) for token in checked]
    return Target(continuation=checked, text=(" " if tokenizer is None else "").join(parts))


def parse_token(text: str, tokenizer: Tokenizer | None, d_vocab: int) -> int:
    """The id of the token that a text names, literally or as `id:NUMBER`.

    Raises:
        TokenError: The text is empty, not exactly one token, or given without a tokenizer; or the id is outside the
            vocabulary.
    """
    if text.startswith("id:"):
        return check_token_id(_id_after_prefix(text), d_vocab)
    if not text:
        raise TokenError("The text of a token is empty")
    if tokenizer is None:
        raise TokenError(
            "This model came without a tokenizer", repr(text), "Name tokens by id, as in id:7042, or give a tokenizer."
        )
    ids = literal_ids(tokenizer, text)
    if len(ids) != 1:
        raise _not_one_token(text, ids, tokenizer)
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and text != getattr(tokenizer, "unk_token", None):
        raise TokenError(f"The vocabulary has no token for {text!r}", remedy="Name another token, or an id: id:NUMBER.")
    return check_token_id(ids[0], d_vocab, where=repr(text))


def check_token_id(token: int, d_vocab: int, where: str | None = None) -> int:
    """The id itself, if the vocabulary has it; `where` is how it was named.

    Raises:
        TokenError: It is negative, or not below d_vocab.
    """
    if not 0 <= token < d_vocab:
        raise TokenError(
            f"Token id {token} is outside the vocabulary",
            where,
            remedy=f"This model's ids go from 0 to {d_vocab - 1}.",
        )
    return token


def literal_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text as it would continue other text, with no space added before it."""
    anchor = list(tokenizer.encode(_ANCHOR, add_special_tokens=False))
    after_anchor = list(tokenizer.encode(_ANCHOR + text, add_special_tokens=False))
    if anchor and after_anchor[: len(anchor)] == anchor and len(after_anchor) > len(anchor):
        return after_anchor[len(anchor) :]
    return list(tokenizer.encode(text, add_special_tokens=False))


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as text, its leading space kept; a piece of a character in the vocabulary's own spelling.

    Without a tokenizer, and where the unembedding is wider than the tokenizer, `id:NUMBER`.
    """
    piece = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    if tokenizer is None or piece is None:
        return f"id:{token}"
    decoded = tokenizer.decode([token])
    # SentencePiece spells a space as U+2581, and decoding drops it at the beginning of a text.
    if str(piece).startswith("\u2581") and not decoded.startswith(" "):
        return " " + decoded
    return str(piece) if not decoded or _REPLACEMENT in decoded else decoded


def _id_after_prefix(text: str) -> int:
    digits = text.removeprefix("id:").strip()
    sign, unsigned = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    if not (unsigned.isascii() and unsigned.isdigit() and len(unsigned) <= 12):
        raise TokenError(f"{text!r} names no token: after id: comes a whole number", remedy="Write id:7042.")
    return sign * int(unsigned)


def _other_spelling(text: str) -> str:
    return text[1:] if text.startswith(" ") else " " + text


def _alternative(text: str, token: int, tokenizer: Tokenizer | None, d_vocab: int) -> int | None:
    """The id of the text with its leading space taken off or put on, if that is another single token."""
    if tokenizer is None:
        return None
    other = _other_spelling(token_text(tokenizer, token) if text.startswith("id:") else text)
    if not other.strip():
        return None
    ids = literal_ids(tokenizer, other)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if len(ids) != 1 or ids[0] in (token, unknown) or not 0 <= ids[0] < d_vocab:
        return None
    return ids[0]


def _not_one_token(text: str, ids: Iterable[int], tokenizer: Tokenizer) -> TokenError:
    """The error for a text of no token or several, with the pieces and the nearest thing that would work."""
    ids = list(ids)
    if not ids:
        return TokenError(f"{text!r} is no token of this vocabulary: its tokenizer drops it")
    pieces = [f"{token_text(tokenizer, token)!r} (id:{token})" for token in ids[:_PIECES_SHOWN]]
    if len(ids) > _PIECES_SHOWN:
        pieces.append("...")
    other = _other_spelling(text)
    other_ids = literal_ids(tokenizer, other) if other.strip() else []
    if len(other_ids) == 1 and other_ids[0] != getattr(tokenizer, "unk_token_id", None):
        remedy = f"{other!r} is one token (id:{other_ids[0]}); or name the first piece, id:{ids[0]}."
    else:
        remedy = f"Name one of them by its id, most likely the first: id:{ids[0]}."
    return TokenError(f"{text!r} is {len(ids)} tokens here: {', '.join(pieces)}", remedy=remedy)
