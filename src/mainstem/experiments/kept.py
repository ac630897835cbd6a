"""Results on disk, so that an interrupted run goes on from what is done.

Each result is a file of its own, written whole when it is there: JSON with the values and with all that they depend on,
the settings, the versions (the digest of Mainstem's sources among them) and the device; the machine, the date and the
time it took stand beside them. A file that differs in any of the former is never used: the result is made again, which
is said, and takes its place. A file that is no such result is left alone, and refused.
"""

import errno
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mainstem.errors import CacheError, UsageError
from mainstem.experiments.provenance import machine
from mainstem.model.whole_files import as_object, differing, write_whole

_KIND = "mainstem kept result"


@dataclass(frozen=True)
class Kept:
    """A result and where it is from.

    Attributes:
        name: what it is the result of.
        values: the result.
        machine: that made it.
        date: when it was done.
        seconds: how long it took.
        old: whether an earlier run made it.
    """

    name: str
    values: dict[str, Any]
    machine: str
    date: str
    seconds: float
    old: bool


def kept(
    folder: Path | None,
    name: str,
    identity: Mapping[str, Any],
    make: Callable[[], dict[str, Any]],
    report: Callable[[str], None] = lambda text: None,
) -> Kept:
    """The result of this name in a folder, made and put there if there is none that is of the same.

    Args:
        folder: where results are; None: nowhere, it is made.
        name: the file's, without its ending.
        identity: what the result depends on, as JSON can hold it.
        make: makes it. What is returned went through JSON, whether it was made now or before.
        report: receives why a result that is there cannot be used.

    Raises:
        UsageError: the file is something else.
        CacheError: the folder cannot be read or written.
    """
    of = json.loads(json.dumps(identity))
    path = None if folder is None else folder / f"{name}.json"
    if path is not None and (found := _found(path, name, of, report)) is not None:
        return found
    start, device = time.perf_counter(), str(of.get("device", "cpu"))
    values = make()
    made = {
        "kind": _KIND,
        "name": name,
        "of": of,
        "machine": machine(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - start,
        "values": values,
    }
    text = json.dumps(made)
    if path is not None:
        _write(path, text)
    return _as_kept(json.loads(text), old=False)


def check_folder(folder: Path) -> None:
    """Makes a folder for results, and sees that it can be written, before hours are spent on them.

    Raises:
        CacheError: it cannot.
    """
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(error, folder) from error


def _found(path: Path, name: str, of: Mapping[str, Any], report: Callable[[str], None]) -> Kept | None:
    """What a file holds, if it is of the same."""
    try:
        text = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise CacheError(
            f"A kept result cannot be read: {error.strerror}", str(path), "Name another --folder."
        ) from error
    if not text:
        return None
    found = as_object(text)
    before, values = found.get("of"), found.get("values")
    if found.get("kind") != _KIND or not isinstance(before, dict) or not isinstance(values, dict):
        what = "This is not a kept result of an experiment"
        raise UsageError(what, str(path), "Name another --folder, or remove the file.")
    if other := differing(of, before):
        report(f"{name} was kept with another {', another '.join(other)}, and is made again.")
        return None
    return _as_kept(found, old=True)


def _as_kept(found: Mapping[str, Any], old: bool) -> Kept:
    return Kept(found["name"], found["values"], found["machine"], found["date"], found["seconds"], old)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise _unwritable(error, path) from error


def _unwritable(error: OSError, path: Path) -> CacheError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, remedy = "The disk is full", "Free some space, and run the same again: what was kept before stays."
    else:
        what, remedy = f"Results cannot be kept here: {error.strerror or error}", "Name another place: --folder DIR."
    return CacheError(what, str(path), remedy)
