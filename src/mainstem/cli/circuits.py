"""`mainstem circuits HEAD`: what a head does between tokens, from the weights."""

from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.app import Top, command
from mainstem.cli.running import Run
from mainstem.errors import UsageError


@command
def circuits(
    run: Run,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The head, such as L9H8.")],
    source: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Look up a skip trigram: the source, text or id:7042.")
    ] = None,
    destination: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Of the skip trigram: the token that looks at the source.")
    ] = None,
    predicts: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Of the skip trigram: what is predicted.")
    ] = None,
    offset: Annotated[
        int, typer.Option(metavar="N", min=0, help="Destination minus source, for rotary embedding.")
    ] = 0,
    embedding: Annotated[
        str, typer.Option(metavar="|".join(o.EMBEDDINGS), help="As they are, or each through the head's norm.")
    ] = "plain",
    top: Top = 10,
):
    """Read a head's QK and OV circuits in the vocabulary."""
    o.choice("kind of embedding", embedding, o.EMBEDDINGS)
    asked = [token for token in (source, destination, predicts) if token is not None]
    if len(asked) not in (0, 3):
        what = "A skip trigram is a source, a destination and an output"
        raise UsageError(what, None, "Give all of --source, --destination and --predicts, or none.")
    model = run.open()
    with run.step("Reading circuits ..."):
        from mainstem.circuit_reading import read_circuits

        return read_circuits(model, head, asked, offset=offset, embedding=embedding, top=top)
