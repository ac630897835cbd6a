"""The file that an interrupted sweep goes on from: one line for what it is a sweep of, and one for each cell.

Lines are appended and flushed as cells are done. A line that a kill cut off is dropped at the next opening, and its
cell computed again: no cell is lost, and none counted twice. A file of another sweep is refused. What identifies a
sweep is what was asked for, and the metric on the two unpatched runs, which another model or metric of the same name
would change.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mainstem.errors import UsageError

CLOSE = 1e-3
"""How far, relative to the larger of the two, the metric of the unpatched runs may be from what the file says:
other kernels round otherwise, but no other model comes as close on both."""

_KIND = "mainstem sweep"


class SweepState:
    """The cells of one sweep that are done.

    Args:
        path: the file; made if it is not there.
        identity: what the sweep is of, as JSON can hold it.
        measured: the metric on the unpatched runs.

    Raises:
        UsageError: if the file is of another sweep, no such file, or cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], measured: Mapping[str, float]) -> None:
        self.path = path
        self.done: dict[int, float] = {}
        head = {"kind": _KIND, "of": json.loads(json.dumps(identity)), "measured": dict(measured)}
        try:
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
            if len(lines) > 1:  # the first line is whole
                self._require_same(lines[0], head)
                self.done = dict(_cell(line) for line in lines[1:-1])
            self._rewrite(head if len(lines) < 2 else json.loads(lines[0]))
        except OSError as error:
            raise UsageError(
                f"The state of the sweep cannot be kept: {error.strerror}",
                str(path),
                "Name a file that can be written.",
            ) from error

    def _rewrite(self, head: Mapping[str, Any]) -> None:
        """The whole lines again, in a new file that takes the old one's place."""
        fresh = self.path.with_name(self.path.name + ".new")
        rows = [{"cell": cell, "value": value} for cell, value in self.done.items()]
        fresh.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)), encoding="utf-8")
        os.replace(fresh, self.path)

    def add(self, cells: Iterable[int], values: Iterable[float]) -> None:
        """Notes cells as done, on disk before it returns; those that were done already are left as they are."""
        fresh = {cell: value for cell, value in zip(cells, values, strict=True) if cell not in self.done}
        self.done |= fresh
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps({"cell": cell, "value": value}) + "\n" for cell, value in fresh.items()))
            file.flush()
            os.fsync(file.fileno())

    def _require_same(self, line: str, head: Mapping[str, Any]) -> None:
        try:
            found = json.loads(line)
            known = found["kind"] == _KIND
        except (ValueError, KeyError, TypeError):
            known = False
        remedy = "Name another file, or delete this one to begin anew."
        if not known:
            raise UsageError("This is not the state of a sweep", str(self.path), remedy)
        other = [name for name, value in head["of"].items() if found["of"].get(name) != value]
        if not other:
            scale = max(abs(value) for value in head["measured"].values())
            close = {"rel_tol": 0.0, "abs_tol": CLOSE * scale}
            pairs = [(found["measured"].get(name, math.nan), value) for name, value in head["measured"].items()]
            other = [] if all(math.isclose(a, b, **close) for a, b in pairs) else ["metric on the unpatched runs"]
        if other:
            raise UsageError(f"This file is of another sweep: its {', '.join(other)} differ", str(self.path), remedy)


def _cell(line: str) -> tuple[int, float]:
    row = json.loads(line)
    return int(row["cell"]), float(row["value"])
