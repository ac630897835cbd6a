"""Whether the units that a score names hold the prediction: they are taken out, beside controls that may do as much.

That a prediction falls when units are zeroed shows that they matter; to show that they hold this very prediction they
must matter more than others. `causal`: taking them out lowers the target's log-probability by more than any draw of
random units of the same layers, of norm-matched ones, and of random ones from anywhere. `causal and specific`: by more
than the top units for unrelated tokens, for rivals of the target's own kind, and for the runner-up as well. Anything
else is `not causal`. The verdict is that of zeroing; mean and resampled replacement stand beside it, and a
disagreement is said.

Sufficiency: all other attention and FFN neurons at the destination are set to their means, and these are kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.analysis.parts import Group
from mainstem.causal.ablation import AblatedRuns
from mainstem.causal.controls import Place, Pool, units_of
from mainstem.causal.neuron_map import Ablation, NeuronMap
from mainstem.causal.outcomes import NAMED, RANDOM, AblationRow, Control, Method, Outcome, Verdict, Verification
from mainstem.causal.reference import NeuronValues
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class Question:
    """What is to be verified.

    Attributes:
        runs: makes runs with units taken out.
        neurons: where neurons are.
        groups: the parts that hold all candidates of the run.
        ids: the target's tokens.
        top: the units for a target's ids, by the score that is verified: (group, place) of each.
        others: for each control that another token names, the tokens.
        reference: values on a reference text, or None.
        draws: how many of each random control.
        everywhere: take out at all positions.
        seed: of the draws.
    """

    runs: AblatedRuns
    neurons: NeuronMap
    groups: Sequence[Group]
    ids: Sequence[int]
    top: Callable[[Sequence[int]], list[Place]]
    others: dict[str, list[int]]
    reference: NeuronValues | None
    draws: int
    everywhere: bool
    seed: int


@dataclass(frozen=True, eq=False)
class _Asked:
    """Runs that make one row of the account: what is taken out in each, and of controls the places."""

    name: str
    method: Method
    count: int
    ablations: Sequence[Ablation]
    draws: Sequence[list[Place]] = ()

    def row(self, logits: Tensor, ids: Sequence[int]) -> AblationRow:
        return AblationRow(self.name, self.method, self.count, len(self.ablations), outcome(logits, ids))


def verify(question: Question) -> Verification:
    """Takes the top units out, and the controls, and says what that shows."""
    generator = torch.Generator().manual_seed(question.seed)
    pool = Pool(question.groups, generator)
    chosen = question.top(question.ids)
    units = units_of(chosen)
    before = outcome(question.runs.clean[None], question.ids)
    methods = _methods(question, units, generator)
    controls = _controls(question, pool, chosen)
    kept = _kept(question, pool, chosen)
    logits = _logits(question, [*methods, *controls, *kept])
    rows = [made.row(logits[made], question.ids) for made in methods]
    zeroed = next(row.outcome for row in rows if row.name == "both" and row.method == "zero")
    drop = before.log_probability - zeroed.log_probability
    compared = [_control(pool, chosen, made, logits[made], question.ids, before, drop) for made in controls]
    verdict = judge(drop, compared)
    return Verification(
        ablated={"units": [str(unit) for unit in units], **zeroed.__dict__},
        before=before,
        everywhere=question.everywhere,
        rows=rows,
        kept=[made.row(logits[made], question.ids) for made in kept],
        controls=compared,
        verdict=verdict,
        notes=_notes(question, rows, before, verdict, pool, len(units)),
    )


def judge(drop: float, controls: Sequence[Control]) -> Verdict:
    """The verdict from the drop in log-probability and from what the controls did."""
    beaten = {control.name: control.beaten for control in controls}
    if not drop > 0 or not all(beaten.get(name, False) for name in RANDOM):
        return "not causal"
    return "causal and specific" if all(beaten.get(name, False) for name in NAMED) else "causal"


def outcome(logits: Tensor, ids: Sequence[int]) -> Outcome:
    """The target's probability, log-probability, rank and reciprocal rank, averaged over runs [run, d_vocab]."""
    log_p = logits.double().log_softmax(-1)
    own = log_p[:, list(ids)].logsumexp(-1)
    best = log_p[:, list(ids)].amax(-1, keepdim=True)
    rank = ((log_p > best).sum(-1) + 1).double()
    return Outcome(float(own.exp().mean()), float(own.mean()), float(rank.mean()), float((1 / rank).mean()))


def _logits(question: Question, asked: Sequence[_Asked]) -> dict[_Asked, Tensor]:
    """The logits of every run that is asked for, made together: few large batches cost less than many small ones."""
    rows = question.runs.logits([ablation for made in asked for ablation in made.ablations])
    return dict(zip(asked, rows.split([len(made.ablations) for made in asked]), strict=True))


def _methods(question: Question, units: Sequence[Unit], generator: torch.Generator) -> list[_Asked]:
    attention = [unit for unit in units if unit.kind == "attention_neuron"]
    ffn = [unit for unit in units if unit.kind != "attention_neuron"]
    sets = {"FFN neurons": ffn, "attention neurons": attention, "both": list(units)}
    asked = []
    methods: tuple[Method, ...] = ("zero", "mean", "resample")
    for method in methods:
        values = _replacements(question, method, generator)
        for name, own in sets.items():
            if own and values:
                made = [question.neurons.ablation(own, value, question.everywhere) for value in values]
                asked.append(_Asked(name, method, len(own), made))
    return asked


def _replacements(question: Question, method: str, generator: torch.Generator) -> list[dict]:
    if method == "zero":
        return [{}]
    if question.reference is None or not len(question.reference):
        return []
    if method == "mean":
        return [question.reference.mean()]
    chosen = torch.randint(len(question.reference), (question.draws,), generator=generator)
    return [question.reference.at(place) for place in chosen.tolist()]


def _controls(question: Question, pool: Pool, chosen: list[Place]) -> list[_Asked]:
    sets = pool.random_sets(chosen, question.draws)
    for name, tokens in question.others.items():
        sets[name] = [question.top([token]) for token in tokens]
    zeroed = {
        name: [question.neurons.ablation(units_of(draw), None, question.everywhere) for draw in draws]
        for name, draws in sets.items()
    }
    return [_Asked(name, "zero", len(sets[name][0]), made, sets[name]) for name, made in zeroed.items() if made]


def _control(
    pool: Pool,
    chosen: list[Place],
    made: _Asked,
    logits: Tensor,
    ids: Sequence[int],
    before: Outcome,
    drop: float,
) -> Control:
    each = [outcome(row[None], ids) for row in logits]
    p = [found.probability for found in each]
    largest = max(before.log_probability - found.log_probability for found in each)
    norm = sum(pool.norm_of(draw) for draw in made.draws) / len(made.draws) / (pool.norm_of(chosen) or 1.0)
    whole = all(len(draw) == len(chosen) for draw in made.draws)  # as many as the top units, or it is no control
    return Control(made.name, len(made.draws), sum(p) / len(p), min(p), max(p), largest, norm, whole and drop > largest)


def _kept(question: Question, pool: Pool, chosen: list[Place]) -> list[_Asked]:
    """Sufficiency: only these neurons keep their values, all others are set to their means."""
    values = question.reference.mean() if question.reference is not None and len(question.reference) else None
    if values is None:
        return []
    sets = {
        "all but the top units": [chosen],
        "all but random ones": [pool.same_layers(chosen) for _ in range(question.draws)],
        "all": [[]],
    }
    asked = []
    for name, draws in sets.items():
        kept = [question.neurons.ablation(units_of(draw), None, question.everywhere) for draw in draws]
        made = [question.neurons.all_but(one, values) for one in kept]
        asked.append(_Asked(name, "mean", len(draws[0]), made))
    return asked


def _notes(
    question: Question, rows: Sequence[AblationRow], before: Outcome, verdict: str, pool: Pool, count: int
) -> list[str]:
    notes = []
    if 2 * count > sum(len(group) for groups in pool.by_kind.values() for group in groups):
        notes.append("the top units are more than half of all, so that there are not as many others to compare with")
    if missing := [name for name in NAMED if not question.others.get(name)]:
        notes.append(f"no token was found for {', '.join(missing)}, so that nothing can be called specific")
    drops = {row.method: before.log_probability - row.outcome.log_probability for row in rows if row.name == "both"}
    gentle = {method: drop for method, drop in drops.items() if method != "zero" and drop < 0.5 * drops["zero"]}
    if verdict != "not causal" and gentle:
        shown = ", ".join(f"{method} {drop:.2f}" for method, drop in gentle.items())
        notes.append(
            f"zeroing takes {drops['zero']:.2f} nats, but replacement less than half of that ({shown}): part of the "
            "effect may come from values that the model never sees"
        )
    if question.reference is None:
        notes.append("no reference text could be read, so that units were zeroed only")
    if any(group.kind == "expert_neuron" for group in question.groups):
        notes.append("experts' neurons are taken out under every method, not replaced, and are kept among all others")
    if math.exp(before.log_probability) < 1e-3:
        notes.append("the target is unlikely to begin with, so that little can be taken from it")
    return notes
