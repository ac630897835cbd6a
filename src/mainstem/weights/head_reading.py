"""Heads by what they do: scores on random repeated tokens and on text, ranked, with a null, and tested by ablation.

Definitions are in `mainstem.analysis.attending`, after Olsson et al. 2022. A head is found for a behaviour if its score
is larger than the pooled null of all heads (what the same measure gives at offsets that mean nothing) at a false
discovery rate of 5 %, and by a threshold: significance alone would name heads that hardly do it. For what repetition
does, the score of the same positions without repetition is taken off first, so that a head that always looks 24 tokens
back is no induction head.

Cost: 20 runs of 101 tokens and some of 129 for text; ablations (`mainstem.weights.head_ablation`) cost about as much
again for
each method.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis import warnings as warn
from mainstem.analysis.attending import BEHAVIOURS, NAMED, probes
from mainstem.analysis.false_discovery import RATE, p_values, q_values
from mainstem.causal.head_runs import HeadRun, head_run, heads_of
from mainstem.causal.reference import reference_text
from mainstem.errors import PromptError, UnitError
from mainstem.intervene.intervening import require_whole_edits
from mainstem.lab.repeated import PERIOD, REPEATS, RandomTokens
from mainstem.results.heads import BehaviourReading, HeadRow, HeadsReading
from mainstem.run.inputs import context_length
from mainstem.units import Unit
from mainstem.weights.head_ablation import in_context_score, take_out
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

EXAMPLES = 10
WINDOW = 128
WINDOWS = 6
THRESHOLD, SINK_THRESHOLD = 0.3, 0.5
"""From which excess a head counts as found, and as a sink."""

TAKEN_OUT = ("prefix", "previous")
"""The behaviours that matter on repeated tokens: what is lost without their heads."""

Report = Callable[[str], None]


def read_heads(
    model: "Model",
    heads: Sequence[str] = (),
    examples: int = EXAMPLES,
    verify: bool = False,
    draws: int = 5,
    report: Report = lambda text: None,
) -> HeadsReading:
    """Measures every head of a model.

    Args:
        model: the model.
        heads: the addresses to list; all by default. Ranks are among all in any case.
        examples: how many texts of random tokens.
        verify: whether to take the heads found out of the run, beside random heads of their layers.
        draws: how many draws of those.
        report: receives a line of progress for each step.

    Raises:
        LevelRefusedError: if the model has no heads that can be told apart.
        UnitError: if it has no such head.
        PairError, PromptError: if its vocabulary or its context is too small for random repeated tokens.
        EditError: if an edit of one row of a batch holds.
    """
    require_whole_edits(model)
    examples, draws = whole_number("examples", examples, 2), whole_number("draws", draws, 1)
    known = heads_of(model.anatomy)
    listed = _listed(heads, known)
    tokens = RandomTokens.of(model.encoder)
    _require_context(model)
    runs = _all_runs(model, tokens, examples, report)
    behaviours = [one for data in ("random", "text") if data in runs for one in _behaviours(known, runs, data)]
    found = {one.name: one.found() for one in behaviours if one.data == _primary(one.name, runs)}
    ablations = []
    for name in TAKEN_OUT if verify else ():
        ablations += take_out(model, name, found[name], [str(head) for head in known], tokens, draws, report)
    report("in-context learning ...")
    looks = _looks_first(known, runs)
    return HeadsReading(
        provenance=model.provenance(),
        warnings=[one.as_dict() for one in warn.sink_heads_warning(list(looks.get("text", looks["random"]).values()))],
        model=model.summary,
        tokens=_about_tokens(model, tokens, examples),
        text={"windows": len(runs.get("text", [])), "length": _length(runs.get("text", []))},
        count=len(known),
        heads=listed,
        behaviours=behaviours,
        looks_first=looks,
        loss=_loss(runs["random"]),
        in_context=in_context_score(model, found["prefix"] if verify else []),
        ablations=ablations,
        notes=_notes(model, tokens, verify, found),
    )


def _all_runs(model: "Model", tokens: RandomTokens, examples: int, report: Report) -> dict[str, list[HeadRun]]:
    """Runs on repeated tokens, on tokens that are not repeated, measured at the same places, and on text."""
    report("random repeated tokens ...")
    rng = random.Random(model.seed)
    repeated = [tokens.text(rng) for _ in range(examples)]
    control = [tokens.text(rng, repeated=False) for _ in range(examples)]
    runs = {"random": _runs(model, repeated, repeated, copying=True), "control": _runs(model, control, repeated)}
    if windows := text_windows(model, tokens.first):
        report("text ...")
        runs["text"] = _runs(model, windows, windows)
    return runs


def _about_tokens(model: "Model", tokens: RandomTokens, examples: int) -> dict[str, Any]:
    first = None if tokens.first is None else model.token(tokens.first)
    about = {"period": PERIOD, "repeats": REPEATS, "examples": examples}
    return {**about, "first": first, "pool": len(tokens.pool)}


def _length(runs: Sequence[HeadRun]) -> int:
    """How many tokens each window has."""
    return len(runs[0].losses) + 1 if runs else 0


def _looks_first(heads: Sequence[Unit], runs: dict[str, list[HeadRun]]) -> dict[str, dict[str, float]]:
    return {
        data: {str(head): _mean(run.looks_first[head] for run in runs[data]) for head in heads}
        for data in ("random", "text")
        if data in runs
    }


def _loss(runs: Sequence[HeadRun]) -> dict[str, float]:
    """The mean loss on the first copy, and on later ones but for the second's first token, which nothing announces."""
    losses = torch.stack([run.losses for run in runs]).mean(0)
    return {"first": float(losses[:PERIOD].mean()), "repeated": float(losses[PERIOD + 1 :].mean())}


def _listed(heads: Sequence[str], known: Sequence[Unit]) -> list[str]:
    wanted = [Unit.parse(head) if isinstance(head, str) else head for head in heads]
    for head in wanted:
        if head not in known:
            raise UnitError(f"The model has no head {head}", None, f"Its heads go from {known[0]} to {known[-1]}.")
    return [str(head) for head in dict.fromkeys(wanted or known)]


def _require_context(model: "Model") -> None:
    limit, needed = context_length(model.module), 1 + REPEATS * PERIOD
    if limit is not None and limit < needed:
        raise PromptError(
            f"Random repeated tokens are {needed} tokens, and the model's context is {limit}",
            None,
            "Take another model.",
        )


def text_windows(model: "Model", first: int | None) -> list[list[int]]:
    """The package's text in windows, each after the token that stands before random tokens; none without tokenizer."""
    if model.tokenizer is None:
        return []
    ids = [token for token in model.encode(reference_text()) if token != first]
    before = [] if first is None else [first]
    length = min(WINDOW, (context_length(model.module) or WINDOW) - 1, len(ids))
    return [[*before, *ids[start : start + length]] for start in range(0, len(ids) - length + 1, length)][:WINDOWS]


def _runs(
    model: "Model", texts: Sequence[list[int]], measured: Sequence[list[int]], copying: bool = False
) -> list[HeadRun]:
    """A run for each text, measured by the probes of another text of the same length."""
    copied = range(1, PERIOD + 1) if copying and model.anatomy.readout.opaque is None else ()
    return [
        head_run(model.module, model.anatomy, model.inputs(text), probes(torch.tensor(by)), copied)
        for text, by in zip(texts, measured, strict=True)
    ]


def _behaviours(heads: Sequence[Unit], runs: dict[str, list[HeadRun]], data: str) -> list[BehaviourReading]:
    """Every behaviour on one kind of text."""
    made = []
    for name, (probe, number) in BEHAVIOURS.items():
        measures = _means(heads, [run.measures[probe] for run in runs[data]])
        control = None
        if probe == "copies" and data == "random":
            control = _means(heads, [run.measures[probe] for run in runs["control"]])
        sinks = torch.tensor([_mean(run.sinks[probe][head] for run in runs[data]) for head in heads])
        if not measures.isnan().any():
            made.append(_behaviour(name, data, heads, measures, control, sinks, _columns(probe, number)))
    if data == "random" and runs[data][0].copying:
        made.append(_copying("copying", heads, [run.copying for run in runs[data]]))
        if all(head in runs[data][0].copying_alone for head in heads):
            made.append(_copying("copying-alone", heads, [run.copying_alone for run in runs[data]]))
    return made


def _copying(name: str, heads: Sequence[Unit], runs: Sequence[dict[Unit, Tensor]]) -> BehaviourReading:
    """A copying score; its control is the head's own for other tokens."""
    measures = _means(heads, runs)
    others = measures[:, 1:].mean(1, keepdim=True).expand_as(measures)
    return _behaviour(name, "random", heads, measures, others, None, (0, range(1, measures.shape[1])))


def _columns(probe: str, number: int) -> tuple[int, list[int]]:
    """Which measure of a probe is the behaviour, and which are its null."""
    numbers = list(probes(torch.zeros(2, dtype=torch.long))[probe].numbers)
    return numbers.index(number), [i for i, other in enumerate(numbers) if other not in NAMED[probe]]


def _means(heads: Sequence[Unit], runs: Sequence[dict[Unit, Tensor]]) -> Float[Tensor, "unit measure"]:
    return torch.stack([torch.stack([run[head] for run in runs]).double().mean(0) for head in heads])


def _behaviour(
    name: str,
    data: str,
    heads: Sequence[Unit],
    measures: Float[Tensor, "unit measure"],
    control: Float[Tensor, "unit measure"] | None,
    sinks: Float[Tensor, " unit"] | None,
    columns: tuple[int, Sequence[int]],
) -> BehaviourReading:
    """All heads' rows, ranked."""
    own, null = columns
    threshold = SINK_THRESHOLD if name == "first" else THRESHOLD
    excess = measures if control is None else measures - control
    pool = excess[:, list(null)].flatten()
    p = p_values(excess[:, own], pool)
    q = q_values(p)
    scores = measures[:, own]
    seen = None if sinks is None or name == "first" else scores / (1 - sinks.double()).clamp_min(1e-6)
    ranks, seen_ranks = _ranks(scores), None if seen is None else _ranks(seen)
    rows = [
        HeadRow(
            head=str(head),
            layer=head.layer or 0,
            index=head.head_index or 0,
            score=float(scores[i]),
            control=None if control is None else float(control[i, own]),
            excess=float(excess[i, own]),
            without_sink=None if seen is None else float(seen[i]),
            sink=None if sinks is None else float(sinks[i]),
            null=float(excess[i, list(null)].mean()),
            p=float(p[i]),
            q=float(q[i]),
            rank=ranks[i],
            rank_without_sink=None if seen_ranks is None else seen_ranks[i],
            found=bool(q[i] <= RATE and excess[i, own] >= threshold),
        )
        for i, head in enumerate(heads)
    ]
    summary = {"count": float(len(pool)), "q95": float(pool.quantile(0.95)), "largest": float(pool.max())}
    return BehaviourReading(name, data, threshold, summary, sorted(rows, key=lambda row: row.rank))


def _ranks(scores: Float[Tensor, " unit"]) -> list[int]:
    order = scores.sort(descending=True, stable=True).indices
    return (torch.empty_like(order).index_copy(0, order, torch.arange(len(order))) + 1).tolist()


def _primary(name: str, runs: dict[str, list[HeadRun]]) -> str:
    """The text that a behaviour is defined on."""
    return "text" if name in ("previous", "first") and "text" in runs else "random"


def _mean(values) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def _notes(model: "Model", tokens: RandomTokens, verify: bool, found: dict[str, list[str]]) -> list[str]:
    notes = [
        f"{unit}: its heads cannot be told apart, {reason}" for unit, reason in model.anatomy.refusals("heads").items()
    ]
    if tokens.first is None:
        notes.append("The model has no beginning-of-sequence token: a random token stands first, and is left out.")
    if model.tokenizer is None:
        notes.append("The model came without a tokenizer, so nothing was measured on text.")
    if model.anatomy.readout.opaque is not None:
        notes.append(f"No copying scores: {model.anatomy.readout.opaque}.")
    if verify:
        notes += [f"No head was found for {name}, so none was taken out." for name in TAKEN_OUT if not found.get(name)]
    return notes
