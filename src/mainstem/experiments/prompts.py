"""The prompts of the six-relations evaluation, filtered by what a model knows.

A prompt is kept where its answer is among the ten likeliest next tokens and above all other answers of its relation
(the filter of Yu and Ananiadou, EMNLP 2024, section 4). Answers of several tokens are left out.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from mainstem.errors import TokenError
from mainstem.model.outputs import logits_of
from mainstem.run.inputs import base_arguments
from mainstem.targets import parse_token

if TYPE_CHECKING:
    from mainstem.session import Model

LIKELIEST = 10


@dataclass(frozen=True)
class Prompt:
    """One question: `kind` holds the ids of all other answers of its relation."""

    relation: str
    text: str
    answer: str
    id: int
    kind: tuple[int, ...]
    probability: float
    rank: int


def written() -> dict[str, list[tuple[str, str]]]:
    """All prompts that come with the package, (prompt, answer) by relation."""
    raw = json.loads((files("mainstem") / "data" / "knowledge.json").read_text(encoding="utf-8"))
    return {relation: [(prompt, answer) for prompt, answer in rows] for relation, rows in raw.items()}


@torch.no_grad()
def known(model: "Model", most: int | None = None) -> tuple[list[Prompt], int]:
    """The prompts that the model passes, at most `most` of each relation, and how many were tried."""
    kept: list[Prompt] = []
    tried = 0
    for relation, rows in written().items():
        ids = {answer: token for _, answer in rows if (token := _single(model, answer)) is not None}
        found = []
        for text, answer in rows:
            if answer not in ids or (most is not None and len(found) == most):
                continue
            tried += 1
            prompt = _judged(model, relation, text, answer, ids)
            if prompt is not None:
                found.append(prompt)
        kept += found
    return kept, tried


def _single(model: "Model", answer: str) -> int | None:
    try:
        return parse_token(answer, model.tokenizer, model.anatomy.sizes.d_vocab)
    except TokenError:
        return None


def _judged(model: "Model", relation: str, text: str, answer: str, ids: dict[str, int]) -> Prompt | None:
    table = torch.tensor([model.encode(text)], device=next(model.module.parameters()).device)
    logits = logits_of(model.module(input_ids=table, **base_arguments(model.module)))
    log_p = logits[0, -1].double().log_softmax(-1)
    own = ids[answer]
    kind = tuple(sorted({token for token in ids.values() if token != own}))
    rank = int((log_p > log_p[own]).sum()) + 1
    if rank > LIKELIEST or any(float(log_p[token]) >= float(log_p[own]) for token in kind):
        return None
    return Prompt(relation, text, answer, own, kind, float(log_p[own].exp()), rank)
