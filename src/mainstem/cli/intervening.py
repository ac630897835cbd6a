"""The commands that change the stream while the model runs: steer and patch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import Position, Prompt, command
from mainstem.cli.prompts import Count, Pairs, Task, open_with_pairs, single
from mainstem.cli.running import Run

if TYPE_CHECKING:
    from mainstem.lab.pairs import PromptPair


@command
def steer(
    run: Run,
    prompt: Prompt = None,
    *,
    edit: Annotated[
        list[str],
        typer.Option(
            metavar="EDIT",
            help="'zero L9H8', 'scale L9H8 0.5', 'mean L9H8', \"patch L5.resid_pre 'another prompt'\", "
            "'knockout L23H4 3', 'add L12.resid_pre vector.safetensors 4', "
            "\"add L12.resid_pre 'I love' - 'I hate' 4\"; @-1, @3,4, @prompt or @generated at the end say where. "
            "May be repeated; made in order.",
        ),
    ],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many tokens to write.")] = 20,
    continuation: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text whose probability after the prompt to compare; may be repeated."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 for the likeliest token each time; else tokens are drawn, by --seed.")
    ] = 0.0,
    pairs: Pairs = None,
    task: Task = None,
    count: Count = 10,
):
    """Write with edits and without, side by side."""
    from mainstem.intervene.edit_text import parse_edit

    for text in edit:
        parse_edit(text)
    prompt = single(prompt, pairs, task, {})
    if prompt is None:
        written = {"count": tokens, "continuations": continuation or (), "temperature": temperature}
        return _steer_pairs(run, pairs, task, count, edit, written)
    given, chat = run.prompt(prompt), run.common.chat
    model = run.open(lambda model: model.check(given, chat=chat))
    with run.step("Writing ..."):
        edits = [model.edit(text) for text in edit]
        return model.compare(
            given, *edits, count=tokens, continuations=continuation or (), temperature=temperature, chat=chat
        )


def _steer_pairs(run: Run, pairs: Path | None, task: str | None, count: int, edit: list[str], written: dict):
    """The same for many prompts."""
    chat = run.common.chat

    def check(model, chosen) -> None:
        from mainstem.many.prompt_sets import check_pairs

        check_pairs(model, chosen, chat=chat)

    model, chosen = open_with_pairs(run, pairs, task, count, check)
    with run.step("Writing ..."):
        from mainstem.many.set_steering import compare_set

        edits = [model.edit(text) for text in edit]
        return compare_set(model, chosen, edits, chat=chat, progress=run.progress("Writing"), **written)


@command
def patch(
    run: Run,
    clean: Annotated[
        str | None, typer.Argument(metavar="[CLEAN]", help="The prompt that has the answer; - is standard input.")
    ] = None,
    corrupted: Annotated[
        str | None, typer.Argument(metavar="[CORRUPTED]", help="The same with something changed, in as many tokens.")
    ] = None,
    answer: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN", help="The right answer: text, or id:7042; may be repeated.")
    ] = None,
    wrong: Annotated[list[str] | None, typer.Option(metavar="TOKEN", help="A wrong answer; may be repeated.")] = None,
    pairs: Pairs = None,
    task: Task = None,
    count: Count = 10,
    metric: Annotated[
        str, typer.Option(metavar="|".join(o.METRICS), help="What is measured at the destination.")
    ] = "logit-difference",
    grid: Annotated[
        str, typer.Option(metavar="|".join(o.GRIDS), help="What each cell patches: rows by positions, or by heads.")
    ] = "resid",
    direction: Annotated[
        str,
        typer.Option(
            metavar="|".join(o.DIRECTIONS), help="Clean values into the corrupted run, or corrupted into the clean."
        ),
    ] = "denoising",
    window: Annotated[
        int, typer.Option(metavar="N", min=1, help="For attn, mlp and mixer: so many layers in each cell.")
    ] = 1,
    unit: Annotated[
        list[str] | None, typer.Option(metavar="UNIT", help="For neurons: a unit, such as L24N1005; may be repeated.")
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="Columns are the roles that the pairs name, in place of positions.")
    ] = False,
    position: Position = -1,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="What the sweep may take beside the model: 512M, 2G, ...")
    ] = "1G",
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep finished cells here, and go on from them.")
    ] = None,
):
    """Sweep: patch every cell of a grid from one run into another."""
    for name, given, allowed in (("metric", metric, o.METRICS), ("grid", grid, o.GRIDS),
                                 ("direction", direction, o.DIRECTIONS)):  # fmt: skip
        o.choice(name, given, allowed)
    if task is not None:
        o.choice("task", task, o.TASKS)
    budget = o.size(memory, "--memory")
    o.one_source(clean, corrupted, pairs, task, answer, wrong)
    given = [run.prompt(prompt) for prompt in (clean, corrupted) if prompt is not None]
    if state is not None:
        from mainstem.cli.output import check_destination

        check_destination(state, "--state")
    single = _single_pair(given, answer or (), wrong or ()) if given else None

    def check(model, chosen) -> None:
        from mainstem.intervene.patch_reading import encode_pairs

        encode_pairs(model, chosen, grid, run.common.chat, roles)

    model, chosen = open_with_pairs(run, single or pairs, task, count, check)
    with run.step("Patching ..."):
        from mainstem.intervene.patch_reading import read_patch

        return read_patch(
            model,
            chosen,
            metric,
            grid,
            direction,  # type: ignore[arg-type]
            window=window,
            units=unit or (),
            roles=roles,
            position=position,
            chat=run.common.chat,
            memory=budget,
            state=state,
            progress=run.progress("Patching"),
        )


def _single_pair(
    prompts: Sequence[str | list[int]], answers: Sequence[str], wrong: Sequence[str]
) -> "list[PromptPair]":
    """The pair of two prompts."""
    from mainstem.lab.pairs import PromptPair

    clean, corrupted = (prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)
    return [PromptPair(clean, corrupted, tuple(answers), tuple(wrong))]
