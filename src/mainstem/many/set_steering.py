"""`steer` on many prompts: what the edits do to the probability of the answers, on average.

Every prompt is its own control: the difference with and without the edits is taken on each, and the interval is over
those differences. The edits are the same on all prompts; negative positions count from each prompt's own end.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainstem.causal.edits import Edit
from mainstem.lab.pairs import PromptPair
from mainstem.many.prompt_sets import Found, Progress, gathered, mean_of, prompt_of, reading
from mainstem.results.generation import Compared, Likelihood
from mainstem.results.prompt_set import MeanRow, PromptSetReading

if TYPE_CHECKING:
    from mainstem.session import Model

Both = tuple[float, float]
"""A probability without the edits and with them."""


def compare_set(
    model: "Model",
    pairs: Sequence[PromptPair],
    edits: Sequence[Edit],
    *,
    chat: bool = False,
    progress: Progress | None = None,
    count: int = 20,
    continuations: Sequence[str] = (),
    temperature: float = 0.0,
) -> PromptSetReading:
    """What the edits do on many prompts.

    Args:
        model: the model.
        pairs: what follows their clean prompts is written, and the probabilities of their answers are compared.
        edits: in the order in which they are made.
        chat: whether to wrap prompts in the model's chat template.
        progress: called with the number of prompts done and of all.
        count: as `Model.compare`.
        continuations: texts whose probabilities are compared on every prompt, beside the answers.
        temperature: as `Model.compare`.

    Raises:
        PromptError, TokenError, TargetError: names the line.
        UsageError, EditError, NotFiniteError: as `Model.compare`.
    """

    def one(pair: PromptPair) -> Found:
        right, wrong = (
            [model.token(answer) if isinstance(answer, int) else _text(model, answer) for answer in dict.fromkeys(side)]
            for side in (pair.answers, pair.wrong_answers)
        )
        made = model.compare(
            prompt_of(pair), *edits, count=count, continuations=[*right, *wrong, *continuations],
            temperature=temperature, chat=chat,
        )  # fmt: skip
        likely = iter(made.continuations)
        sides = {"answers": [next(likely) for _ in right], "wrong answers": [next(likely) for _ in wrong]}
        sides |= {text: [next(likely)] for text in continuations}
        both = {name: _both(rows) for name, rows in sides.items() if rows}
        return Found(_own(made, both), (made, both), made.warnings, made.notes)

    found = gathered(model, pairs, one, chat, progress)
    results: list[tuple[Compared, dict[str, Both]]] = [each.result for each in found.found]
    names = dict.fromkeys(name for _, both in results for name in both)
    first = results[0][0]
    return reading(
        model,
        found,
        "steer",
        {"edits": first.edits, "count": count, "temperature": temperature},
        rows=[_row(name, [both[name] for _, both in results if name in both], model.seed) for name in names],
        notes=["Halves of the prompts are compared over units or states, and there are none here."],
    )


def _text(model: "Model", answer: str) -> str:
    """An answer's literal text, where it is written as an id."""
    return model.token(model.target(answer).ids[0])


def _both(rows: Sequence[Likelihood]) -> Both:
    """The summed probability of the texts of one side."""
    return sum(math.exp(row.plain) for row in rows), sum(math.exp(row.edited) for row in rows)


def _own(made: Compared, both: dict[str, Both]) -> dict:
    probabilities = {name: {"plain": plain, "edited": edited} for name, (plain, edited) in both.items()}
    return {"plain": made.plain.text, "edited": made.edited.text, "same": made.same, "probabilities": probabilities}


def _row(name: str, pairs: Sequence[Both], seed: int) -> MeanRow:
    plain, edited = ([pair[i] for pair in pairs] for i in (0, 1))
    lost = [after - before for before, after in pairs]
    return MeanRow(
        name,
        {"plain": mean_of(plain, seed), "edited": mean_of(edited, seed), "difference": mean_of(lost, seed)},
    )
