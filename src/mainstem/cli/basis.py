"""`mainstem basis`: the basis of the stream, and whether it is special."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import Top, group
from mainstem.cli.running import Run

if TYPE_CHECKING:
    from mainstem.basis.face import Basis
    from mainstem.lab.texts import Text

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


@contextmanager
def _asked(run: Run, message: str, *sources: str) -> "Iterator[tuple[Basis, list[Text]]]":
    """The basis of the model and the texts, which are opened first; says what is being done."""
    from mainstem.lab.texts import open_text

    texts = [open_text(source) for source in sources]
    model = run.open()
    with run.step(message):
        yield model.basis, texts


@command
def report(
    run: Run,
    text: TextSource = "drama",
    tokens: Tokens = 20_000,
    eval_tokens: EvalTokens = 3_072,
    window: Window = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep finished sections here, and go on from them.")
    ] = None,
):
    """Measure the basis of the stream, and say whether it is special."""
    from mainstem.cli.output import check_destination

    check_destination(state, "--state")
    with _asked(run, "Measuring ...", text) as (basis, (opened,)):
        return basis.report(
            text=opened, tokens=tokens, eval_tokens=eval_tokens, window=window, state=state, say=run.say
        )


@command
def outliers(
    run: Run,
    text: TextSource = "drama",
    magnitude: Annotated[float, typer.Option(metavar="X", help="From which a value counts.")] = 6.0,
    layers: Annotated[float, typer.Option(metavar="SHARE", help="In how many layers a feature has one.")] = 0.25,
    positions: Annotated[float, typer.Option(metavar="SHARE", help="At how many positions of all.")] = 0.06,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A further model, for how outliers come with size; may be repeated."),
    ] = None,
    tokens: Tokens = 20_000,
    eval_tokens: EvalTokens = 3_072,
    window: Window = None,
):
    """Find outlier features by the published criterion, and massive activations; compare models by size."""
    from mainstem.analysis.outliers import Criterion
    from mainstem.basis.outlier_reading import check_criterion

    criterion = Criterion(magnitude, layers, positions)
    check_criterion(criterion)
    others = [Run(replace(run.common, model=source, revision=None)).open for source in compare or ()]
    with _asked(run, "Measuring ...", text) as (basis, (opened,)):
        return basis.outliers(
            text=opened,
            others=others,
            tokens=tokens,
            eval_tokens=eval_tokens,
            window=window,
            criterion=criterion,
            say=run.say,
        )


@command
def ablate(
    run: Run,
    dimensions: Annotated[
        list[int] | None, typer.Option("--dimension", "-d", metavar="N", help="Which; may be repeated.")
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="|".join(o.CHOICES), help="How they are chosen where none is given.")
    ] = o.CHOICES[0],
    count: Annotated[int, typer.Option(metavar="N", min=1, help="How many, where variance chooses.")] = 6,
    text: TextSource = "drama",
    eval_tokens: EvalTokens = 3_072,
    control_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="How many of them controls and patterns are made on.")
    ] = 128,
    window: Window = None,
    draws: Annotated[int, typer.Option(metavar="N", min=1, help="Draws of each control.")] = 10,
    top: Top = 10,
):
    """Take dimensions out where matrices read the stream, beside controls: attention patterns and perplexity."""
    o.choice("way to choose dimensions", by, o.CHOICES)
    with _asked(run, "Taking dimensions out ...", text) as (basis, (opened,)):
        return basis.ablations(
            dimensions or None,
            by=by,
            count=count,
            text=opened,
            tokens=eval_tokens,
            control_tokens=control_tokens,
            window=window,
            draws=draws,
            top=top,
            say=run.say,
        )


@command
def rounding(
    run: Run,
    text: TextSource = "drama",
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="How many tokens of the text are the prompt.")] = 256,
):
    """Add a run's writes up again in float32, bfloat16 and float16, and say what rounding takes of each."""
    with _asked(run, "Adding up ...", text) as (basis, (opened,)):
        return basis.rounding(text=opened, tokens=tokens)


@command
def quantise(
    run: Run,
    quantiser: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Which; may be repeated.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="drama, prose and code by default; may be repeated."),
    ] = None,
    eval_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="How many tokens of each text are predicted.")
    ] = 1_024,
    window: Window = None,
    threshold: Annotated[
        list[float] | None, typer.Option(metavar="X", help="LLM.int8() with this threshold too; may be repeated.")
    ] = None,
    rotation: Annotated[
        str | None, typer.Option(metavar="KIND", help="Also quantise a rotated copy: random, hadamard, learned.")
    ] = None,
):
    """Quantise the linear layers in runs of some texts: errors of products, perplexity, KL, flipped predictions."""
    from mainstem.lab.texts import SHIPPED

    for name in quantiser or ():
        o.choice("quantiser", name, o.QUANTISERS)
    if rotation is not None:
        o.choice("rotation", rotation, o.ROTATIONS)
    with _asked(run, "Quantising ...", *(text or SHIPPED)) as (basis, opened):
        return basis.quantisers(
            quantiser or (),
            texts=opened,
            tokens=eval_tokens,
            window=window,
            thresholds=threshold or (),
            rotation=rotation,
            say=run.say,
        )


@command
def rotate(
    run: Run,
    rotation: Annotated[
        str,
        typer.Option(metavar="|".join(o.ROTATIONS), help="Which rotation; Hadamard's with random signs by default."),
    ] = "hadamard",
    objective: Annotated[
        str, typer.Option(metavar="|".join(o.OBJECTIVES), help="What a learned one makes small.")
    ] = o.OBJECTIVES[0],
    text: TextSource = "drama",
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="How many tokens the two are compared on.")] = 256,
    window: Window = None,
):
    """Rotate a copy of the model, prove that it is the same model, and write it as a checkpoint."""
    o.choice("rotation", rotation, o.ROTATIONS)
    o.choice("objective", objective, o.OBJECTIVES)
    with _asked(run, "Rotating ...", text) as (basis, (opened,)):
        return basis.rotate(
            rotation,
            out=run.common.out,
            objective=objective,
            text=opened,
            tokens=tokens,
            window=window,
            say=run.say,
        )
