"""Many experiments one after the other, as one result: each one's claims, or why it could not be run.

An experiment that fails does not end the others. One that is done is kept, so that a run that was interrupted goes on
with the next; one that failed is not, and is run again.
"""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mainstem.errors import MainstemError
from mainstem.experiments.kept import kept
from mainstem.experiments.outcome import Experiment, rebuilt_experiment
from mainstem.experiments.registry import Entry
from mainstem.results.reading import Reading


@dataclass(frozen=True)
class Part:
    """One of the experiments.

    Attributes:
        name: the word after `mainstem reproduce`.
        about: what it asks, in a line.
        experiment: what it found; None if it failed.
        failure: why it failed, a sentence; None if it did not.
        seconds: how long it took.
        kept: when an earlier run did it; None if this one did.
    """

    name: str
    about: str
    experiment: Experiment | None
    failure: str | None
    seconds: float
    kept: str | None


@dataclass(frozen=True)
class Reproduction(Reading):
    """Many experiments; `provenance` and `model` are of the run, each experiment has its own, too.

    Attributes:
        form: quick or full.
        parts: the experiments, in the order of the list.
    """

    SCHEMA: ClassVar[str] = "mainstem/reproduce/all/1"
    COMMAND: ClassVar[str] = "reproduce all"

    form: str
    parts: list[Part]
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The names of those that failed."""
        return [part.name for part in self.parts if part.failure is not None]


def carried_out(
    entry: Entry,
    make: Callable[[], Experiment],
    folder: Path | None,
    identity: Callable[[], Mapping[str, Any]],
    report: Callable[[str], None] = lambda text: None,
) -> Part:
    """One experiment as a part: as an earlier run kept it, made now, or failed.

    Args:
        entry: which.
        make: runs it.
        folder: where it is kept when it is done; None: nowhere.
        identity: what it depends on. May fail as `make` may.
        report: receives why it failed, or why a kept result cannot be used.
    """
    start = time.perf_counter()
    try:
        one = kept(
            folder, "experiment", identity(), lambda: asdict(make()), lambda text: report(f"{entry.name}: {text}")
        )
    except Exception as error:  # whatever it is, it is said and must not end the others
        report(f"{entry.name} failed: {_words(error)}")
        return Part(entry.name, entry.about, None, _words(error), time.perf_counter() - start, None)
    found = rebuilt_experiment(one.values)
    return Part(entry.name, entry.about, found, None, one.seconds, one.date if one.old else None)


def _words(error: Exception) -> str:
    """What went wrong; of an error that nobody foresaw also where, for whoever mends it."""
    if isinstance(error, MainstemError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
