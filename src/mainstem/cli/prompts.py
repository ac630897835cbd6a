"""One prompt or many: the options `--pairs`, `--task` and `--count`, the same for every command that takes a prompt."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.running import Run
from mainstem.errors import UsageError

if TYPE_CHECKING:
    from mainstem.lab.pairs import PromptPair
    from mainstem.session import Model

Pairs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl", help="Instead of a prompt: lines of JSON with clean, corrupted, answers, wrong."
    ),
]
Task = Annotated[
    str | None, typer.Option(metavar="|".join(o.TASKS), help="Instead of a prompt: pairs of a task, by --seed.")
]
Count = Annotated[int, typer.Option(metavar="N", min=1, help="With --task: how many pairs.")]


def single(
    prompt: str | None, pairs: Path | None, task: str | None, alone: Mapping[str, object], form: str = "PROMPT"
) -> str | None:
    """The prompt, if a single one is asked for; None where a file or a task has many.

    Args:
        prompt: as given; one of the three has to be.
        pairs: as given.
        task: as given.
        alone: options that are about a single prompt, by name, with what was given.
        form: how a single prompt is written, for messages.

    Raises:
        UsageError: no prompt is named, or prompts are in two ways, or an option is about a single one.
        ChoiceError: an unknown task.
    """
    ways = sum((prompt is not None, pairs is not None, task is not None))
    if ways != 1:
        what = "There is no prompt" if ways == 0 else "Prompts are named in two ways"
        raise UsageError(what, None, f"Give {form}, or --pairs FILE.jsonl, or --task NAME.")
    if task is not None:
        o.choice("task", task, o.TASKS)
    if prompt is not None:
        return prompt
    for option, given in alone.items():
        if given:
            raise UsageError(
                f"{option} is about a single prompt, and pairs and tasks have answers of their own",
                option,
                f"Leave out {option}.",
            )
    return None


def open_with_pairs(
    run: Run,
    pairs: "Path | list[PromptPair] | None",
    task: str | None,
    count: int,
    check: "Callable[[Model, list[PromptPair]], None]",
) -> "tuple[Model, list[PromptPair]]":
    """Opens the model, and gives the pairs of a file or of a task, refused where `check` says so before discovery."""
    from mainstem.lab.pairs import read_pairs

    chosen = read_pairs(pairs) if isinstance(pairs, Path) else list(pairs or ())

    def checked(model: "Model") -> None:
        if task is not None:
            from mainstem.lab.tasks import generate

            chosen[:] = generate(task, model.encoder, count, run.common.seed)
        check(model, chosen)

    return run.open(checked), chosen
