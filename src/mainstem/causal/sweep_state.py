"""The file that an interrupted sweep goes on from: one line for what it is a sweep of, and one for each cell.

Lines are appended and flushed as cells are done. A line that a kill cut off is dropped at the next opening, and its
cell computed again: no cell is lost, and none counted twice. A file of another sweep is refused, and so is every
other file that holds anything. What identifies a
sweep is what was asked for, and the metric on the two unpatched runs, which another model or metric of the same name
would change.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from mainstem.errors import UsageError
from mainstem.model.whole_files import as_object, differing, write_whole

CLOSE = 1e-3
"""How far, relative to the larger of the two, the metric of the unpatched runs may be from what the file says:
other kernels round otherwise, but no other model comes as close on both."""

_KIND = "mainstem sweep"
_REMEDY = "Name another file, or delete this one to begin anew."


class SweepState:
    """The cells of one sweep that are done.

    Args:
        path: the file; made if it is not there.
        identity: what the sweep is of, as JSON can hold it.
        measured: the metric on the unpatched runs.

    Raises:
        UsageError: if the file is of another sweep, no such file, or cannot be written; if one of its lines, but for a
            last one without an end, is no cell, names the line.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], measured: Mapping[str, float]) -> None:
        self.path = path
        self.done: dict[int, float] = {}
        head = {"kind": _KIND, "of": json.loads(json.dumps(identity)), "measured": dict(measured)}
        try:
            first, *lines = (path.read_bytes() if path.exists() else b"").split(b"\n")
            if first or lines:
                head = self._same(first, head)
                self.done = dict(self._cell(line, 2 + i) for i, line in enumerate(lines[:-1]))
            self._rewrite(head)
        except OSError as error:
            raise UsageError(
                f"The state of the sweep cannot be kept: {error.strerror}",
                str(path),
                "Name a file that can be written.",
            ) from error

    def _rewrite(self, head: Mapping[str, Any]) -> None:
        """The whole lines again, in a new file that takes the old one's place."""
        rows = [{"cell": cell, "value": value} for cell, value in self.done.items()]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in (head, *rows)))

    def add(self, cells: Iterable[int], values: Iterable[float]) -> None:
        """Notes cells as done, on disk before it returns; those that were done already are left as they are."""
        fresh = {cell: value for cell, value in zip(cells, values, strict=True) if cell not in self.done}
        self.done |= fresh
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps({"cell": cell, "value": value}) + "\n" for cell, value in fresh.items()))
            file.flush()
            os.fsync(file.fileno())

    def _same(self, line: bytes, head: Mapping[str, Any]) -> dict[str, Any]:
        """The file's own first line, refused if it is not one of the same sweep."""
        found = as_object(line)
        of, measured = found.get("of"), found.get("measured")
        if found.get("kind") != _KIND or not isinstance(of, dict) or not isinstance(measured, dict):
            raise UsageError("This is not the state of a sweep", str(self.path), _REMEDY)
        other = differing(head["of"], of)
        if not other:
            scale = max(abs(value) for value in head["measured"].values())
            pairs = [(measured.get(name), value) for name, value in head["measured"].items()]
            close = all(_number(a) and math.isclose(a, b, rel_tol=0.0, abs_tol=CLOSE * scale) for a, b in pairs)
            other = [] if close else ["metric on the unpatched runs"]
        if other:
            raise UsageError(f"This file is of another sweep: its {', '.join(other)} differ", str(self.path), _REMEDY)
        return found

    def _cell(self, line: bytes, number: int) -> tuple[int, float]:
        row = as_object(line)
        cell, value = row.get("cell"), row.get("value")
        if not isinstance(cell, int) or not _number(value):
            raise UsageError("This line is no cell of a sweep", f"{self.path}, line {number}", _REMEDY)
        return cell, float(value)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)
