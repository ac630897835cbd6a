"""The commands that read a model and its stream, and change nothing: anatomy and lens."""

from pathlib import Path
from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import Position, Prompt, Top, command
from mainstem.cli.prompts import Count, Pairs, Task, open_with_pairs, single
from mainstem.cli.running import Run

DEFAULT_PROMPT = "The capital of France is"


@command
def anatomy(
    run: Run,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to run for the shapes; implies --shapes.")
    ] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Trace the shapes of all tensors of a real run.")] = False,
):
    """Print the structure that was discovered."""
    given = run.prompt(prompt) if prompt is not None else None
    chat = run.common.chat
    model = run.open(lambda model: None if given is None else model.check(given, chat=chat))
    if given is None and shapes:
        given = DEFAULT_PROMPT if model.tokenizer is not None else list(range(5))
    with run.step("Describing ..."):
        from mainstem.read.describing import describe_anatomy

        return describe_anatomy(model, given, chat=chat)


@command
def lens(
    run: Run,
    prompt: Prompt = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN", help="A token to follow: text, or id:7042; may be repeated. Default: the prediction."
        ),
    ] = None,
    position: Position = -1,
    norm: Annotated[
        str, typer.Option(metavar="|".join(o.NORMS), help="Each state at its own scale, or all at the last state's.")
    ] = "recompute",
    top: Top = 5,
    units: Annotated[
        list[str] | None,
        typer.Option(
            "--unit", metavar="UNIT", help="A unit to read, such as L24N1005, L23H4@3 or L5.mlp; may be repeated."
        ),
    ] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw the courses into a file.")] = None,
    pairs: Pairs = None,
    task: Task = None,
    count: Count = 10,
):
    """Read the stream after every sublayer."""
    o.choice("norm", norm, o.NORMS)
    prompt = single(prompt, pairs, task, {"--tokens": tokens, "--unit": units, "--figure": figure})
    if prompt is None:
        return _lens_pairs(run, pairs, task, count, position, norm)
    given, chat = run.prompt(prompt), run.common.chat
    if figure is not None:
        from mainstem.cli.output import check_destination

        check_destination(figure, "--figure")
    model = run.open(lambda model: model.check(given, (position,), chat, tokens or ()))
    with run.step("Reading ..."):
        from mainstem.read.lens_reading import read_lens

        trace = model.trace(given, positions=(position,), chat=chat)
        reading = read_lens(trace, tokens or (), position=position, norm=norm, top=top, units=units or ())  # type: ignore[arg-type]
    if figure is not None:
        from mainstem.cli import output
        from mainstem.report.lens_page import lens_figure

        output.write_file(lens_figure(reading), figure.expanduser(), "--figure")
    return reading


def _lens_pairs(run: Run, pairs: Path | None, task: str | None, count: int, position: int, norm: str):
    """The same for many prompts."""
    chat = run.common.chat

    def check(model, chosen) -> None:
        from mainstem.many.prompt_sets import check_pairs

        check_pairs(model, chosen, position, chat)

    model, chosen = open_with_pairs(run, pairs, task, count, check)
    with run.step("Reading ..."):
        from mainstem.many.set_lens import read_lens_set

        progress = run.progress("Reading")
        return read_lens_set(model, chosen, chat=chat, progress=progress, position=position, norm=norm)  # type: ignore[arg-type]
