"""`mainstem basis`: the basis of the stream, and whether it is special."""

from typing import Annotated

import typer

from mainstem.cli.command import group
from mainstem.cli.running import Run

command = group("basis", "Measure the basis of the stream: outliers, quantisers, rotations.")

TextSource = Annotated[
    str,
    typer.Option(metavar="SOURCE", help="drama, prose or code, which come along; a file, directory or dataset."),
]
Tokens = Annotated[int, typer.Option(metavar="N", min=2, help="How many tokens of the text to measure.")]
EvalTokens = Annotated[int, typer.Option(metavar="N", min=2, help="How many tokens perplexities are computed on.")]
Window = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="Tokens that the model sees at once; 512 by default, or its context."),
]


@command
def report(
    run: Run,
    text: TextSource = "drama",
    tokens: Tokens = 20_000,
    eval_tokens: EvalTokens = 3_072,
    window: Window = None,
):
    """Measure the basis of the stream, and say whether it is special."""
    from mainstem.lab.texts import open_text

    opened = open_text(text)
    model = run.open()
    with run.step("Measuring ..."):
        return model.basis.report(text=opened, tokens=tokens, eval_tokens=eval_tokens, window=window, say=run.say)
