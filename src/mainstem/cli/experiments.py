"""What surrounds a run of experiments: the model, opened once; the folder of finished results; the report of all."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainstem.cli.collecting import as_usual
from mainstem.cli.running import Run, silence
from mainstem.errors import MainstemError, UsageError
from mainstem.experiments.registry import Entry

if TYPE_CHECKING:
    from mainstem.experiments.everything import Part, Reproduction
    from mainstem.experiments.outcome import Experiment
    from mainstem.experiments.settings import Settings
    from mainstem.session import Model


class ExperimentRuns:
    """Runs experiments as one command asks for them.

    Args:
        run: the command's run.
        quick: the quick form of each, or else the full one.
        seeds: of those that train their own models; None for what each takes by itself.
        folder: where finished results are kept; None for the cache.
        prompts: of each relation, for the one experiment that has relations.
    """

    def __init__(self, run: Run, quick: bool, seeds: int | None, folder: Path | None, prompts: int | None) -> None:
        from mainstem.model.cache import cache_directory

        self.run, self.quick, self.seeds = run, quick, seeds
        self.folder = folder.expanduser() if folder is not None else cache_directory() / "experiments"
        self.options = {} if prompts is None else {"per_relation": prompts}
        self.form = "quick" if quick else "full"
        self._model: Model | MainstemError | None = None
        self._settings: dict[str, Settings] = {}
        self._parts: list[Part] = []

    def one(self, entry: Entry) -> "Experiment":
        """One experiment.

        Raises:
            MainstemError: as the experiment; CacheError: the folder cannot be written.
        """
        if entry.trains:
            self._prepare()
        with self._said_when_interrupted():
            return self._run(entry)

    def all(self, entries: list[Entry]) -> "Reproduction":
        """All of them, those that fail too, with a page and a document in the folder.

        Raises:
            UsageError, CacheError: the model or the folder was named wrongly.
            MainstemError: some failed; the result has been written before.
        """
        from mainstem.experiments.everything import carried_out

        self._prepare()
        if not all(entry.trains for entry in entries):
            self._open()
        with self._said_when_interrupted():
            for n, entry in enumerate(entries, 1):
                self.run.report(f"{n} of {len(entries)}: {entry.name}{_about(entry, self.quick)}")
                place = self.folder / entry.name / self.form
                make, identity = partial(self._run, entry), partial(self._identity, entry)
                self._parts.append(carried_out(entry, make, place, identity, self.run.report))
        made = self._gathered()
        self._write(made)
        return made

    def _prepare(self) -> None:
        """Refuses a folder or a device that is not there, before anything is computed."""
        from mainstem.experiments.kept import check_folder

        check_folder(self.folder)
        silence(self.run.common.quiet)
        from mainstem.model.placement import parse_device

        parse_device(self.run.common.device or "cpu")

    def _run(self, entry: Entry) -> "Experiment":
        from mainstem.experiments.provenance import on_this_machine

        if entry.trains:
            settings = self._settings_of(entry)
            as_usual()
            with self.run.step(f"Running {entry.name} ..."):
                made = entry.function()(settings)
            return replace(made, notes=list(dict.fromkeys([*made.notes, *settings.notes()])))
        model = self._opened()
        with self.run.step(f"Running {entry.name} ..."):
            made = entry.function()(model, self.quick, report=self.run.report, **self.options)
        return replace(made, provenance=on_this_machine(made.provenance))

    def _settings_of(self, entry: Entry) -> "Settings":
        from mainstem.experiments.settings import Settings

        common = self.run.common
        folder, device = self.folder / entry.name, common.device or "cpu"
        made = Settings(self.quick, self.seeds, device, folder, self.run.report, common.seed)
        self._settings[entry.name] = made
        return made

    def _open(self) -> None:
        """Opens the model; a failure is kept, for each experiment that needs it. Wrong usage is refused at once."""
        try:
            self._model = self.run.open()
        except UsageError:
            raise
        except MainstemError as error:
            self._model = error

    def _opened(self) -> "Model":
        """The model, opened at the first call; a failure is the same at each."""
        if self._model is None:
            self._open()
        if not isinstance(self._model, MainstemError):
            return self._model  # type: ignore[return-value]
        raise self._model

    def _identity(self, entry: Entry) -> Mapping[str, Any]:
        """What a finished experiment depends on."""
        from mainstem.experiments.provenance import versions
        from mainstem.model.sampled_weights import sampled_sums

        common = self.run.common
        if entry.trains:
            own = {"device": common.device or "cpu", "seeds": self.seeds, "seed": common.seed}
        else:
            model = self._opened()
            own = {**asdict(model.provenance()), "weights": sampled_sums(model.module)}
            del own["date"]
        return {**own, "form": self.form, **versions()}

    def _gathered(self) -> "Reproduction":
        from mainstem.experiments.everything import Reproduction
        from mainstem.experiments.provenance import on_this_machine, trained

        model, common = self._model, self.run.common
        if model is None or isinstance(model, MainstemError):
            about, provenance = {"name": "models trained here"}, trained([common.seed], common.device or "cpu")
        else:
            about, provenance = model.summary, on_this_machine(model.provenance())
        return Reproduction(provenance, [], about, self.form, self._parts)

    def _write(self, made: "Reproduction") -> None:
        """The page and the document, in the folder; the result where it was asked for, before failures are told."""
        from mainstem.cli.output import write, write_file
        from mainstem.report import as_html, as_json

        for suffix, render in (("html", as_html), ("json", as_json)):
            path = self.folder / f"report-{self.form}.{suffix}"
            write_file(render(made), path, "--folder")
            self.run.report(f"Written: {path}")
        if made.failed:
            write(made, self.run.common)
            what = f"{len(made.failed)} of {len(made.parts)} experiments failed"
            raise MainstemError(what, ", ".join(made.failed), "The report says why; the same command runs them again.")

    @contextmanager
    def _said_when_interrupted(self) -> Iterator[None]:
        """Says at an interrupt what is kept and how to go on."""
        try:
            yield
        except KeyboardInterrupt:
            from mainstem.report.text import plural

            finished = [part.name for part in self._parts if part.experiment is not None]
            parts = {name: len(made.done) for name, made in self._settings.items() if name not in finished}
            kept = [*finished, *(f"{plural(count, 'result')} of {name}" for name, count in parts.items() if count)]
            if kept:
                words = f"Kept in {self.folder}: {', '.join(kept)}. The same command goes on from there."
                print(words, file=sys.stderr, flush=True)
            raise


def _about(entry: Entry, quick: bool) -> str:
    """How long an experiment takes, where that was measured."""
    from mainstem.report.experiment_text import duration

    seconds = entry.quick_seconds if quick else entry.full_seconds
    return "" if seconds is None else f", about {duration(seconds)}"
