"""Where a result goes: to standard output, or whole to a file, and never half.

A file is written beside its place and renamed there, so that an error leaves an older file as it was. A reader of
standard output that went away ends the command silently, with the status that a shell gives for it.
"""

import os
import sys
import tempfile
from pathlib import Path

from mainstem.cli.options import TABULAR, Common, choice, formats
from mainstem.errors import MainstemError, UsageError
from mainstem.report import Document, TabularDocument, as_html, as_json, as_text, print_tables

FILE_WIDTH = 100


class BrokenPipe(Exception):  # noqa: N818 (no error: the reader has seen enough)
    """Nobody reads standard output any more."""


def check_destination(out: Path | None, option: str = "--out") -> None:
    """Refuses a file that cannot be written, before anything is computed for it.

    Raises:
        UsageError: its directory is missing, or it is a directory itself.
    """
    if out is None:
        return
    directory = out.expanduser().absolute().parent
    if not directory.is_dir():
        raise UsageError("There is no such directory", f"{option} {out}", f"Make it first: mkdir -p {directory}")
    if out.expanduser().is_dir():
        raise UsageError("This is a directory, not a file", f"{option} {out}", "Give the name of a file in it.")


def check_format(command: str, common: Common) -> None:
    """Refuses a format that the command or this installation has not, before anything is computed for it.

    Raises:
        ChoiceError: an unknown format.
        UsageError: Parquet for a result that is no table, without a file, or without pyarrow.
    """
    form = common.chosen_format()
    if form == "parquet" and command not in TABULAR:
        raise UsageError(f"The result of {command} is no table", "--format parquet", "Take json.")
    if choice("format", form, formats(command)) != "parquet":
        return
    if common.out is None:
        raise UsageError("A Parquet file is not for a terminal", "--format parquet", "Add --out FILE.parquet.")
    from mainstem.report.parquet import require_pyarrow

    require_pyarrow()


def write(result: Document, common: Common) -> None:
    """Renders a result and writes it where the options say.

    Raises:
        MainstemError: the file cannot be written.
        BrokenPipe: standard output is closed.
    """
    form, out = common.chosen_format(), common.out
    if form == "table" and out is None:
        write_stdout(_for_terminal(result))
        return
    if form == "parquet" and isinstance(result, TabularDocument) and out is not None:
        from mainstem.report.parquet import as_parquet

        write_file(as_parquet(result), out.expanduser())
        return
    text = {"json": as_json, "html": as_html}[form](result) if form != "table" else as_text(result, _file_width())
    if out is None:
        write_stdout(text)
    else:
        write_file(text, out.expanduser())


def _file_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else FILE_WIDTH


def _for_terminal(result: Document) -> str:
    """Tables as wide and as coloured as standard output allows."""
    from mainstem.report.terminal import terminal

    console = terminal()
    if not console.is_terminal:
        return as_text(result)
    with console.capture() as captured:
        print_tables(console, result)
    return captured.get()


def write_stdout(text: str) -> None:
    """Writes text in UTF-8 and flushes it."""
    try:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:
            sys.stdout.write(text)
        else:
            sys.stdout.flush()
            stream.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output once more at its end; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipe from None


def write_file(content: str | bytes, path: Path, option: str = "--out") -> None:
    """Writes text, in UTF-8, or bytes to a file, whole or not at all.

    Raises:
        MainstemError: it cannot be written.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to rename onto
            path.write_bytes(data)
            return
        _replace(data, path)
    except OSError as error:
        raise MainstemError(
            f"The file cannot be written: {error.strerror or error}",
            f"{option} {path}",
            "Choose another place, or free some space.",
        ) from error


def _replace(data: bytes, path: Path) -> None:
    target = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        mode = target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~mask
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
