"""`mainstem heads`."""

from typing import Annotated

import typer

from mainstem.cli.command import command
from mainstem.cli.running import Run


@command
def heads(
    run: Run,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="HEAD", help="A head to list, such as L17H4; may be repeated. Default: the first of all."),
    ] = None,
    examples: Annotated[int, typer.Option(metavar="N", min=2, help="How many texts of random repeated tokens.")] = 10,
    verify: Annotated[
        bool, typer.Option("--verify", help="Take the heads found out of the run, beside random heads of their layers.")
    ] = False,
    draws: Annotated[int, typer.Option(metavar="N", min=1, help="With --verify: draws of random heads.")] = 5,
):
    """Rank heads by what they do: induction, copying, previous token, sinks."""
    from mainstem.units import Unit

    for address in head or ():
        Unit.parse(address)
    model = run.open()
    with run.step("Measuring ..."):
        return model.heads(*(head or ()), examples=examples, verify=verify, draws=draws, report=run.report)
