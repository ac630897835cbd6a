"""The six-relations evaluation: which score finds the units that hold a fact (Yu and Ananiadou, EMNLP 2024).

Prompts over language, capital, country, colour, number and month, those that the model passes. For each prompt the ten
FFN neurons that a score puts first are zeroed at the last position (their table 2); then 25 FFN and 75 attention
neurons, and 100 and 200; then the query neurons that activate the attention neurons. Everything stands beside as many
other units: random ones, norm-matched ones, and the top units of other tokens. Intervals are bootstrap intervals of
95 % over prompts.

Cost: a few forward passes and one exhaustive pass over FFN neurons and vocabulary for all prompts together; about six
seconds a prompt and the pass, on two slow cores.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from mainstem.analysis.alone import ranks_alone
from mainstem.analysis.scores import PUBLISHED
from mainstem.analysis.statistics import interval
from mainstem.causal.outcomes import NAMED, RANDOM, Outcome
from mainstem.errors import UsageError
from mainstem.experiments.knowledge_claims import claims
from mainstem.experiments.knowledge_runs import FFN, PromptRun, Ranks, mean_outcome, run_prompt, shared
from mainstem.experiments.outcome import Experiment, ExperimentTable, Figure
from mainstem.experiments.prompts import Prompt, known

if TYPE_CHECKING:
    from mainstem.session import Model

PER_RELATION = 10
QUICK_PER_RELATION = 2
EXTRA = ("additive", "direct", "gradient", "integrated-gradients")
"""Scores that the published table does not have."""


def run(
    model: "Model",
    quick: bool = False,
    per_relation: int | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Experiment:
    """Runs the evaluation.

    Args:
        model: the model, with its tokenizer.
        quick: two prompts of each relation, without integrated gradients, and fewer draws of controls.
        per_relation: how many prompts of each relation at most; 10 by default, 0 for all.
        report: receives a line of progress for each prompt.

    Raises:
        UsageError: if the model passes no prompt, or has no tokenizer.
    """
    if model.tokenizer is None:
        raise UsageError("The prompts are text, and this model came without a tokenizer", None, "Give it one.")
    most = per_relation if per_relation is not None else QUICK_PER_RELATION if quick else PER_RELATION
    prompts, tried = known(model, most or None)
    if not prompts:
        raise UsageError("The model passes none of the prompts", model.loaded.name, "Try a larger model.")
    scores = [*PUBLISHED, *(name for name in EXTRA if not quick or name != "integrated-gradients")]
    report(f"{len(prompts)} prompts of {tried} are passed; ranks of their answers in all FFN neurons ...")
    ranks = _shared_ranks(model, prompts)
    runs = []
    for number, prompt in enumerate(prompts, start=1):
        report(f"prompt {number} of {len(prompts)}: {prompt.text}")
        own = None if ranks is None else ranks[prompt.id]
        runs.append(run_prompt(model, prompt, scores, own, 3 if quick else 10, 2 if quick else 5))
    return _assemble(model, runs, tried, scores)


def _shared_ranks(model: "Model", prompts: Sequence[Prompt]) -> dict[int, Ranks] | None:
    """Ranks of every answer in what every FFN neuron says; None where that differs from prompt to prompt."""
    made = model.trace(prompts[0].text).decompose("units")
    if not any(group.kind in FFN for group in made.groups):
        raise UsageError("The evaluation needs FFN neurons", model.loaded.name, "Try another model.")
    plain = all(
        group.tail.left is None and group.tail.diag is not None and bool((group.tail.diag == 1).all())
        for group in made.groups
        if group.kind in FFN
    )
    if not plain or any(group.kind == "expert_neuron" for group in made.groups):
        return None
    tokens = list(dict.fromkeys(prompt.id for prompt in prompts))
    found = ranks_alone(made, torch.tensor(tokens, device=made.moment.stream.device), FFN)
    return {
        token: {number: (up[:, i], down[:, i]) for number, (up, down) in enumerate(found)}
        for i, token in enumerate(tokens)
    }


def _assemble(model: "Model", runs: list[PromptRun], tried: int, scores: Sequence[str]) -> Experiment:
    anatomy = model.anatomy
    by_relation: dict[str, list[PromptRun]] = defaultdict(list)
    for one in runs:
        by_relation[one.prompt.relation].append(one)
    overlap = _overlap(runs)
    return Experiment(
        name="knowledge",
        title="Six relations: which score finds the units that hold a fact",
        question=f"{len(runs)} of {tried} prompts are passed: the answer is among the ten likeliest tokens and above "
        "all other answers of its relation",
        provenance=model.provenance(),
        model={"name": model.loaded.name, "n_layers": anatomy.sizes.n_layers, "d_model": anatomy.sizes.d_model,
               "dtype": model.loaded.dtype},
        claims=claims(runs, anatomy.sizes.n_layers, overlap, scores),
        tables=[_compared(runs, scores), _taken(runs), _controls(runs), _queries(runs), _relations(by_relation)],
        figures=[_figure(runs, scores)],
        notes=[
            "All units are zeroed at the last position, query neurons at all positions; norm frozen.",
            "Query neurons: the 100 FFN neurons with the largest totals over the thirty strongest attention neurons.",
        ],
    )  # fmt: skip


def _row(name: str, outcomes: Sequence[Outcome], before: Sequence[Outcome]) -> list:
    p = interval([one.probability for one in outcomes])
    mrr = interval([one.reciprocal_rank for one in outcomes])
    drop = interval([1 - a.probability / b.probability for a, b in zip(outcomes, before, strict=True)])
    return [name, mrr, p, drop]


def _compared(runs: Sequence[PromptRun], scores: Sequence[str]) -> ExperimentTable:
    before = [one.before for one in runs]
    rows = [_row("the model itself", before, before)]
    rows += [_row(name, [one.compared[name] for one in runs], before) for name in scores]
    return ExperimentTable(
        "Ten FFN neurons zeroed",
        "the answer without the ten FFN neurons that each score puts first; lower is better",
        ["score", "MRR", "probability", "lost"],
        rows,
    )


def _taken(runs: Sequence[PromptRun]) -> ExperimentTable:
    before = [one.before for one in runs]
    rows = [_row(name, [one.taken[name] for one in runs], before) for name in runs[0].taken]
    return ExperimentTable(
        "FFN and attention neurons zeroed",
        "FFN + attention neurons; contrast: by increase of the answer over the other answers of its relation",
        ["ranking", "MRR", "probability", "lost"],
        rows,
    )


def _controls(runs: Sequence[PromptRun]) -> ExperimentTable:
    rows = []
    for name in (*RANDOM, *NAMED):
        for label, pick in (("", lambda one: one.controls), (" (contrast)", lambda one: one.contrast)):
            each = [(pick(one)[name], one.before) for one in runs if pick(one).get(name)]
            if each:
                means = [mean_outcome(found) for found, _ in each]
                rows.append(_row(f"{name}{label}", means, [own for _, own in each]))
    return ExperimentTable(
        "Others zeroed instead",
        "as many units as 25 + 75, chosen otherwise; the mean over draws for each prompt",
        ["control", "MRR", "probability", "lost"],
        rows,
    )


def _queries(runs: Sequence[PromptRun]) -> ExperimentTable:
    with_queries = [one for one in runs if one.queries]
    before = [one.before for one in with_queries]
    names = {"queries": "query neurons", "random": "random FFN neurons"}
    rows = [_row(label, [one.queries[name] for one in with_queries], before) for name, label in names.items()]
    return ExperimentTable(
        "Query neurons zeroed",
        "the FFN neurons that activate the value units, at all positions",
        ["units", "MRR", "probability", "lost"],
        rows if with_queries else [],
    )


def _relations(by_relation: dict[str, list[PromptRun]]) -> ExperimentTable:
    rows = []
    for relation, own in by_relation.items():
        p = interval([one.before.probability for one in own])
        attention = sum(one.shares["attention"] for one in own) / len(own)
        ffn = sum(one.shares["FFN"] for one in own) / len(own)
        lost = interval([1 - one.taken["increase 25 + 75"].probability / one.before.probability for one in own])
        rows.append([relation, len(own), p, lost, attention, ffn])
    return ExperimentTable(
        "Relations",
        "attention, FFN: what sublayers of each kind add to the answer's log-probability, in nats",
        ["relation", "prompts", "probability", "lost to 25 + 75", "attention", "FFN"],
        rows,
    )


def _figure(runs: Sequence[PromptRun], scores: Sequence[str]) -> Figure:
    before = interval([one.before.probability for one in runs])
    bars = [interval([one.compared[name].probability for one in runs]) for name in scores]
    return Figure("Probability of the answer without ten FFN neurons", ["the model itself", *scores], [before, *bars])


def _overlap(runs: Sequence[PromptRun]) -> dict[str, dict[str, float]]:
    """How much pairs of prompts share, of the same and of different relations: value FFN neurons, query neurons."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("values", "queries")}
    for first, second in combinations(runs, 2):
        where = "same" if first.prompt.relation == second.prompt.relation else "other"
        if first.prompt.id == second.prompt.id:
            continue
        values = [{u: v for u, v in one.values if u.kind in FFN} for one in (first, second)]
        found["values"][where].append(shared(*values))
        queries = [dict.fromkeys(one.query_units, 1.0) for one in (first, second)]
        if all(queries):
            found["queries"][where].append(shared(*queries))
    return {name: {w: sum(v) / len(v) for w, v in own.items()} for name, own in found.items()}
