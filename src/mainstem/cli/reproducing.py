"""The command that runs published cases."""

from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import command
from mainstem.cli.running import Run
from mainstem.errors import UsageError


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
    with run.step(f"Running {experiment} ..."):
        if experiment == "paris":
            from mainstem.experiments import paris

            return paris.run(model, quick, run.report)
        if experiment == "indirect-object":
            from mainstem.experiments import indirect_object

            return indirect_object.run(model, quick, run.report)
        if experiment == "induction-in-the-wild":
            from mainstem.experiments import induction

            return induction.run(model, quick, run.report)
        from mainstem.experiments import knowledge

        return knowledge.run(model, quick, prompts, run.report)
