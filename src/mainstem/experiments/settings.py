"""How an experiment that trains its own models is run, and where its finished results are kept.

Such an experiment is a function `run(settings) -> Experiment` that trains one model for each arm and seed:

    seeds = settings.seed_list(quick=1, full=3)
    found = settings.each(arms, seeds, lambda arm, seed: trained(arm, seed, settings))
    return Experiment(..., provenance=settings.provenance(seeds), model={"name": "..."}, ...)

What is kept is used again by a later run of the same form (quick or full), device, threads, sources and versions; a
name has to say all else that the result depends on, and so holds arm and seed. Training is exact to repeat on one
machine with one number of threads; elsewhere sums are rounded otherwise, which is why both are said with the result.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mainstem.errors import UsageError
from mainstem.experiments.kept import Kept, kept
from mainstem.experiments.outcome import ExperimentProvenance
from mainstem.experiments.provenance import laboratory_versions, trained
from mainstem.model.placement import parse_device

Arm = TypeVar("Arm", bound=Hashable)
LARGEST_SEED = 10**9


@dataclass
class Settings:
    """How an experiment is run.

    Attributes:
        quick: only the arms that decide its claims, small and with few seeds; else everything, with at least three.
        seeds: how many seeds; None for what the experiment takes by itself.
        device: where models are trained, such as "cpu" or "cuda".
        folder: where this experiment's finished results are kept, below one for quick and one for full runs; None: they
            are not.
        report: receives a line of progress for each step.
        seed: the first of the seeds; the others count on from it.
        done: the results so far, those of an earlier run among them.
    """

    quick: bool = False
    seeds: int | None = None
    device: str = "cpu"
    folder: Path | None = None
    report: Callable[[str], None] = lambda text: None
    seed: int = 0
    done: list[Kept] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Refuses what cannot be run.

        Raises:
            UsageError: fewer seeds than one; a seed that is negative, or too large for the generators.
            ChoiceError: a device that is not there.
        """
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"{self.seeds} seeds", None, "Give 1 or more.")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"The seed {self.seed}", None, f"Give one from 0 to {LARGEST_SEED}.")
        parse_device(self.device)

    @property
    def form(self) -> str:
        """The word of the command line for this form: quick or full."""
        return "quick" if self.quick else "full"

    def seed_list(self, quick: int = 1, full: int = 3) -> list[int]:
        """The seeds to train with: as many as were asked for, or what the form takes by itself."""
        count = self.seeds if self.seeds is not None else quick if self.quick else full
        return list(range(self.seed, self.seed + count))

    def kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """One finished result, made if it is not kept yet: of one arm and one seed.

        Args:
            name: what it is of, with all that it depends on besides form, device and versions: `plain-20-seed-0`.
            make: makes it: numbers and words that JSON can hold. What comes back went through JSON each time.

        Raises:
            UsageError: a file of that name is something else.
            CacheError: the folder cannot be read or written.
        """
        folder = None if self.folder is None else self.folder / self.form
        of = {"form": self.form, "device": self.device, "threads": torch.get_num_threads(), **laboratory_versions()}
        one = kept(folder, name, of, make, self.report)
        self.done.append(one)
        return one.values

    def each(
        self,
        arms: Iterable[Arm],
        seeds: Sequence[int],
        make: Callable[[Arm, int], dict[str, Any]],
        label: Callable[[Arm], str] = str,
    ) -> dict[Arm, list[dict[str, Any]]]:
        """Every arm's finished results, seed by seed; all arms of a seed are made before the next seed's.

        Args:
            arms: what is compared.
            seeds: of each.
            make: makes one result: see `kept`.
            label: an arm in words; with the seed it has to say all that the result depends on.
        """
        found: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for seed in seeds:
            for arm, results in found.items():
                self.report(f"{label(arm)}, seed {seed} ...")
                name = f"{label(arm)}-seed-{seed}".replace(",", "").replace(" ", "-")
                results.append(self.kept(name, lambda arm=arm, seed=seed: make(arm, seed)))
        return found

    def provenance(self, seeds: list[int]) -> ExperimentProvenance:
        """Versions, seeds, machine and date, for the result; call it when everything is done."""
        return trained(seeds, self.device, dict.fromkeys(one.machine for one in self.done))

    def notes(self) -> list[str]:
        """What to say of results that an earlier run made; nothing where all are of this one."""
        old = [one for one in self.done if one.old]
        if not old:
            return []
        dates = sorted(one.date for one in old)
        return [f"{len(old)} of {len(self.done)} results were kept by an earlier run, {dates[0]} to {dates[-1]}."]
