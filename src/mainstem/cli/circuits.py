"""`mainstem circuits`: what a head does between tokens, and who composes with whom, from the weights."""

from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import Top, command
from mainstem.cli.running import Run
from mainstem.errors import UsageError


@command
def circuits(
    run: Run,
    head: Annotated[str | None, typer.Argument(metavar="[HEAD]", help="The head, such as L9H8.")] = None,
    source: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Look up a skip trigram: the source, text or id:7042.")
    ] = None,
    destination: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Of the skip trigram: the token that looks at the source.")
    ] = None,
    predicts: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Of the skip trigram: what is predicted.")
    ] = None,
    embedding: Annotated[
        str, typer.Option(metavar="|".join(o.EMBEDDINGS), help="As they are, or each through the head's norm.")
    ] = "plain",
    composition: Annotated[
        bool,
        typer.Option(
            "--composition",
            help="Every pair of a reader and a writer; with HEAD, the neurons that it reads or that read it.",
        ),
    ] = False,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="|".join(o.COMPOSITIONS), help="With --composition: what reads. Default: q, k and v."
        ),
    ] = None,
    writers: Annotated[
        str, typer.Option(metavar="|".join(o.WRITERS), help="With --composition: who writes.")
    ] = o.WRITERS[0],
    offset: Annotated[
        int, typer.Option(metavar="N", min=0, help="Destination minus source, for rotary embedding.")
    ] = 0,
    top: Top = 10,
):
    """Read a head's QK and OV circuits in the vocabulary, all heads by a skip trigram, or who composes with whom."""
    from mainstem.units import Unit

    if head is not None:
        Unit.parse(head)
    asked = [token for token in (source, destination, predicts) if token is not None]
    if composition and asked or not (composition or head or asked):
        how = "Give HEAD, such as L9H8, or the three tokens of a skip trigram, or --composition."
        raise UsageError("One thing is asked at a time", None, how)
    o.choice("kind of embedding", embedding, o.EMBEDDINGS)
    o.choice("kind of writer", writers, o.WRITERS)
    for kind in kinds or ():
        o.choice("kind of composition", kind, o.COMPOSITIONS)
    if composition:
        model = run.open()
        with run.step("Composing ..."):
            chosen = tuple(kinds or o.COMPOSITIONS[:3])
            return model.composition(chosen, offset=offset, writers=writers, of=head, top=top)
    if kinds:
        raise UsageError("Kinds are those of compositions", "--kind", "Add --composition.")
    if len(asked) not in (0, 3):
        what = "A skip trigram is a source, a destination and an output"
        raise UsageError(what, None, "Give all of --source, --destination and --predicts, or none.")
    if head is None and embedding != o.EMBEDDINGS[0]:
        raise UsageError(
            "Embeddings through a norm are those of one head", "--embedding", "Give HEAD, or leave it out."
        )
    model = run.open()
    if head is None:
        with run.step("Reading circuits ..."):
            return model.skip_trigram(*asked, offset=offset, top=top)
    with run.step("Reading circuits ..."):
        return model.head_circuits(head, *asked, offset=offset, embedding=embedding, top=top)
