"""Edits as text, for the command line: a method, a point, what the method needs, and where.

    zero L9H8                                           nothing
    scale L9H8 0.5                                      times a factor
    mean L9H8                                           its mean over the reference text of the package
    mean L9H8 "another text"                            or over a text
    resample L27N846 "another text"                     its value at a random token of a text
    patch L5.resid_pre "another prompt"                 what the run of another prompt has at the same positions
    freeze L9H8.pattern "another prompt"                a pattern, or the scale of a norm, of another run
    knockout L23H4 3,4                                  a head cannot attend to these positions
    add L12.resid_pre vector.safetensors 4              a vector from a file, times a coefficient (1 by default)
    add L12.resid_pre "I love" - "I hate" 4             the difference of two texts, each at its last token
    project_out L12.resid_pre vector.safetensors        without its part along a vector

Each may end in `@` and positions: `zero L24.mlp @-1`, `@3,4`, `@prompt`, `@generated`; all by default. Texts stand
between single or double quotes; inside, a backslash makes the next character literal. Points are those of
`mainstem.points`, and their checks belong to the model: this module knows the words only.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mainstem.errors import EditError
from mainstem.points import Point

EXAMPLES = {
    "zero": "zero L9H8",
    "scale": "scale L9H8 0.5",
    "mean": "mean L9H8, or mean L9H8 'another text'",
    "resample": "resample L27N846 'another text'",
    "patch": "patch L5.resid_pre 'another prompt'",
    "freeze": "freeze L9H8.pattern 'another prompt'",
    "knockout": "knockout L23H4 3,4 @-1",
    "add": "add L12.resid_pre vector.safetensors 4, or add L12.resid_pre 'I love' - 'I hate' 4",
    "project_out": "project_out L12.resid_pre vector.safetensors",
}
"""The methods, each with what one can write."""

_WORD = re.compile(r"""\s*(?:(["'])(?P<text>(?:\\.|(?!\1).)*)\1|(?P<word>[^\s"']+))""", re.S)


@dataclass(frozen=True)
class EditText:
    """One edit as it was written.

    Attributes:
        written: the whole text.
        method: its first word.
        at: the point.
        texts: the texts that it names, in order; two for a difference.
        number: a factor or a coefficient.
        file: a `.safetensors` file with a vector.
        sources: for `knockout` the positions that are cut off.
        positions: where it holds: numbers, "prompt", "generated", or None for everywhere.
    """

    written: str
    method: str
    at: Point
    texts: tuple[str, ...] = ()
    number: float | None = None
    file: Path | None = None
    sources: tuple[int, ...] = ()
    positions: tuple[int, ...] | str | None = None


@dataclass(frozen=True)
class _Word:
    """A word of an edit, or a text that stood between quotes."""

    text: str
    quoted: bool


def parse_edit(written: str) -> EditText:
    """What a text says.

    Raises:
        EditError: if it is no edit; says what is wrong, with an example.
        UnitError: if its second word is no point's address.
    """
    words = _words(written)
    method = words[0].text if words and not words[0].quoted else ""
    if method not in EXAMPLES:
        raise EditError(
            f"{written!r} begins with no method" if words else "An edit is empty",
            "--edit",
            f"Write one of: {'; '.join(EXAMPLES.values())}.",
        )
    if len(words) < 2 or words[1].quoted:
        raise _wrong(written, method, "its second word is no point")
    at, rest, positions = Point.parse(words[1].text), words[2:], None
    if rest and not rest[-1].quoted and rest[-1].text.startswith("@"):
        positions = _positions(rest.pop().text[1:], written, method)
    return EditText(written, method, at, positions=positions, **_arguments(method, rest, written))


def _words(written: str) -> list[_Word]:
    words, place = [], 0
    text = written.strip()
    while place < len(text):
        match = _WORD.match(text, place)
        if match is None:
            raise EditError(f"A quote in {written!r} is not closed", "--edit", "Put texts between '...' or \"...\".")
        quoted = match["word"] is None
        words.append(_Word(re.sub(r"\\(.)", r"\1", match["text"], flags=re.S) if quoted else match["word"], quoted))
        place = match.end()
    return words


def _arguments(method: str, rest: list[_Word], written: str) -> dict:
    """What stands between the point and the positions."""
    if method == "zero" and not rest:
        return {}
    if method == "scale" and len(rest) == 1:
        return {"number": _number(rest[0], written, method)}
    if method == "mean" and (not rest or _are_texts(rest, 1)):
        return {"texts": tuple(word.text for word in rest)}
    if method in ("resample", "patch", "freeze") and _are_texts(rest, 1):
        return {"texts": (rest[0].text,)}
    if method == "knockout" and len(rest) == 1 and not rest[0].quoted:
        return {"sources": _numbers(rest[0].text, written, method)}
    if method == "project_out" and len(rest) == 1:
        return {"file": Path(rest[0].text)}
    if method == "add":
        return _added(rest, written)
    raise _wrong(written, method, "what follows the point does not fit the method")


def _added(rest: list[_Word], written: str) -> dict:
    """A file or a difference of two texts, and a coefficient."""
    difference = len(rest) >= 3 and not rest[1].quoted and rest[1].text == "-" and _are_texts([rest[0], rest[2]], 2)
    vector, after = (3, rest[3:]) if difference else (1, rest[1:])
    if len(rest) < vector or len(after) > 1:
        raise _wrong(written, "add", "it needs a file or a difference of two texts, and at most a coefficient")
    number = _number(after[0], written, "add") if after else 1.0
    if difference:
        return {"texts": (rest[0].text, rest[2].text), "number": number}
    return {"file": Path(rest[0].text), "number": number}


def _are_texts(words: list[_Word], count: int) -> bool:
    return len(words) == count and all(word.quoted and word.text for word in words)


def _number(word: _Word, written: str, method: str) -> float:
    try:
        return float(word.text)
    except ValueError:
        raise _wrong(written, method, f"{word.text!r} is no number") from None


def _numbers(text: str, written: str, method: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise _wrong(written, method, f"{text!r} are no positions") from None


def _positions(text: str, written: str, method: str) -> tuple[int, ...] | str:
    return text if text in ("prompt", "generated") else _numbers(text, written, method)


def _wrong(written: str, method: str, what: str) -> EditError:
    return EditError(f"{written!r} is no edit: {what}", "--edit", f"Write, for example: {EXAMPLES[method]}.")
