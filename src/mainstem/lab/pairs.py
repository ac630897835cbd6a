"""Pairs of prompts for patching: a clean one, a corrupted one, right and wrong answers; read from a file and encoded.

A pair is what every causal command takes many of. In a file it is a line of JSON:

    {"clean": "France's capital is", "corrupted": "Italy's capital is", "answers": [" Paris"], "wrong": [" Rome"]}

Prompts are text or lists of token ids; answers are text of one token each, literally (a leading space counts), or
ids; one answer may stand without its list; `wrong` may be left out. Blank lines are skipped. `roles` may name places
in the prompts, so that pairs of different lengths can be compared by them (`mainstem.lab.roles`).

Patching copies what one run computed at a position to the same position of another, so the two prompts need the same
number of tokens. Pairs where they do not have it are refused, with both tokenisations side by side where they differ:
nothing is padded or cut.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mainstem.errors import PairError, TokenError
from mainstem.lab.roles import Role, positions_of, read_roles
from mainstem.targets import Tokenizer, check_token_id, parse_token, token_text

Text = str | tuple[int, ...]
"""A prompt: its text, or its token ids."""

KEYS = ("clean", "corrupted", "answers", "wrong", "roles")
_LINES_SHOWN = 10


@dataclass(frozen=True)
class PromptPair:
    """One pair, as it was written.

    Attributes:
        clean: the prompt whose answers are right.
        corrupted: the same prompt with something changed that the answer depends on.
        answers: the right answers, each the text of one token or an id.
        wrong_answers: the wrong ones.
        where: where it comes from, for messages: "line 3 of pairs.jsonl".
        roles: named places in the prompts.
    """

    clean: Text
    corrupted: Text
    answers: tuple[str | int, ...]
    wrong_answers: tuple[str | int, ...] = ()
    where: str | None = field(default=None, compare=False)
    roles: tuple[Role, ...] = ()


@dataclass(frozen=True)
class EncodedPair:
    """One pair as token ids; both prompts have the same number, and differ.

    Attributes:
        clean: ids of the clean prompt.
        corrupted: ids of the corrupted prompt.
        answers: ids of the right answers.
        wrong_answers: ids of the wrong ones.
        roles: the positions of each named place, the same in both prompts.
    """

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    answers: tuple[int, ...]
    wrong_answers: tuple[int, ...]
    roles: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    @property
    def differing(self) -> tuple[int, ...]:
        """The positions at which the two prompts have different tokens."""
        return tuple(i for i, (a, b) in enumerate(zip(self.clean, self.corrupted, strict=True)) if a != b)


@dataclass(frozen=True)
class Encoder:
    """How one model reads text.

    Attributes:
        encode: from a prompt, text or ids, to ids, by the model's own convention, such as `Model.encode`.
        tokenizer: for answers and messages; None if the model came without one.
        d_vocab: how many tokens it predicts.
    """

    encode: Callable[[str | Sequence[int]], list[int]]
    tokenizer: Tokenizer | None
    d_vocab: int


def read_pairs(path: str | Path) -> list[PromptPair]:
    """The pairs of a file of JSON lines.

    Raises:
        PairError: if the file cannot be read, holds no pair, or has bad lines; says what is wrong with each.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        reason = f"byte {error.start} is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise PairError(
            f"The file of pairs cannot be read: {reason}", str(path), "Give a text file in UTF-8."
        ) from error
    pairs: list[PromptPair] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                pairs.append(_pair(line, f"line {number} of {path.name}"))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        more = f"; and {len(problems) - _LINES_SHOWN} more" if len(problems) > _LINES_SHOWN else ""
        shown = "; ".join(problems[:_LINES_SHOWN])
        form = '{"clean": "...", "corrupted": "...", "answers": [" yes"], "wrong": [" no"]}'
        raise PairError(f"Lines that are no pair: {shown}{more}", str(path), f"Write each line as {form}.")
    if not pairs:
        raise PairError("The file holds no pair", str(path), "Write one JSON object on each line.")
    return pairs


def _pair(line: str, where: str) -> PromptPair:
    """The pair on one line; a ValueError says what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"not an object with keys, but {type(row).__name__}")
    if unknown := sorted(set(row) - set(KEYS)):
        raise ValueError(f"unknown key {', '.join(map(repr, unknown))} (known: {', '.join(KEYS)})")
    if lacking := [key for key in KEYS[:3] if key not in row]:
        raise ValueError(f"no {', '.join(map(repr, lacking))}")
    clean, corrupted = (_prompt(row[key], key) for key in KEYS[:2])
    answers = _answers(row["answers"], "answers")
    if not answers:
        raise ValueError("'answers' is empty")
    roles = read_roles(row.get("roles", {}))
    return PromptPair(clean, corrupted, answers, _answers(row.get("wrong", []), "wrong"), where, roles)


def _prompt(value: Any, key: str) -> Text:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_id(token) for token in value):
        return tuple(value)
    raise ValueError(f"{key!r} is neither text nor a list of token ids, or is empty")


def _answers(value: Any, key: str) -> tuple[str | int, ...]:
    listed = value if isinstance(value, list) else [value]
    if all((isinstance(one, str) and one) or _is_id(one) for one in listed):
        return tuple(listed)
    raise ValueError(f"{key!r} holds something that is neither text nor a token id")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def encode_pair(pair: PromptPair, encoder: Encoder) -> EncodedPair:
    """A pair as one model reads it.

    Raises:
        PairError: if the prompts have unequal numbers of tokens, or the same tokens, or a role has no place in them.
        PromptError: if a prompt is text and the model came without a tokenizer.
        TokenError: if an answer is not one token; says into which it splits, and whether a leading space would help.
    """
    clean, corrupted = (tuple(encoder.encode(text)) for text in (pair.clean, pair.corrupted))
    if clean == corrupted:
        raise PairError(
            "The clean and the corrupted prompt are the same tokens", pair.where, "Change what the answer depends on."
        )
    if len(clean) != len(corrupted):
        raise _unequal(clean, corrupted, pair.where, encoder.tokenizer)
    answers, wrong = (
        tuple(_answer(one, pair.where, encoder) for one in listed) for listed in (pair.answers, pair.wrong_answers)
    )
    roles = {role.name: positions_of(role, clean, corrupted, encoder.tokenizer, pair.where) for role in pair.roles}
    return EncodedPair(clean, corrupted, answers, wrong, roles)


def _answer(answer: str | int, where: str | None, encoder: Encoder) -> int:
    try:
        if isinstance(answer, str):
            return parse_token(answer, encoder.tokenizer, encoder.d_vocab)
        return check_token_id(answer, encoder.d_vocab)
    except TokenError as error:
        place = ", ".join(part for part in (where, error.where) if part) or None
        raise TokenError(error.what, place, error.remedy) from error


def _unequal(
    clean: tuple[int, ...], corrupted: tuple[int, ...], where: str | None, tokenizer: Tokenizer | None
) -> PairError:
    """Both prompts between their common beginning and their common end."""
    shorter = min(len(clean), len(corrupted))
    start = next((i for i in range(shorter) if clean[i] != corrupted[i]), shorter)
    end = next((i for i in range(shorter - start) if clean[-1 - i] != corrupted[-1 - i]), shorter - start)

    def shown(ids: tuple[int, ...]) -> str:
        return " ".join(repr(token_text(tokenizer, token)) for token in ids[start : len(ids) - end]) or "nothing"

    return PairError(
        f"The clean prompt has {len(clean)} tokens and the corrupted one {len(corrupted)}; from position {start} on "
        f"they are: clean {shown(clean)}, corrupted {shown(corrupted)}",
        where,
        "Replace words by words of as many tokens.",
    )
