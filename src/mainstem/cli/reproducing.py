"""The command that runs published experiments: one of them, or all as one report."""

from pathlib import Path
from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import command
from mainstem.cli.experiments import ExperimentRuns
from mainstem.cli.options import Common
from mainstem.cli.running import Run
from mainstem.errors import UsageError
from mainstem.experiments.registry import EXPERIMENTS, Entry, ExperimentList

ALL = "all"
OF_A_PROMPT = ("chat", "ids")
OF_A_MODEL = ("model", "dtype", "revision", "trust_remote_code", "allow_pickle", "attn_implementation")
"""The common options that do not concern an experiment that trains its own models."""


@command
def reproduce(
    run: Run,
    experiment: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which published case, or all; without it, their list.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only what decides the claims, and small.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything; the default.")] = False,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="Where models are trained: how many seeds, from --seed on.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where finished results are kept; in the cache by default.")
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="knowledge: prompts of each relation; 10 by default, 0 for all."),
    ] = None,
):
    """Run a published experiment, beside its nulls; without a name, list all."""
    given = {"quick": quick, "full": full, "seeds": seeds, "folder": folder, "prompts": prompts}
    _refuse_prompts_forms(run.common)
    if experiment is None:
        return _listed(run.common, [name for name, value in given.items() if value not in (None, False)])
    o.choice("experiment", experiment, [*EXPERIMENTS, ALL])
    if quick and full:
        raise UsageError("An experiment is either quick or full", "--quick --full", "Leave out one of them.")
    if seeds is not None and seeds < 1:
        raise UsageError("Without a seed nothing is trained", f"--seeds {seeds}", "Give 1 or more; 3 show a spread.")
    if prompts is not None and experiment != "knowledge":
        raise UsageError("Only knowledge has several prompts", f"--prompts {prompts}", "Leave it out.")
    runs = ExperimentRuns(run, quick, seeds, folder, prompts)
    if experiment == ALL:
        return runs.all(list(EXPERIMENTS.values()))
    _refuse_what_does_not_concern(EXPERIMENTS[experiment], run.common, seeds, folder)
    return runs.one(EXPERIMENTS[experiment])


def _listed(common: Common, given: list[str]) -> ExperimentList:
    """The list; options that would be of an experiment are refused."""
    if given:
        what = "No experiment is named"
        raise UsageError(what, f"--{given[0]}", f"Choose one of: {', '.join([*EXPERIMENTS, ALL])}.")
    if common.chosen_format() == "html":
        raise UsageError("The list of experiments is no page", "--format html", "Take table or json.")
    return ExperimentList(list(EXPERIMENTS.values()))


def _refuse_prompts_forms(common: Common) -> None:
    for name in _changed(common, OF_A_PROMPT):
        raise UsageError("Experiments bring their own prompts", f"--{name}", "Leave it out.")


def _refuse_what_does_not_concern(entry: Entry, common: Common, seeds: int | None, folder: Path | None) -> None:
    """Refuses options that this one experiment would not heed."""
    if entry.trains:
        for name in _changed(common, OF_A_MODEL):
            what = f"{entry.name} trains its own models and opens none"
            raise UsageError(what, f"--{name.replace('_', '-')}", "Leave it out.")
        return
    what = f"{entry.name} runs on a model and trains none"
    if seeds is not None:
        raise UsageError(what, f"--seeds {seeds}", "Leave it out; --seed N is the seed of its random choices.")
    if folder is not None:
        raise UsageError(f"{what}, and has no parts to keep", f"--folder {folder}", "Leave it out; see --out.")


def _changed(common: Common, names: tuple[str, ...]) -> list[str]:
    """Those of some common options that do not have their default."""
    return [name for name in names if getattr(common, name) != getattr(Common, name)]
