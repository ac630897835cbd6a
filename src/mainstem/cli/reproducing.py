"""The command that runs published cases."""

from importlib import import_module
from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import command
from mainstem.cli.running import Run
from mainstem.errors import UsageError

MODULES = {name: name.replace("-", "_") for name in o.EXPERIMENTS} | {"induction-in-the-wild": "induction"}
"""Where each experiment is, below `mainstem.experiments`; imported when it is asked for."""


@command
def reproduce(
    run: Run,
    experiment: Annotated[str, typer.Argument(metavar="|".join(o.EXPERIMENTS), help="Which published case to run.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and fewer draws of the controls.")] = False,
    prompts: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="knowledge: prompts of each relation; 10 by default, 0 for all."),
    ] = None,
):
    """Run a published experiment, beside its nulls."""
    o.choice("experiment", experiment, o.EXPERIMENTS)
    if prompts is not None and experiment != "knowledge":
        raise UsageError("Only knowledge has several prompts", f"--prompts {prompts}", "Leave it out.")
    model = run.open()
    options = {} if prompts is None else {"per_relation": prompts}
    with run.step(f"Running {experiment} ..."):
        module = import_module(f"mainstem.experiments.{MODULES[experiment]}")
        return module.run(model, quick, report=run.report, **options)
