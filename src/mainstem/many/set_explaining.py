"""`explain` on many prompts: which units write the answers, on average.

Each prompt is run and explained, as it would be alone. The units that at least one prompt lists are then scored exactly
on every prompt, so that a mean is over all of them and not over those where the unit did well. For that each prompt is
run a second time: a forward pass costs less than an explanation, and no run is kept, however many prompts there are. A
unit that no prompt lists has on each prompt a score not beyond the last one listed there; the mean of those is
`elsewhere`, and every row with a mean beyond it is in its true place among all units.

Source positions are not the same place in different prompts: an attention subvalue L9H8@3 is counted under its head,
L9H8@, with the head's largest (with `negative`, smallest) score over sources on each prompt. An expert's neuron that
was not chosen wrote nothing, which scores 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mainstem.analysis.attribution import Scored
from mainstem.analysis.increase import increases
from mainstem.analysis.ranking import KIND_LEVELS
from mainstem.analysis.scores import RULES, check_score
from mainstem.errors import UsageError
from mainstem.explain.explaining import DEFAULT_KINDS, check_options
from mainstem.lab.pairs import PromptPair
from mainstem.many.prompt_sets import (
    Found,
    Progress,
    as_tokens,
    gathered,
    mean_of,
    prompt_of,
    reading,
    stability_of,
)
from mainstem.results.explanation import Explanation
from mainstem.results.prompt_set import MeanRow, PromptSetReading
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model
    from mainstem.tracing import Trace

CHUNK = 256
"""How many units are read through the vocabulary at once."""


def explain_set(
    model: "Model",
    pairs: Sequence[PromptPair],
    *,
    chat: bool = False,
    progress: Progress | None = None,
    score: str = "increase",
    norm: str = "frozen",
    position: int = -1,
    top: int = 10,
    negative: bool = False,
    **options: Any,
) -> PromptSetReading:
    """Who writes the answers of many prompts.

    Args:
        model: the model.
        pairs: their clean prompts are explained, for their answers against their wrong answers.
        chat: whether to wrap prompts in the model's chat template.
        progress: called with the number of steps done and of all, two for each prompt.
        score: as `Model.explain`; scores that are measured on the model are refused.
        norm: as there.
        position: as there.
        top: as there.
        negative: as there.
        **options: others of `Model.explain` that are not about the target.

    Raises:
        PromptError, TokenError, TargetError: names the line.
        UsageError, ChoiceError, LevelRefusedError: as `Model.explain`.
        CertificateError: if the stream is accounted for on no prompt.
    """
    kinds = tuple(options.get("kinds", DEFAULT_KINDS))
    check_options(score, norm, kinds, top, negative)
    check_score(score, norm, negative, any(pair.wrong_answers for pair in pairs))
    if RULES[score].measured:
        raise UsageError(f"The score {score!r} is measured on one prompt at a time", "--score", "Take increase.")

    def run(pair: PromptPair) -> "Trace":
        return model.trace(prompt_of(pair), positions=(position,), chat=chat)

    def one(pair: PromptPair) -> Found:
        made = run(pair).explain(
            target=as_tokens(pair.answers), against=as_tokens(pair.wrong_answers),
            score=score, norm=norm, position=position, top=top, negative=negative, **options,
        )  # fmt: skip
        return Found(_own(made), made, made.warnings, made.notes, _failed(made))

    def step(done: int) -> None:
        if progress is not None:
            progress(done, 2 * len(pairs))

    found = gathered(model, pairs, one, chat, lambda done, of: step(done), position)
    explanations: list[Explanation] = [each.result for each in found.found]
    units = list(dict.fromkeys(Unit.parse(value.unit) for made in explanations for value in made.values))
    table: dict[str, list[float]] = {}
    for n, (pair, made) in enumerate(zip(found.pairs, explanations, strict=True)):
        scorer = _Scorer(run(pair), made, as_tokens(pair.answers), as_tokens(pair.wrong_answers), negative)
        for name, value in scorer.scores(units).items():
            table.setdefault(name, []).append(value)
        step(2 * len(pairs) - len(explanations) + n + 1)
    rows = _rows(score, table, explanations, negative, model.seed)
    return reading(
        model, found, "explain",
        {"score": score, "norm": norm, "position": position, "top": top, "negative": negative,
         "kinds": explanations[0].kinds},
        rows=rows,
        outcomes=_outcomes(explanations, model.seed),
        verdicts=_verdicts(explanations),
        elsewhere=_elsewhere(explanations, top, negative),
        stability=stability_of(list(table.values()), model.seed),
        notes=[*_about_stability(len(rows), len(explanations)), *_about_heads(_sources(units), negative)],
    )  # fmt: skip


def _rows(
    score: str, table: dict[str, list[float]], explanations: Sequence[Explanation], negative: bool, seed: int
) -> list[MeanRow]:
    """The units of the table by their means, each with how many prompts list it and from which sources."""
    units = [[Unit.parse(value.unit) for value in made.values] for made in explanations]
    listed = [set(map(_named, own)) for own in units]
    means = {name: mean_of(values, seed) for name, values in table.items()}
    sources = _sources(unit for own in units for unit in own)
    return [
        MeanRow(name, {score: means[name]}, sum(name in own for own in listed), sources.get(name))
        for name in sorted(means, key=lambda name: (means[name].mean if negative else -means[name].mean, name))
    ]


def _elsewhere(explanations: Sequence[Explanation], top: int, negative: bool) -> float | None:
    """The mean of the last scores listed, beyond which no other unit has a mean; None where every unit is listed."""
    best = min if negative else max
    ends = [best(made.values[-1].score or 0.0, 0.0) for made in explanations if len(made.values) == top]
    return sum(ends) / len(explanations) if ends else None


def _about_stability(rows: int, prompts: int) -> list[str]:
    if prompts < 2 or rows < 2:
        return []
    return [f"Halves of the prompts are compared over the {rows} units of the table, and not over all that there are."]


def _own(made: Explanation) -> dict[str, Any]:
    after = None if made.verification is None else made.verification.ablated["probability"]
    return {
        "probability": made.target.probability,
        "rank": made.target.rank,
        "values": [{"unit": value.unit, "score": value.score} for value in made.values],
        "verdict": None if made.verification is None else made.verification.verdict,
        "probability_ablated": after,
        "relative_error": made.certificate.relative_error,
    }


def _failed(made: Explanation) -> str | None:
    """Which certificates do not hold."""
    own = made.certificate
    checks = (("sum", own.holds, own.failed), ("labels", own.labels.holds, own.labels.where),
              ("reads", own.reads.holds, own.reads.where))  # fmt: skip
    return ", ".join(name + (f" at {at}" if at else "") for name, holds, at in checks if not holds) or None


def _named(unit: Unit) -> str:
    """The name under which a unit is counted: its address, for a subvalue without the number of its source."""
    return str(unit) if unit.source is None else f"{replace(unit, source=None)}@"


def _sources(units: Iterable[Unit]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for unit in units:
        if unit.source is not None:
            found.setdefault(_named(unit), set()).add(unit.source)
    return {name: sorted(places) for name, places in found.items()}


def _about_heads(sources: dict[str, list[int]], negative: bool) -> list[str]:
    if not sources:
        return []
    which = "smallest" if negative else "largest"
    return [f"Attention subvalues are counted by head, at any source: L9H8@ is the head's {which} on each prompt."]


def _outcomes(explanations: Sequence[Explanation], seed: int) -> list[MeanRow]:
    """The target's probability, and without the top units where a verdict was asked for."""
    means = {"probability": mean_of([made.target.probability or 0.0 for made in explanations], seed)}
    checked = [made.verification for made in explanations if made.verification is not None]
    if checked:
        without = [one.ablated["probability"] for one in checked]
        means["without the top units"] = mean_of(without, seed)
        lost = [one.before.probability - after for one, after in zip(checked, without, strict=True)]
        means["lost"] = mean_of(lost, seed)
    return [MeanRow("answers", means)]


def _verdicts(explanations: Sequence[Explanation]) -> dict[str, int]:
    given = [made.verification.verdict for made in explanations if made.verification is not None]
    return {verdict: given.count(verdict) for verdict in dict.fromkeys(given)}


class _Scorer:
    """Exact scores of chosen units on one prompt."""

    def __init__(self, trace: "Trace", made: Explanation, answers: list[str], wrong: list[str], negative: bool) -> None:
        self.trace, self.made, self.best = trace, made, min if negative else max
        self.target = trace.model.target(answers, wrong)

    def scores(self, units: Sequence[Unit]) -> dict[str, float]:
        """The score under each name: the head's best over sources for subvalues, 0 for what is not there."""
        found: dict[str, float] = {}
        for level in dict.fromkeys(KIND_LEVELS[unit.kind] for unit in units):
            names = {_named(unit) for unit in units if KIND_LEVELS[unit.kind] == level}
            for name, score in self._at(level, [unit for unit in units if KIND_LEVELS[unit.kind] == level], names):
                found[name] = score if name not in found else self.best(found[name], score)
        return {name: found.get(name, 0.0) for name in dict.fromkeys(map(_named, units))}

    def _at(self, level: str, units: Sequence[Unit], names: set[str]) -> list[tuple[str, float]]:
        decomposition = self.trace.decompose(level, self.made.position)  # type: ignore[arg-type]
        whole = [unit for unit in units if unit.source is None]
        parts: list[Scored] = []
        for group in decomposition.groups:
            if group.kind == "attention_subvalue":
                parts += [Scored(u, group, i, 0.0) for i, u in enumerate(group.units) if _named(u) in names]
            elif KIND_LEVELS.get(group.kind) == level:
                parts += [Scored(u, group, i, 0.0) for u in whole if u.kind == group.kind for i in group.places(u)]
        if self.made.score == "increase":
            values = [
                value
                for start in range(0, len(parts), CHUNK)
                for value in increases(decomposition, parts[start : start + CHUNK], self.target, self.made.norm)  # type: ignore[arg-type]
            ]
        else:
            values = self._computed(level, parts)
        return [(_named(part.unit), value) for part, value in zip(parts, values, strict=True)]

    def _computed(self, level: str, parts: Sequence[Scored]) -> list[float]:
        """Scores that are computed for all units at once."""
        made = self.trace.scores(
            self.target, [self.made.score], level=level, kinds=sorted({part.group.kind for part in parts}),
            norm=self.made.norm, position=self.made.position,
        )  # fmt: skip
        by_unit = {group.units[0]: own for group, own in zip(made.groups, made.values[self.made.score], strict=True)}
        return [float(by_unit[part.group.units[0]][part.index]) for part in parts]
