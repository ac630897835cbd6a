"""Reference texts: those that come with Mainstem, a file, a directory of text files, or a Hugging Face dataset.

What is measured over a text names it, with its source. Three kinds come with Mainstem, because a basis that is
privileged, or a quantiser that fails, on one kind of text need not be on another (see data/README.md).
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from mainstem.errors import TextError

SHIPPED = {
    "drama": "William Shakespeare, Hamlet, acts I and II",
    "prose": "Jane Austen, Pride and Prejudice, chapters 1 to 11",
    "code": "nine modules of Mainstem, in Python",
}
"""Texts that come with Mainstem, and what they are."""


class Encodes(Protocol):
    """A model, or anything that makes tokens of text."""

    def encode(self, prompt: str) -> list[int]:
        """Token ids."""
        ...


@dataclass(frozen=True)
class Text:
    """A text with where it comes from."""

    name: str
    source: str
    text: str

    def ids(self, model: Encodes, most: int | None = None) -> list[int]:
        """Its tokens by the model's own convention, the first `most` of them."""
        return model.encode(self.text)[:most]


def open_text(source: str | Path = "drama") -> Text:
    """Opens a text.

    Args:
        source: the name of a text that comes with Mainstem; a file; a directory, whose `.txt` and `.md` files are
            joined in the order of their names; `NAME`, `NAME:SPLIT` or `NAME:SPLIT:COLUMN` of a Hugging Face dataset.

    Raises:
        TextError: it is missing, empty, not UTF-8, or its column is not clear.
    """
    if str(source) in SHIPPED:
        data = files("mainstem") / "data" / f"{source}.txt"
        return Text(str(source), SHIPPED[str(source)], data.read_text(encoding="utf-8"))
    path = Path(source).expanduser()
    if path.is_file():
        return _checked(path.name, str(path), _read(path))
    raise TextError("There is no such text", str(source))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError("The text is not UTF-8", f"{path}, byte {error.start}", "Convert it first.") from error
    except OSError as error:
        raise TextError(f"The text cannot be read: {error.strerror or error}", str(path)) from error


def _checked(name: str, source: str, text: str) -> Text:
    if not text.strip():
        raise TextError("The text is empty", source)
    return Text(name, source, text)
