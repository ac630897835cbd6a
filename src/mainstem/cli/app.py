"""The commands and what is common to them: shared options, errors as messages, results as documents."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainstem.cli import BROKEN_PIPE, INTERRUPTED
from mainstem.cli import options as o
from mainstem.cli.options import Common
from mainstem.cli.running import Run
from mainstem.errors import MainstemError, UsageError

if TYPE_CHECKING:
    from mainstem.lab.pairs import PromptPair

app = typer.Typer(
    name="mainstem",
    help="Who wrote what into a transformer's residual stream, with proof that the account is complete.",
    epilog="Exit status: 0 done, 1 refused or failed, 2 wrong usage. Documentation: docs/command-line.md.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="Text, taken literally; - is standard input.")]
Position = Annotated[int, typer.Option(metavar="N", help="The destination, from 0; -1 is the last token.")]
Top = Annotated[int, typer.Option(metavar="N", min=1, help="How many to list.")]


@app.callback()
def _application(version: o.Version = False) -> None:
    pass


def command(body: Callable) -> Callable:
    """Makes a command of a function that takes a `Run` and options and returns a result.

    The common options are added to its own; the result is written where they say.
    """
    own = list(inspect.signature(body).parameters.values())[1:]
    hints = Common.annotations(body.__name__)
    keyword = inspect.Parameter.KEYWORD_ONLY
    common = [
        inspect.Parameter(name, keyword, default=getattr(Common, name), annotation=hints[name])
        for name in Common.names()
    ]

    def run(**given) -> None:
        shared = Common(**{name: given.pop(name) for name in Common.names()})
        raise typer.Exit(attempt(lambda: _carry_out(body, shared, given)))

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    run.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in own] + common)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*own, *common]}
    app.command(body.__name__)(run)
    return body


def _carry_out(body: Callable, common: Common, given: dict) -> None:
    from mainstem.cli import output

    output.check_format(body.__name__, common)
    output.check_destination(common.out)
    output.write(body(Run(common), **given), common)


def attempt(work: Callable[[], None]) -> int:
    """Does the work, and gives the exit status; what goes wrong in a way that can be explained is explained."""
    from mainstem.cli.output import BrokenPipe

    try:
        work()
    except MainstemError as error:
        return complain(str(error), error.exit_code)
    except MemoryError:
        return complain("There is not enough memory. Try --dtype bfloat16, a shorter prompt, or a smaller model.")
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except BrokenPipe:
        return BROKEN_PIPE
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, by name: torch may not be there
            raise
        return complain("The device is out of memory. Try --dtype bfloat16, a shorter prompt, or --device cpu.")
    return 0


def complain(message: str, status: int = 1) -> int:
    """Prints one message on standard error."""
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{red}mainstem:{plain} {message}", file=sys.stderr, flush=True)
    return status


def patching_pairs(
    prompts: Sequence[str | list[int]], answers: Sequence[str], wrong: Sequence[str], file: Path | None
) -> "list[PromptPair]":
    """The pair of two prompts, or the pairs of a file; none where a task makes them."""
    from mainstem.lab.pairs import PromptPair, read_pairs

    if file is not None:
        return read_pairs(file)
    texts = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
    return [PromptPair(texts[0], texts[1], tuple(answers), tuple(wrong))] if texts else []


DEFAULT_PROMPT = "The capital of France is"


# --- the verbs --------------------------------------------------------------------------------------------


@command
def explain(
    run: Run,
    prompt: Prompt,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN", help="What is explained: text, or id:7042; several make a set. Default: the prediction."
        ),
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN", help="A rival of the target; may be repeated.")
    ] = None,
    continuation: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instead of a target: text of any length.")
    ] = None,
    direction: Annotated[
        str | None,
        typer.Option(
            metavar="UNIT|FILE", help="Instead of a target: what L27N846 or L23H4@3 reads, or a .safetensors file."
        ),
    ] = None,
    position: Position = -1,
    score: Annotated[
        str | None,
        typer.Option(metavar="SCORE", help=f"By what units are ranked: {', '.join(o.SCORES)}; increase by default."),
    ] = None,
    norm: Annotated[
        str,
        typer.Option(
            metavar="|".join(o.NORMS), help="The final norm's scale: the last state's for all, or each its own."
        ),
    ] = "frozen",
    kinds: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND,...", help=f"Units to list: {', '.join(o.KINDS)}. Default: subvalues and neurons."),
    ] = None,
    negative: Annotated[bool, typer.Option("--negative", help="List units that speak against the target.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Score every unit, without the search's bound; slow.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure and keep what speeds up --negative for this model from now on.")
    ] = False,
    top: Top = 10,
    queries: Annotated[
        int, typer.Option(metavar="N", min=0, help="For each listed unit, N earlier units that activate it.")
    ] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Take the top units out of the run, beside controls, for a causal verdict.")
    ] = False,
    ablate: Annotated[
        str | None,
        typer.Option(metavar="KIND=N,...", help="How many to take out, with --verify; ffn=25,attention=75 by default."),
    ] = None,
    at: Annotated[
        str, typer.Option(metavar="|".join(o.PLACES), help="Where they are taken out: the destination, or everywhere.")
    ] = "last",
):
    """Say who wrote a prediction, with proof."""
    o.choice("place", at, o.PLACES)
    counts = o.counts(ablate) if ablate is not None else dict(o.ABLATED) if verify else None
    if counts is not None and negative:
        raise UsageError(
            "A verdict is on the units that speak for the target", "--verify --negative", "Leave out one of them."
        )
    if counts is None and at != "last":
        raise UsageError("--at says where units are taken out", f"--at {at}", "Add --verify.")
    if score is not None:
        o.choice("score", score, o.SCORES)
    o.choice("norm", norm, o.NORMS)
    chosen = o.words(kinds or o.DEFAULT_KINDS)
    for kind in chosen:
        o.choice("kind", kind, o.KINDS)
    given = run.prompt(prompt)

    def check(model) -> None:
        from mainstem.explaining import check_options

        check_options(score or "increase", norm, chosen, top)
        model.check(given, (position,), run.common.chat, target or (), against or ())

    model = run.open(check)
    with run.step("Explaining ..."):
        return model.explain(
            given, chat=run.common.chat, target=target or None, against=against or (), continuation=continuation,
            direction=direction, position=position, score=score, norm=norm, kinds=chosen, negative=negative,
            exhaustive=exhaustive, measure=measure, top=top, queries=queries,
            ablate=counts, everywhere=at == "all",
        )  # fmt: skip


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
        from mainstem.describing import describe_anatomy

        return describe_anatomy(model, given, chat=chat)


@command
def lens(
    run: Run,
    prompt: Prompt,
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
):
    """Read the stream after every sublayer."""
    o.choice("norm", norm, o.NORMS)
    given, chat = run.prompt(prompt), run.common.chat
    if figure is not None:
        from mainstem.cli.output import check_destination

        check_destination(figure, "--figure")
    model = run.open(lambda model: model.check(given, (position,), chat, tokens or ()))
    with run.step("Reading ..."):
        from mainstem.lens_reading import read_lens

        trace = model.trace(given, positions=(position,), chat=chat)
        reading = read_lens(trace, tokens or (), position=position, norm=norm, top=top, units=units or ())  # type: ignore[arg-type]
    if figure is not None:
        from mainstem.cli import output
        from mainstem.report.lens_page import lens_figure

        output.write_file(lens_figure(reading), figure.expanduser(), "--figure")
    return reading


@command
def steer(
    run: Run,
    prompt: Prompt,
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
):
    """Write with edits and without, side by side."""
    from mainstem.edit_text import parse_edit

    for text in edit:
        parse_edit(text)
    given, chat = run.prompt(prompt), run.common.chat
    model = run.open(lambda model: model.check(given, chat=chat))
    with run.step("Writing ..."):
        edits = [model.edit(text) for text in edit]
        return model.compare(
            given, *edits, count=tokens, continuations=continuation or (), temperature=temperature, chat=chat
        )


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
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Instead of two prompts: lines of JSON with clean, corrupted, answers, wrong."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="|".join(o.TASKS), help="Instead of two prompts: pairs of a task, by --seed.")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="With --task: how many pairs.")] = 10,
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
    chosen = patching_pairs(given, answer or (), wrong or (), pairs)
    model = run.open()
    if task is not None:
        from mainstem.lab.tasks import generate

        chosen = generate(task, model.encoder, count, run.common.seed)
    with run.step("Patching ..."):
        from mainstem.patch_reading import read_patch

        return read_patch(
            model,
            chosen,
            metric,
            grid,
            direction,  # type: ignore[arg-type]
            window=window,
            units=unit or (),
            position=position,
            chat=run.common.chat,
            memory=budget,
            state=state,
            progress=run.progress("Patching"),
        )


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
        from mainstem.experiments import knowledge

        return knowledge.run(model, quick, prompts, run.report)
