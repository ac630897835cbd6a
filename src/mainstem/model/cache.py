"""The cache on disk: built once, whole or absent, by one process at a time.

What is slow to make (the default model: a download and a conversion) is kept in a directory of its own under
`cache_directory()`. Three rules make it safe:

- A directory is built under another name beside its place and renamed there when it is complete, so that
  what bears the final name is whole. A crash leaves a `.building-*` directory; the next builder removes it.
- Builders hold a lock file. The operating system frees it when its holder dies, however it dies.
- The last file written is a record of every other file's size, time and SHA-256. Each opening compares sizes
  and times; where only a time differs, the hash decides. What does not agree is built again.

Cost: an opening stats a few files (under 1 ms); hashing is paid at the build and after a copy of the cache
(0.5 s for 540 MB).
Limits: a file changed in place with its size and time preserved is not noticed. Readers take no lock, so a
cache that is damaged while it is being read shows as a load error, and is built again at the next opening.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mainstem.errors import CacheError

Report = Callable[[str], None]

RECORD = "mainstem-cache.json"
BUILDING = ".building-"
_ELSEWHERE = "Point MAINSTEM_CACHE at a directory that can be written."


def report_to_stderr(message: str) -> None:
    """Prints a progress message on standard error, where it cannot spoil a result."""
    print(message, file=sys.stderr, flush=True)


def cache_directory() -> Path:
    """Where Mainstem keeps what is slow to make: MAINSTEM_CACHE, else the platform's cache for this user.

    The directory is not created. XDG_CACHE_HOME is honoured where the platform uses it.
    """
    if chosen := os.environ.get("MAINSTEM_CACHE"):
        return Path(chosen).expanduser().absolute()
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "mainstem"


def build_once(
    name: str,
    identity: Mapping[str, str],
    build: Callable[[Path, Path], None],
    *,
    needed_bytes: int = 0,
    report: Report = report_to_stderr,
) -> Path:
    """The directory `name` of the cache, built first if it is absent, incomplete or of another identity.

    Args:
        name: The directory's name under `cache_directory()`.
        identity: What it was made from (hashes, versions); kept in its record and compared.
        build: Fills the first directory it is given; the second is scratch space, removed afterwards.
        needed_bytes: Free disk space that a build takes at its worst, checked before it starts.
        report: Receives progress messages.

    Raises:
        CacheError: The cache cannot be written: read-only, a file in its place, the disk full.
        MainstemError: Whatever `build` raises; nothing half-made is left under the final name.
    """
    root = cache_directory()
    target = root / name
    if is_complete(target, identity):
        return target
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock", report):
            # Another process may have built it while this one waited for the lock.
            if not is_complete(target, identity):
                _sweep(root, name)
                _check_space(root, needed_bytes)
                _build(root, target, identity, build)
    return target


def is_complete(directory: Path, identity: Mapping[str, str]) -> bool:
    """Whether a directory holds exactly what its record says, and was made from `identity`."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        if record["identity"] != dict(identity):
            return False
        return all(_agrees(directory / file, entry) for file, entry in record["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # No record, or one that a crash or a person spoilt: either way there is nothing to rely on.
        return False


def discard(directory: Path) -> None:
    """Makes a built directory incomplete, so that the next opening builds it again.

    Raises:
        CacheError: The cache is read-only.
    """
    with _explained(directory):
        (directory / RECORD).unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(root: Path, target: Path, identity: Mapping[str, str], build: Callable[[Path, Path], None]) -> None:
    workplace = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{target.name}-", dir=root))
    try:
        content, scratch = workplace / "content", workplace / "scratch"
        content.mkdir()
        scratch.mkdir()
        build(content, scratch)
        files = {path.relative_to(content).as_posix(): _entry(path) for path in _files(content)}
        record = {"identity": dict(identity), "files": files}
        (content / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            # A directory cannot be renamed onto one that holds files. Between these two renames there is none
            # under the final name: absent, which is safe.
            target.rename(workplace / "replaced")
        content.rename(target)
    finally:
        # Also on Ctrl-C: half a download is of no use, as pip starts each run anew.
        shutil.rmtree(workplace, ignore_errors=True)


def _sweep(root: Path, name: str) -> None:
    """Removes what interrupted builds of `name` left; whoever holds the lock is the only builder."""
    for leftover in root.glob(f"{BUILDING}{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_space(root: Path, needed_bytes: int) -> None:
    free, needed = shutil.disk_usage(root).free / 1e9, needed_bytes / 1e9
    if free < needed:
        raise CacheError(
            f"The cached copy takes {needed:.1f} GB of disk to make, and {free:.1f} GB are free",
            str(root),
            "Free some space, or point MAINSTEM_CACHE at a larger disk.",
        )


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _entry(path: Path) -> dict[str, str | int]:
    status = path.stat()
    return {"size": status.st_size, "time": status.st_mtime_ns, "sha256": sha256(path)}


def _agrees(path: Path, entry: Mapping[str, str | int]) -> bool:
    status = path.stat()
    if status.st_size != entry["size"]:
        return False
    return status.st_mtime_ns == entry["time"] or sha256(path) == entry["sha256"]


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"Another process is filling the cache in {path.parent}; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    """Turns what the operating system says about a directory into an error with a remedy."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or place)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CacheError(
                "The disk is full",
                where,
                "Free some space, or point MAINSTEM_CACHE at a larger disk; nothing half-made was kept.",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise CacheError("The cache directory cannot be written", where, _ELSEWHERE) from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise CacheError("A file stands in the cache directory's place", where, _ELSEWHERE) from error
        raise CacheError(f"The cache cannot be used: {error.strerror or error}", where, _ELSEWHERE) from error
