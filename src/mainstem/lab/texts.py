"""Reference texts: those that come with Mainstem, a file, a directory of text files, or a Hugging Face dataset.

What is measured over a text names it, with its source. Three kinds come with Mainstem, because a basis that is
privileged, or a quantiser that fails, on one kind of text need not be on another (see data/README.md).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from mainstem.errors import TextError

SHIPPED = {
    "drama": "William Shakespeare, Hamlet, acts I and II",
    "prose": "Jane Austen, Pride and Prejudice, chapters 1 to 11",
    "code": "nine modules of Mainstem, in Python",
}
"""Texts that come with Mainstem, and what they are."""

SUFFIXES = (".txt", ".md")
MOST_CHARACTERS = 10_000_000
"""How much of a dataset is read: more than any statistic here needs."""

_DATASET = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?|/.+?|~.+?|\.{1,2}/.+?)(?::(?P<split>\w+))?(?::(?P<column>\w+))?")
_REMEDY = f"Name a text that comes along ({', '.join(SHIPPED)}), a file, a directory, or a dataset NAME:SPLIT:COLUMN."


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
            joined in the order of their paths; or a Hugging Face dataset, by its name on the Hub or as it was saved in
            a directory, with its split and its column where they are not clear: `NAME:SPLIT:COLUMN`.

    Raises:
        TextError: it is missing, empty, not UTF-8, or its split or column is not clear.
    """
    if str(source) in SHIPPED:
        data = files("mainstem") / "data" / f"{source}.txt"
        return Text(str(source), SHIPPED[str(source)], data.read_text(encoding="utf-8"))
    if not str(source).strip():  # which would name the present directory
        raise TextError("No text is named", None, _REMEDY)
    path = Path(source).expanduser()
    if path.is_file():
        return _checked(path.name, str(path), _read(path))
    if path.is_dir() and not _is_dataset(path):
        return _directory(path)
    return _dataset(str(source))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError("The text is not UTF-8", f"{path}, byte {error.start}", "Convert it first.") from error
    except OSError as error:
        raise TextError(f"The text cannot be read: {error.strerror or error}", str(path), _REMEDY) from error


def _checked(name: str, source: str, text: str) -> Text:
    if not text.strip():
        raise TextError("The text is empty", source)
    return Text(name, source, text)


def _directory(path: Path) -> Text:
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise TextError(f"There are no {' or '.join(SUFFIXES)} files in the directory", str(path), _REMEDY)
    joined = "\n\n".join(_read(file) for file in found)
    return _checked(path.name, f"{path}, {len(found)} file{'s' * (len(found) > 1)}", joined)


# --- Hugging Face datasets --------------------------------------------------------------------------------


def _is_dataset(path: Path) -> bool:
    """Whether a directory is a dataset as `save_to_disk` writes it."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _dataset(source: str) -> Text:
    match = _DATASET.fullmatch(source)
    if match is None:
        raise TextError("There is no such text", source, _REMEDY)
    name, split, column = match["name"], match["split"], match["column"]
    path = Path(name).expanduser()
    if (name[0] in "/~." or path.suffix.lower() in SUFFIXES) and not path.exists():
        raise TextError("There is no such text", source, _REMEDY)
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        what = "There is no such file or directory, and datasets are read with a package that is not installed"
        raise TextError(what, source, f"Install it with `pip install datasets`. {_REMEDY}") from error
    try:
        loaded = (
            datasets.load_from_disk(str(path))
            if path.is_dir() and _is_dataset(path)
            else datasets.load_dataset(name, split=split, streaming=True)
        )
    except Exception as error:  # whatever the Hub, the network or a damaged file may raise
        raise TextError(f"The dataset cannot be opened: {error}", source, _REMEDY) from error
    rows = _split(loaded, split, source)
    return _checked(name, source, _joined(rows, _column(rows, column, source)))


def _split(loaded: Any, split: str | None, source: str) -> Any:
    """The rows of a split; the only one, or the one named."""
    if not hasattr(loaded, "keys"):
        return loaded
    names = list(loaded.keys())
    chosen = split or (names[0] if len(names) == 1 else "")
    if chosen not in names:
        what = f"The dataset has no split {split}" if split else "The dataset has several splits"
        raise TextError(what, source, f"Name one: NAME:SPLIT; it has {', '.join(names)}.")
    return loaded[chosen]


def _column(rows: Any, column: str | None, source: str) -> str:
    """The column that holds the text: the one named, `text`, or the only one of strings."""
    first = next(iter(rows), None)
    if first is None:
        raise TextError("The dataset is empty", source)
    texts = [name for name, value in first.items() if isinstance(value, str)]
    chosen = column or ("text" if "text" in texts else texts[0] if len(texts) == 1 else "")
    if chosen not in texts:
        what = f"The dataset has no text in a column {column}" if column else "It is not clear which column is the text"
        raise TextError(what, source, f"Name it: NAME:SPLIT:COLUMN; columns of text: {', '.join(texts) or 'none'}.")
    return chosen


def _joined(rows: Iterable[dict[str, Any]], column: str) -> str:
    parts, characters = [], 0
    for row in rows:
        parts.append(row[column])
        characters += len(row[column])
        if characters > MOST_CHARACTERS:
            break
    return "\n\n".join(parts)
