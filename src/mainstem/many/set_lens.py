"""`lens` on many prompts: how the answers rise along the stream, on average.

On each prompt the lens follows the answers and the wrong answers. Several answers are one: their probabilities are
summed, and their rank is that of the best. All prompts have the same states, because one model wrote them.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainstem.analysis.readout import NormConvention
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
from mainstem.read.lens_reading import read_lens
from mainstem.results.description import StateRow
from mainstem.results.prompt_set import MeanRow, PromptSetReading

if TYPE_CHECKING:
    from mainstem.session import Model

Course = dict[str, list[float]]
"""For each quantity its value after every state."""


def read_lens_set(
    model: "Model",
    pairs: Sequence[PromptPair],
    *,
    chat: bool = False,
    progress: Progress | None = None,
    position: int = -1,
    norm: NormConvention = "recompute",
) -> PromptSetReading:
    """The logit lens of the answers of many prompts.

    Args:
        model: the model.
        pairs: the lens is read on their clean prompts.
        chat: whether to wrap prompts in the model's chat template.
        progress: called with the number of prompts done and of all.
        position: as `mainstem.read.lens_reading.read_lens`.
        norm: as there.

    Raises:
        PromptError, PositionError, TokenError, TargetError: names the line.
        CertificateError: if the stream is accounted for on no prompt.
    """

    def one(pair: PromptPair) -> Found:
        trace = model.trace(prompt_of(pair), positions=(position,), chat=chat)
        right, wrong = (_ids(model, answers) for answers in (pair.answers, pair.wrong_answers))
        made = read_lens(trace, [f"id:{token}" for token in [*right, *wrong]], position, norm, 1)
        course = _course(made.states, right, wrong)
        own = {name: values[-1] for name, values in course.items()}
        failed = None if made.certificate.holds else "sum"
        names = [state.unit for state in made.states]
        return Found({**own, "course": course}, (names, course), made.warnings, made.notes, failed)

    found = gathered(model, pairs, one, chat, progress, position)
    names = found.found[0].result[0]
    courses: list[Course] = [each.result[1] for each in found.found]
    rows = [
        MeanRow(
            name,
            {
                quantity: mean_of([course[quantity][i] for course in courses if quantity in course], model.seed)
                for quantity in dict.fromkeys(key for course in courses for key in course)
            },
        )
        for i, name in enumerate(names)
    ]
    table = [[course["log_probability"][i] for course in courses] for i in range(len(names))]
    return reading(
        model,
        found,
        "lens",
        {"norm": norm, "position": position},
        rows=rows,
        stability=stability_of(table, model.seed),
        notes=_unlike(found.pairs),
    )


def _ids(model: "Model", answers: Sequence[str | int]) -> list[int]:
    return list(model.target(as_tokens(answers)).ids) if answers else []


def _course(states: Sequence[StateRow], right: Sequence[int], wrong: Sequence[int]) -> Course:
    course = {"log_probability": _summed(states, right), "rank": _best(states, right)}
    if wrong:
        course |= {"wrong_log_probability": _summed(states, wrong), "wrong_rank": _best(states, wrong)}
    return course


def _summed(states: Sequence[StateRow], ids: Sequence[int]) -> list[float]:
    """The logarithm of the tokens' summed probability, after each state."""
    found = []
    for state in states:
        values = [row.log_probability for row in state.course if row.id in ids]
        most = max(values)
        found.append(most + math.log(sum(math.exp(value - most) for value in values)))
    return found


def _best(states: Sequence[StateRow], ids: Sequence[int]) -> list[float]:
    return [float(min(row.rank for row in state.course if row.id in ids)) for state in states]


def _unlike(pairs: Sequence[PromptPair]) -> list[str]:
    without = sum(not pair.wrong_answers for pair in pairs)
    if not 0 < without < len(pairs):
        return []
    return [f"{without} of {len(pairs)} prompts have no wrong answers; those of the others are averaged."]
