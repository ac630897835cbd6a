"""Putting a causal verdict together: which units a score names, for the target and for the tokens of the controls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Group
from mainstem.analysis.ranking import KIND_LEVELS, Ranking, rank
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.scores import RULES, check_score
from mainstem.analysis.search import IncreaseSearch
from mainstem.causal.ablation import AblatedRuns
from mainstem.causal.controls import Place, same_type, units_of, unrelated
from mainstem.causal.neuron_map import NeuronMap
from mainstem.causal.outcomes import NAMED, Verification
from mainstem.causal.reference import LONGEST, NeuronValues, observe, reference_text
from mainstem.causal.verdict import Question, outcome, verify
from mainstem.errors import ChoiceError, LevelRefusedError, UsageError
from mainstem.explain.scoring import measured_levels
from mainstem.intervene.intervening import require_whole_edits
from mainstem.run.inputs import base_arguments, context_length
from mainstem.targets import Target

if TYPE_CHECKING:
    from mainstem.session import Model
    from mainstem.tracing import Trace

COUNTS = {"ffn": 25, "attention": 75}
"""How many neurons of each kind are taken out by default: 0.16 % of the default model's."""

KINDS = {"ffn": ("ffn_neuron", "expert_neuron"), "attention": ("attention_neuron",)}
ELSEWHERE = (
    "The opposite of hot is",
    "The month that comes after June is",
    "In Brazil most people speak",
    "Two plus two is equal to",
    "On a clear day the colour of the sky is",
)
"""Prompts on which the same units are taken out, to see what else depends on them."""


def verify_trace(
    trace: "Trace",
    target: Target,
    counts: Mapping[str, int] | None = None,
    score: str = "increase",
    norm: NormConvention = "frozen",
    position: int = -1,
    everywhere: bool = False,
    draws: int = 10,
    row: int = 0,
) -> Verification:
    """Takes the units that a score names out of the run, beside controls, and says whether they hold the prediction.

    Args:
        trace: the run.
        target: the tokens; rivals make the rankings contrasts, and are the tokens "of its kind".
        counts: how many `ffn` neurons (experts' included) and `attention` neurons.
        score: what ranks them.
        norm: `frozen` or `recompute`.
        position: the destination, negative from the end.
        everywhere: take them out at all positions, not at the destination alone.
        draws: how many of each control.
        row: which prompt of a batch.

    Raises:
        ChoiceError, UsageError: for an unknown score or kind, a count below 0, or nothing to take out.
        LevelRefusedError: if neurons cannot be had.
        EditError: if an edit of one row of a batch holds.
    """
    trace.run.require_same_edits()
    require_whole_edits(trace.model)
    counts = dict(COUNTS if counts is None else counts)
    check_score(score, norm, rivals=bool(target.against))
    _check(trace, counts, target)
    model = trace.model
    place = trace.inputs.place(position, row)
    ids = trace.inputs.ids[row : row + 1, trace.inputs.padding[row] :]
    forward = base_arguments(model.module)
    runs = AblatedRuns(model.module, model.anatomy, ids, place, many=True, **forward)
    ranker = Ranker(trace, [name for name in counts if counts[name]], score, norm, position, row)

    known: dict[tuple[int, ...], list[Place]] = {}

    def top(wanted: Sequence[int]) -> list[Place]:
        if tuple(wanted) not in known:
            known[tuple(wanted)] = ranker.top(another(target, wanted), counts)
        return known[tuple(wanted)]

    generator = torch.Generator().manual_seed(model.seed)
    question = Question(
        runs=runs,
        neurons=NeuronMap(model.anatomy),
        groups=ranker.groups(),
        ids=target.ids,
        top=top,
        others=_others(model, runs.clean, target, draws, generator),
        reference=_reference(model),
        draws=draws,
        everywhere=everywhere,
        seed=model.seed,
    )
    made = verify(question)
    return replace(made, elsewhere=_elsewhere(trace, question, top(target.ids)))


def _check(trace: "Trace", counts: Mapping[str, int], target: Target) -> None:
    for kind, count in counts.items():
        if kind not in KINDS:
            raise ChoiceError("kind to ablate", kind, tuple(KINDS))
        if count < 0:
            raise UsageError(f"{count} units cannot be taken out", f"--ablate {kind}={count}", "Give 0 or more.")
    if not any(counts.values()):
        raise UsageError("There is nothing to take out", "--ablate", "Give ffn=25, attention=75, or one of them.")
    require_tokens(target)


def require_tokens(target: Target) -> None:
    """UsageError for a target that a verdict cannot be on, with the reason."""
    if target.continuation:
        raise UsageError(
            "A causal verdict is on one destination, and a continuation has one for each of its tokens",
            "--verify",
            "Verify them one by one: put the tokens before it into the prompt, and name the token.",
        )
    if target.direction:
        raise UsageError(
            "A causal verdict compares probabilities, beside the tops of other tokens; a direction has neither",
            "--verify",
            "Name a token; for the input of a unit, `Trace.check_queries` takes away what activates it.",
        )


class Ranker:
    """The top neurons of a run for any target under one score.

    Args:
        trace: the run.
        names: which kinds: `ffn`, `attention`.
        score: what ranks them.
        norm: `frozen` or `recompute`.
        position: the destination, negative from the end.
        row: which prompt of a batch.

    Raises:
        LevelRefusedError: if the model has none of these kinds, or its neurons cannot be had.
    """

    def __init__(
        self,
        trace: "Trace",
        names: Sequence[str] = tuple(KINDS),
        score: str = "increase",
        norm: NormConvention = "frozen",
        position: int = -1,
        row: int = 0,
    ) -> None:
        self.trace, self.score, self.row = trace, score, row
        self.norm: NormConvention = norm
        levels = {KIND_LEVELS[kind] for name in names for kind in KINDS[name]}
        self.decompositions = {level: trace.decompose(level, position, row) for level in sorted(levels)}  # type: ignore[arg-type]
        self._searches: dict[str, IncreaseSearch] = {}
        self.names = [name for name in names if self.groups(name)]
        if not self.names:
            raise LevelRefusedError("No neurons that can be taken out", reason="the model has none of these kinds")

    def groups(self, *names: str) -> list[Group]:
        """The groups of parts that hold the candidates."""
        kinds = {kind for name in names or self.names for kind in KINDS[name]}
        made = self.decompositions.values()
        return [group for decomposition in made for group in decomposition.groups if group.kind in kinds]

    def top(self, target: Target, counts: Mapping[str, int], score: str | None = None) -> list[Place]:
        """The top units for a target, kind by kind."""
        found: list[Place] = []
        for name in self.names:
            if counts.get(name):
                level = KIND_LEVELS[KINDS[name][0]]
                own = {level: self.decompositions[level]}
                kinds = set(KINDS[name])
                if (score or self.score) == "increase":
                    found += self._searched(name, target, counts[name])
                    continue
                made = self._ranked(own, target, score or self.score, kinds, counts[name])
                found += [(value.group, value.index) for value in made.values]
        return found

    def _searched(self, name: str, target: Target, count: int) -> list[Place]:
        """By exact search; the streams that units are added to are read once for all targets."""
        if name not in self._searches:
            made = self.decompositions[KIND_LEVELS[KINDS[name][0]]]
            self._searches[name] = IncreaseSearch([(made, target)], self.norm, set(KINDS[name]))
        search = self._searches[name].for_targets([target])
        return [(found.groups[0], found.index) for found in search.top(count).found if found.groups[0] is not None]

    def _ranked(
        self, own: dict[str, Decomposition], target: Target, score: str, kinds: set[str], count: int
    ) -> Ranking:
        given = None
        if RULES[score].measured:
            given, _ = measured_levels(self.trace, own, target, score, kinds, self.row)
        return rank(own, target, score, self.norm, kinds, False, False, count, given)


def another(target: Target, ids: Sequence[int]) -> Target:
    """The target itself, or the same question about other tokens: against the same rivals, where it has any."""
    if tuple(ids) == target.ids:
        return target
    rivals = [token for token in (*target.against, *target.ids) if token not in ids]
    return Target(ids=tuple(ids), against=tuple(rivals) if target.against else ())


def _others(model: "Model", logits: torch.Tensor, target: Target, draws: int, generator) -> dict[str, list[int]]:
    runner = next(token for token in logits.argsort(descending=True).tolist() if token not in target.ids)
    kind = list(target.against) or same_type(model.anatomy.readout, logits, target.ids, draws, model.token)
    return dict(zip(NAMED, (unrelated(logits, target.ids, draws, generator), kind[:draws], [runner]), strict=True))


def _reference(model: "Model") -> NeuronValues | None:
    """What neurons do on the text that comes with the package; None without a tokenizer."""
    if model.tokenizer is None:
        return None
    ids = model.encode(reference_text())[: min(LONGEST, context_length(model.module) or LONGEST)]
    if len(ids) < 2:
        return None
    device = next(model.module.parameters()).device
    return observe(model.module, model.anatomy, torch.tensor([ids], device=device), **base_arguments(model.module))


def _elsewhere(trace: "Trace", question: Question, chosen: Sequence[Place]) -> list[dict]:
    """What the same units do for the predictions of other prompts, at their last positions."""
    model = trace.model
    if model.tokenizer is None:
        return []
    units = units_of(chosen)
    rows = []
    for prompt in ELSEWHERE:
        ids = torch.tensor([model.encode(prompt)], device=question.runs.ids.device)
        if torch.equal(ids, question.runs.ids):
            continue
        runs = AblatedRuns(model.module, model.anatomy, ids, ids.shape[1] - 1, **base_arguments(model.module))
        best = int(runs.clean.argmax())
        before = outcome(runs.clean[None], [best])
        after = outcome(runs.logits([question.neurons.ablation(units, None, question.everywhere)]), [best])
        rows.append(
            {
                "prompt": prompt,
                "token": model.token(best),
                "probability": before.probability,
                "ablated_probability": after.probability,
            }
        )
    return rows
