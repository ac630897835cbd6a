"""The command that explains a prediction."""

from pathlib import Path
from typing import Annotated

import typer

from mainstem.cli import options as o
from mainstem.cli.command import Position, Prompt, Top, command
from mainstem.cli.prompts import Count, Pairs, Task, open_with_pairs, single
from mainstem.cli.running import Run
from mainstem.errors import UsageError


@command
def explain(
    run: Run,
    prompt: Prompt = None,
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
    pairs: Pairs = None,
    task: Task = None,
    count: Count = 10,
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
    ranked = {"norm": norm, "position": position, "top": top, "kinds": chosen, "negative": negative,
              "exhaustive": exhaustive, "measure": measure, "ablate": counts, "everywhere": at == "all"}  # fmt: skip
    alone = {"--target": target, "--against": against, "--continuation": continuation, "--direction": direction,
             "--queries": queries}  # fmt: skip
    prompt = single(prompt, pairs, task, alone)
    if prompt is None:
        return _explain_pairs(run, pairs, task, count, score or "increase", ranked)
    given = run.prompt(prompt)

    def check(model) -> None:
        from mainstem.explain.explaining import check_options

        check_options(score or "increase", norm, chosen, top)
        model.check(given, (position,), run.common.chat, target or (), against or ())

    model = run.open(check)
    with run.step("Explaining ..."):
        return model.explain(
            given, chat=run.common.chat, target=target or None, against=against or (), continuation=continuation,
            direction=direction, score=score, queries=queries, **ranked,
        )  # fmt: skip


def _explain_pairs(run: Run, pairs: Path | None, task: str | None, count: int, score: str, ranked: dict):
    """The same for many prompts."""
    chat = run.common.chat

    def check(model, chosen) -> None:
        from mainstem.explain.explaining import check_options
        from mainstem.many.prompt_sets import check_pairs

        check_options(score, ranked["norm"], ranked["kinds"], ranked["top"], ranked["negative"])
        check_pairs(model, chosen, ranked["position"], chat)

    model, chosen = open_with_pairs(run, pairs, task, count, check)
    with run.step("Explaining ..."):
        from mainstem.many.set_explaining import explain_set

        return explain_set(model, chosen, chat=chat, progress=run.progress("Explaining"), score=score, **ranked)
