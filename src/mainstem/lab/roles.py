"""Roles: what a place in a prompt is, so that prompts of different lengths can be compared place by place.

"Mary" may be token 1 of one prompt and tokens 3 and 4 of another; both are the receiver. A pair names the places of
its roles, and a sweep over many pairs then has a column for each role in place of one for each position. In a file a
role is a key of `roles`:

    {"clean": "When Mary and John left, John gave a book to", ...,
     "roles": {"receiver": "Mary", "giver": ["John", 1], "giver again": ["John", 2], "gap": [5, 7], "end": -1}}

    "Mary"                                   the tokens that hold this text, which occurs once in the prompt
    ["John", 2]                              those of its second occurrence
    -1                                       one token, by its position, negative from the end
    [5, 7]                                   the tokens from position 5 to position 6
    {"clean": "France", "corrupted": "Italy"}   each prompt's own place; the two must be the same positions

Text is found as whole words where it occurs as such. It is looked for in the clean prompt, unless both are given:
patching copies position by position, so that a role has the same positions in both prompts of a pair.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mainstem.errors import PairError
from mainstem.targets import Tokenizer, token_text

Span = str | tuple[str, int] | int | tuple[int, int]
"""A place: a text that occurs once, a text and which of its occurrences, a position, or a first and an end."""

FORM = 'Write text that occurs once, ["text", 2] for its second occurrence, a position, or [first, end].'


@dataclass(frozen=True)
class Role:
    """A named place of a pair.

    Attributes:
        name: what it is.
        clean: where it is in the clean prompt.
        corrupted: where it is in the corrupted one; None for the same positions.
    """

    name: str
    clean: Span
    corrupted: Span | None = None


def read_roles(value: Any) -> tuple[Role, ...]:
    """Roles as a file has them; a ValueError says what is wrong."""
    if not isinstance(value, dict) or not all(name.strip() for name in value):
        raise ValueError("'roles' is not an object of names and places")
    found = []
    for name, place in value.items():
        ends = place if isinstance(place, dict) else {"clean": place}
        if set(ends) != {"clean", "corrupted"} and not (set(ends) == {"clean"} and ends is not place):
            raise ValueError(f"role {name!r} has other keys than 'clean' and 'corrupted', or lacks one")
        found.append(Role(name, *(_span(name, ends[key]) for key in ("clean", "corrupted") if key in ends)))
    return tuple(found)


def _span(name: str, value: Any) -> Span:
    match value:
        case str() if value.strip():
            return value
        case [str() as words, int() as nth] if words.strip() and not isinstance(nth, bool) and nth >= 1:
            return words, nth
        case int() if not isinstance(value, bool):
            return value
        case [int() as first, int() as end] if not isinstance(first, bool) and 0 <= first < end:
            return first, end
    raise ValueError(f"role {name!r} is no place. {FORM}")


def positions_of(
    role: Role, clean: Sequence[int], corrupted: Sequence[int], tokenizer: Tokenizer | None, where: str | None = None
) -> tuple[int, ...]:
    """The positions of a role in a pair.

    Args:
        role: the role.
        clean: ids of the clean prompt.
        corrupted: ids of the corrupted prompt, as many.
        tokenizer: for text.
        where: the pair, for messages.

    Raises:
        PairError: if the prompt has no such place, or the two prompts do not have it at the same positions.
    """
    try:
        found = _places(role.clean, clean, tokenizer)
        other = found if role.corrupted is None else _places(role.corrupted, corrupted, tokenizer)
    except ValueError as error:
        raise PairError(f"The role {role.name!r} has no place: {error}", where, FORM) from error
    if found != other:
        shown = (
            " ".join(repr(token_text(tokenizer, ids[at])) for at in places)
            for ids, places in ((clean, found), (corrupted, other))
        )
        raise PairError(
            f"The role {role.name!r} is at positions {_listed(found)} of the clean prompt ({next(shown)}) and at "
            f"{_listed(other)} of the corrupted one ({next(shown)})",
            where,
            "Replace words by words of as many tokens.",
        )
    return found


def _listed(places: Sequence[int]) -> str:
    return ", ".join(map(str, places))


def _places(span: Span, ids: Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Positions; a ValueError says why there are none."""
    match span:
        case int():
            if not -len(ids) <= span < len(ids):
                raise ValueError(f"there is no position {span} in {len(ids)} tokens")
            return (span % len(ids),)
        case (int() as first, end):
            if end > len(ids):
                raise ValueError(f"positions {first} to {end - 1} go beyond {len(ids)} tokens")
            return tuple(range(first, end))
        case (str() as words, nth):
            return _tokens_of(words, nth, ids, tokenizer)
        case words:
            return _tokens_of(words, None, ids, tokenizer)


def _tokens_of(words: str, nth: int | None, ids: Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is None:
        raise ValueError("the model came without a tokenizer, so that text cannot be found")
    whole = str(tokenizer.decode(list(ids)))
    exact = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(words)}(?!\w)", whole)]
    starts = exact or [match.start() for match in re.finditer(re.escape(words), whole)]
    if (nth or 1) > len(starts):
        raise ValueError(f"{words!r} occurs {len(starts)} times in the prompt {whole!r}")
    if nth is None and len(starts) > 1:
        raise ValueError(f"{words!r} occurs {len(starts)} times, and it is not said which is meant")
    start = starts[(nth or 1) - 1]
    ends = [len(str(tokenizer.decode(list(ids[:count])))) for count in range(len(ids) + 1)]
    return tuple(at for at in range(len(ids)) if ends[at] < start + len(words) and ends[at + 1] > start)
