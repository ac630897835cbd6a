"""The command line, `mainstem`: each command is in one of the modules here, which `mainstem.cli.app` gathers.

A command parses, calls the session, and hands a plain result to `mainstem.report`; it computes nothing. Exit status:
0 done, 1 a refusal or failure that is explained, 2 wrong usage, 130 interrupted, 141 nobody reads the output any more.
The result goes to standard output or to `--out`, everything else to standard error.

Nothing heavy is imported before a command runs: `mainstem --help` answers without torch.
"""

import sys
from collections.abc import Sequence

from mainstem.cli.collecting import rarely

INTERRUPTED = 130
BROKEN_PIPE = 141


def main() -> None:
    """The entry point of the console script."""
    rarely()
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, and gives its exit status.

    Args:
        arguments: the words after `mainstem`; by default those of the process.
    """
    try:
        from mainstem.cli.app import app

        app(args=None if arguments is None else list(arguments), prog_name="mainstem")
    except SystemExit as exit:
        if _by_an_interrupt(exit):  # before a command ran, where the library leaves without a word
            print("mainstem: interrupted", file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except KeyboardInterrupt:
        print("mainstem: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _by_an_interrupt(error: BaseException) -> bool:
    """Whether an interrupt is behind an error."""
    behind = error.__cause__ or error.__context__
    return behind is not None and (isinstance(behind, KeyboardInterrupt) or _by_an_interrupt(behind))
