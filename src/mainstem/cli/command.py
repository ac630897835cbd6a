"""What all commands have in common: the application, shared options, errors as messages, results as documents.

A module of commands decorates its functions with `command`, or with what `group` gives for commands under a common
word (`mainstem basis report`), which registers them; `mainstem.cli.app` imports it.
"""

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from mainstem.cli import BROKEN_PIPE, INTERRUPTED
from mainstem.cli import options as o
from mainstem.cli.options import Common
from mainstem.cli.running import Run
from mainstem.errors import MainstemError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    name="mainstem",
    help="Who wrote what into a transformer's residual stream, with proof that the account is complete.",
    epilog="Exit status: 0 done, 1 refused or failed, 2 wrong usage. Documentation: docs/command-line.md.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)

Prompt = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Text, taken literally; - is standard input.")]
Position = Annotated[int, typer.Option(metavar="N", help="The destination, from 0; -1 is the last token.")]
Top = Annotated[int, typer.Option(metavar="N", min=1, help="How many to list.")]


@app.callback()
def _application(version: o.Version = False) -> None:
    pass


def command(body: Callable) -> Callable:
    """Makes a command of a function that takes a `Run` and options and returns a result.

    The common options are added to its own; the result is written where they say.
    """
    return _register(body, app, body.__name__)


def group(name: str, about: str) -> Callable[[Callable], Callable]:
    """A word that has commands under it; what is returned makes one of a function, as `command` does.

    Args:
        name: the word.
        about: its line in the help.
    """
    own = typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None, context_settings=CONTEXT)
    app.add_typer(own, name=name)
    return lambda body: _register(body, own, f"{name} {body.__name__}")


def _register(body: Callable, parent: typer.Typer, name: str) -> Callable:
    """Adds a command to an application; `name` is what stands between `mainstem` and its options."""
    own = list(inspect.signature(body).parameters.values())[1:]
    hints = Common.annotations(name)
    keyword = inspect.Parameter.KEYWORD_ONLY
    common = [
        inspect.Parameter(name, keyword, default=getattr(Common, name), annotation=hints[name])
        for name in Common.names()
    ]

    def run(**given) -> None:
        shared = Common(**{name: given.pop(name) for name in Common.names()})
        raise typer.Exit(attempt(lambda: _carry_out(body, name, shared, given)))

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    run.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in own] + common)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*own, *common]}
    parent.command(body.__name__)(run)
    return body


def _carry_out(body: Callable, name: str, common: Common, given: dict) -> None:
    from mainstem.cli import output

    printed = replace(common, out=None) if name in o.DIRECTORIES else common
    output.check_format(name, printed)
    output.check_destination(printed.out)
    output.write(body(Run(common), **given), printed)


def attempt(work: Callable[[], None]) -> int:
    """Does the work, and gives the exit status; what goes wrong in a way that can be explained is explained."""
    from mainstem.cli.output import BrokenPipe

    try:
        work()
    except MainstemError as error:
        return complain(str(error), error.exit_code)
    except MemoryError:
        return complain("There is not enough memory. Try --dtype bfloat16, a shorter prompt, or a smaller model.")
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except BrokenPipe:
        return BROKEN_PIPE
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, by name: torch may not be there
            raise
        return complain("The device is out of memory. Try --dtype bfloat16, a shorter prompt, or --device cpu.")
    return 0


def complain(message: str, status: int = 1) -> int:
    """Prints one message on standard error."""
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{red}mainstem:{plain} {message}", file=sys.stderr, flush=True)
    return status
