"""Files that an interrupted run goes on from: written whole or not at all, and told apart by what they are of."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a new file beside an old one and lets it take the old one's place.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def as_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that a text is; an empty one if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # bytes that are no text, too
        return {}
    return found if isinstance(found, dict) else {}


def differing(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The names under which a file says something else than what is wanted."""
    return [name for name, value in wanted.items() if name not in found or found[name] != value]
