"""`mainstem subspace`: what units share of the stream, who erases in it, and how much of it is used."""

from typing import Annotated

import typer

from mainstem.cli.command import command
from mainstem.cli.running import Run
from mainstem.errors import UsageError


@command
def subspace(
    run: Run,
    first: Annotated[
        str | None, typer.Argument(metavar="[A]", help="UNIT.SIDE, such as L3H2.write; several joined by +.")
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]", help="The same; sides are write, query, key, value, gate, up, input and read (all rows)."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many directions of each to take.")] = None,
    energy: Annotated[
        float | None, typer.Option(metavar="SHARE", help="The share of the squared norm to hold; 0.99 by default.")
    ] = None,
    offset: Annotated[
        int, typer.Option(metavar="N", min=0, help="For queries and keys: how far the source is behind.")
    ] = 0,
    draws: Annotated[int, typer.Option(metavar="N", min=1, help="How many random subspaces to draw.")] = 500,
    erasers: Annotated[
        bool, typer.Option("--erasers", help="Instead: neurons and heads that write against what they read.")
    ] = False,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Instead: effective rank and written variance, layer by layer.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="For --erasers and --bandwidth: what to run on; a text of its own if not."),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="For --erasers: how many units to list.")] = 20,
):
    """Compare what units read and write; who erases; how full the stream is."""
    if (first is not None) + erasers + bandwidth != 1:
        raise UsageError("One thing is asked at a time", None, "Give A and B, or --erasers, or --bandwidth.")
    if first is not None and second is None:
        raise UsageError("There is nothing to compare with", first, "Give two: mainstem subspace L3H2.write L9H8.key.")
    if first is not None and prompt is not None:
        raise UsageError("An overlap is one of weights", "--prompt", "Leave it out.")
    given = None if prompt is None else run.prompt(prompt)
    model = run.open()
    if first is not None and second is not None:
        with run.step("Comparing ..."):
            from mainstem.weights.comparing_subspaces import compare_subspaces

            return compare_subspaces(model, first, second, rank=rank, energy=energy, offset=offset, draws=draws)
    with run.step("Looking for erasers ..." if erasers else "Reading the stream ..."):
        from mainstem.weights.bandwidth_reading import read_bandwidth
        from mainstem.weights.managing_memory import find_erasers

        return find_erasers(model, given, top=top) if erasers else read_bandwidth(model, given)
