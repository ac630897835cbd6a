"""One prompt of the six-relations evaluation: its rankings, and what taking out what they name does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mainstem.analysis.alone import owners, top_alone
from mainstem.analysis.attribution import Scored
from mainstem.analysis.ranking import rank
from mainstem.analysis.readout import frozen_scale, logits_of
from mainstem.analysis.scores import Scores
from mainstem.causal.ablation import AblatedRuns
from mainstem.causal.controls import Place, Pool, units_of, unrelated
from mainstem.causal.neuron_map import Ablation, NeuronMap
from mainstem.causal.outcomes import NAMED, Outcome
from mainstem.causal.verdict import outcome
from mainstem.experiments.prompts import Prompt
from mainstem.explain.verifying import COUNTS, KINDS, Ranker, another
from mainstem.run.inputs import base_arguments
from mainstem.targets import Target
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model
    from mainstem.tracing import Trace

FFN = set(KINDS["ffn"])
COMPARED = 10
SIZES = {"25 + 75": COUNTS, "100 + 200": {"ffn": 100, "attention": 200}}
SMALL = SIZES["25 + 75"]
QUERIES = 100
VALUES = 30

Ranks = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""For the number of each group the ranks of one token, with a positive and a negative coefficient."""


@dataclass(frozen=True)
class PromptRun:
    """What was measured on one prompt.

    Attributes:
        before: the answer in the unchanged run.
        compared: without the ten FFN neurons that each score puts first.
        taken: without 25 + 75 and 100 + 200 units by `increase`, `additive`, and by `increase` of the contrast.
        controls: without as many others, draw by draw; `contrast` those of the contrast's ranking.
        queries: without the query neurons, and without as many random ones (mean of the draws).
        values: the value units by `increase`, with their scores: 25 FFN and 75 attention neurons.
        query_units: the query neurons.
        shares: what attention and FFN sublayers add along the stream, in nats.
    """

    prompt: Prompt
    before: Outcome
    compared: dict[str, Outcome]
    taken: dict[str, Outcome]
    controls: dict[str, list[Outcome]]
    contrast: dict[str, list[Outcome]]
    queries: dict[str, Outcome]
    values: list[tuple[Unit, float]]
    query_units: list[Unit]
    shares: dict[str, float] = field(default_factory=dict)


def run_prompt(
    model: "Model", prompt: Prompt, scores: Sequence[str], ranks: Ranks | None, draws: int, rivals: int
) -> PromptRun:
    """Measures one prompt.

    Args:
        model: the model.
        prompt: a prompt that it passes.
        scores: which are compared.
        ranks: of the answer in what each FFN neuron says, where that was found for all prompts at once.
        draws: of each random control.
        rivals: how many tokens of the answer's kind, and how many unrelated ones, are ranked for as controls.
    """
    trace = model.trace(prompt.text)
    ids = trace.inputs.ids
    last = ids.shape[1] - 1
    runs = AblatedRuns(model.module, model.anatomy, ids, last, many=True, **base_arguments(model.module))
    ranker, neurons = Ranker(trace), NeuronMap(model.anatomy)
    target = Target(ids=(prompt.id,), text=prompt.answer)
    contrast = Target(ids=(prompt.id,), against=prompt.kind, text=prompt.answer)

    def after(sets: Sequence[Sequence[Unit]], everywhere: bool = False) -> list[Outcome]:
        made: list[Ablation] = [neurons.ablation(units, everywhere=everywhere) for units in sets]
        return [outcome(row[None], [prompt.id]) for row in runs.logits(made)]

    lists = compared_units(trace, ranker, target, scores, ranks)
    compared = dict(zip(lists, after(list(lists.values())), strict=True))
    chosen = _chosen(ranker, target, contrast)
    taken = dict(zip(map(" ".join, chosen), after([units_of(places) for places in chosen.values()]), strict=True))
    generator = torch.Generator().manual_seed(model.seed)
    pool = Pool(ranker.groups(), generator)
    controls = pool.random_sets(chosen["increase", "25 + 75"], draws)
    controls |= named_sets(ranker, runs.clean, prompt, target, rivals, generator)
    against = named_sets(ranker, runs.clean, prompt, contrast, rivals, generator)
    values = increases_of(ranker, target)
    query_units = query_neurons(trace, values, target)
    queries = {}
    if query_units:
        alike = [_random_like(pool, query_units) for _ in range(draws)]
        found, *random = after([query_units, *alike], everywhere=True)
        queries = {"queries": found, "random": mean_outcome(random)}
    return PromptRun(
        prompt=prompt,
        before=outcome(runs.clean[None], [prompt.id]),
        compared=compared,
        taken=taken,
        controls={name: after(list(map(units_of, sets))) for name, sets in controls.items()},
        contrast={name: after(list(map(units_of, sets))) for name, sets in against.items()},
        queries=queries,
        values=values,
        query_units=query_units,
        shares=_shares(trace, target),
    )


def _chosen(ranker: Ranker, target: Target, contrast: Target) -> dict[tuple[str, str], list[Place]]:
    """The units that are taken out, by ranking and size."""
    return {
        (name, size): ranker.top(wanted, counts, score)
        for size, counts in SIZES.items()
        for name, score, wanted in (
            ("increase", "increase", target),
            ("additive", "additive", target),
            ("contrast", "increase", contrast),
        )
    }


def compared_units(
    trace: "Trace", ranker: Ranker, target: Target, scores: Sequence[str], ranks: Ranks | None
) -> dict[str, list[Unit]]:
    """The ten FFN neurons that each score puts first; those that read the vocabulary by exact search."""
    found: dict[str, list[Unit]] = {}
    made = ranker.decompositions["units"]
    searched = {
        "increase": lambda: ranker.top(target, {"ffn": COMPARED}, "increase"),
        "log-probability": lambda: _places(top_alone(made, target.token_id, FFN, COMPARED)),
        "probability-increase": lambda: top_probability_increase(ranker, target, COMPARED),
    }
    others = [name for name in scores if name not in searched and not (ranks and name.endswith("rank"))]
    table = trace.scores(target, others, kinds=sorted(FFN & {g.kind for g in ranker.groups("ffn")}))
    for name in scores:
        if name in searched:
            found[name] = units_of(searched[name]())
        elif name in others:
            found[name] = [part.unit for part in table.top(name, COMPARED)]
        else:
            assert ranks is not None
            found[name] = [part.unit for part in top_by_rank(table, ranks, name)]
    return found


def _places(parts: Sequence[Scored]) -> list[Place]:
    return [(part.group, part.index) for part in parts]


def top_by_rank(table: Scores, ranks: Ranks, name: str) -> list[Scored]:
    """The neurons with the largest 1 / rank or |coefficient| / rank; ties in the order of addresses."""
    values = []
    for number, group in enumerate(table.groups):
        up, down = ranks[number]
        own = torch.where(group.coefficients > 0, up, down).double()
        own = torch.where(group.coefficients == 0, torch.ones_like(own), own)
        sizes = group.coefficients.double().abs() if name == "coefficient-rank" else 1.0
        values.append(sizes / own)
    found = Scores(table.decomposition, table.groups, table.norm, {name: values})
    return found.top(name, COMPARED)


def top_probability_increase(ranker: Ranker, target: Target, count: int) -> list[Place]:
    """By p(w | x + v) - p(w | x): in each layer its order is that of the increase."""
    made = ranker.decompositions["units"]
    readout = made.moment.anatomy.readout
    scale = frozen_scale(readout, made.moment.stream)
    found: list[tuple[float, tuple[int, ...], Place]] = []
    for group, entry in owners(made, FFN):
        alone = {"units": replace(made, groups=[group])}
        best = rank(alone, target, "increase", "frozen", {group.kind}, False, False, count)
        before = float(logits_of(readout, entry.base[None], scale).double().log_softmax(-1)[0, target.token_id].exp())
        for part in best.values:
            gain = before * float(torch.tensor(part.score, dtype=torch.float64).expm1())
            found.append((-gain, part.unit.sort_key, (part.group, part.index)))
    return [place for _, _, place in sorted(found, key=lambda row: row[:2])[:count]]


def named_sets(
    ranker: Ranker, logits: torch.Tensor, prompt: Prompt, target: Target, count: int, generator
) -> dict[str, list[list[Place]]]:
    """The top units of unrelated tokens, of the likeliest rivals of the answer's kind, and of the runner-up."""
    by_likelihood = sorted(prompt.kind, key=lambda token: -float(logits[token]))[:count]
    runner = next(token for token in logits.argsort(descending=True).tolist() if token != prompt.id)
    tokens = dict(zip(NAMED, (unrelated(logits, [prompt.id], count, generator), by_likelihood, [runner]), strict=True))
    return {
        name: [ranker.top(another(target, (token,)), SMALL, "increase") for token in own]
        for name, own in tokens.items()
    }


def increases_of(ranker: Ranker, target: Target) -> list[tuple[Unit, float]]:
    """The value units by increase: 25 FFN and 75 attention neurons, with their scores in nats."""
    found: list[tuple[Unit, float]] = []
    wanted = {"units": (FFN, SMALL["ffn"]), "attention_neurons": ({"attention_neuron"}, SMALL["attention"])}
    for level, (kinds, count) in wanted.items():
        own = {level: ranker.decompositions[level]}
        values = rank(own, target, "increase", "frozen", kinds, False, False, count).values
        found += [(part.unit, part.score) for part in values]
    return found


def query_neurons(trace: "Trace", values: Sequence[tuple[Unit, float]], target: Target) -> list[Unit]:
    """The FFN neurons that activate the strongest attention neurons, at the sources that those read."""
    attention = [(unit, score) for unit, score in values if unit.kind == "attention_neuron"][:VALUES]
    made = trace.query_totals(attention, over="neurons", top=QUERIES, target=target)
    return list(dict.fromkeys(Unit.parse(row["unit"]) for row in made.rows))


def _random_like(pool: Pool, units: Sequence[Unit]) -> list[Unit]:
    groups = [group for kind in sorted(FFN) for group in pool.by_kind[kind]]
    like = [
        (group, i) for unit in units for group in groups if group.sublayer == unit.sublayer for i in group.places(unit)
    ]
    return units_of(pool.anywhere(like))


def _shares(trace: "Trace", target: Target) -> dict[str, float]:
    """The sublayers' log-probability increases by kind, nats."""
    made = {"sublayers": trace.decompose("sublayers")}
    values = rank(made, target, "increase", "frozen", {"sublayer"}, False, True, 10_000).values
    shares: dict[str, float] = {"attention": 0.0, "FFN": 0.0}
    for part in values:
        shares["attention" if part.unit.place == "attn" else "FFN"] += part.score
    return shares


def mean_outcome(rows: Sequence[Outcome]) -> Outcome:
    """The mean of several runs."""
    count = max(len(rows), 1)
    return Outcome(
        sum(row.probability for row in rows) / count,
        sum(row.log_probability for row in rows) / count,
        sum(row.rank for row in rows) / count,
        sum(row.reciprocal_rank for row in rows) / count,
    )


def shared(first: Mapping[Unit, float], second: Mapping[Unit, float]) -> float:
    """Which part of the units of one prompt another has as well."""
    return len(first.keys() & second.keys()) / max(1, min(len(first), len(second)))
