"""What surrounds a command's work: opening the model quietly, reading the prompt, saying what is going on.

Progress goes to standard error: on a terminal a line that disappears when the step is done, elsewhere one line for
each step. Libraries' own warnings and progress bars are switched off where they are noise; a download keeps its bar.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mainstem.cli.collecting import as_usual
from mainstem.cli.options import Common
from mainstem.errors import PromptError, UsageError

if TYPE_CHECKING:
    from mainstem.session import Model

STDIN = "-"


class Run:
    """One command's run: its common options, its model, its progress."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self._status = None

    def open(self, check: Callable[["Model"], None] = lambda model: None) -> "Model":
        """Opens the model that the options name, and discovers its stream.

        Args:
            check: refuses a wrong request, before the seconds that discovery takes.

        Raises:
            LoadError, UsageError, AnatomyError: as `mainstem.open`, `check` and `Model.anatomy`.
        """
        try:
            return self._opened(check)
        finally:
            as_usual()

    def _opened(self, check: Callable[["Model"], None]) -> "Model":
        common = self.common
        silence(common.quiet)
        with self.step(f"Opening {common.model} ..."):
            import mainstem  # torch and transformers come with it, which takes seconds

            model = mainstem.open(
                common.model,
                seed=common.seed,
                dtype=common.dtype,
                device=common.device,
                revision=common.revision,
                trust_remote_code=common.trust_remote_code,
                allow_pickle=common.allow_pickle,
                attn_implementation=common.attn_implementation,
                report=self.report,
            )
            check(model)
        with self.step(f"Discovering the stream of {model.loaded.name} ..."):
            _ = model.anatomy
        return model

    def prompt(self, given: str) -> str | list[int]:
        """The prompt as text or, with `--ids`, as token ids; `-` is standard input.

        Raises:
            PromptError: it cannot be read, or is no list of ids.
        """
        text = _standard_input() if given == STDIN else given
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError("The prompt is not valid UTF-8", None, "Give it in UTF-8, or as token ids with --ids.")
        if not self.common.ids:
            return text
        if self.common.chat:
            raise UsageError("--chat wraps text, and --ids gives token ids", None, "Leave out one of them.")
        return parse_ids(text)

    @contextmanager
    def step(self, message: str) -> Iterator[None]:
        """Says what is being done while it is done."""
        if self.common.quiet:
            yield
        elif not sys.stderr.isatty():
            print(message, file=sys.stderr, flush=True)
            yield
        else:
            from rich.console import Console

            self._status = Console(stderr=True, markup=False, highlight=False).status(message)
            with self._status:
                yield
            self._status = None

    def progress(self, message: str) -> Callable[[int, int], None]:
        """A function to call with how much is done and how much there is; shown on a terminal only."""

        def show(done: int, of: int) -> None:
            if self._status is not None:
                self._status.update(f"{message}: {done:,} of {of:,}")

        return show

    def say(self, message: str) -> None:
        """What is being done at the moment; shown on a terminal only, in the place of what was said before."""
        if self._status is not None:
            self._status.update(message)

    def report(self, message: str) -> None:
        """A message from the loader; from here on it may draw progress bars of its own."""
        if self.common.quiet:
            return
        if self._status is not None:
            self._status.stop()
        print(message, file=sys.stderr, flush=True)


def parse_ids(text: str) -> list[int]:
    """Token ids between spaces, commas or line breaks, with or without brackets.

    Raises:
        PromptError: something in it is no whole number.
    """
    parts = [part for part in re.split(r"[\s,]+", text.strip().strip("[]")) if part]
    for part in parts:
        if not (part.removeprefix("-").isascii() and part.removeprefix("-").isdigit() and len(part) <= 12):
            raise PromptError(f"{part!r} is no token id", "--ids", "Give whole numbers: --ids '504 3575 282'.")
    return [int(part) for part in parts]


def _standard_input() -> str:
    """All of standard input, without the one line break that ends it."""
    try:
        stream = getattr(sys.stdin, "buffer", None)
        text = sys.stdin.read() if stream is None else stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            "Standard input is not UTF-8", f"byte {error.start}", "Convert it first, or give token ids with --ids."
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def silence(quiet: bool) -> None:
    """Switches off what Transformers and torch say on their own; must come before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
