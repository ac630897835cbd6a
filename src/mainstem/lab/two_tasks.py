"""Two tasks for one small model, that it does together or by turns, asked in two ways.

A prompt is four symbols and a question, and what is asked for comes at the last position:

    D 7 B 4 ?      letters: the earlier one, B        digits: the larger one, 7

`together` every question asks for both: the likeliest letter and the likeliest digit are the answers. `by turns` a
question asks for one of them, and the likeliest token is the answer. In both ways each question has two tokens that
mean the same: whatever is said of two tasks has to come out otherwise of one task that is asked in two ways.

The four symbols are drawn independently, so that one task's say nothing about the other's; a fifth of all ten thousand
combinations is kept for testing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

SYMBOLS = 10
"""Letters, and as many digits."""

LETTERS, DIGITS = 0, 1
TASKS = ("letters", "digits")
WORDINGS = (0, 1)

D_VOCAB = (len(TASKS) + 2) * SYMBOLS
LENGTH = 5
TESTED = 0.2
"""The share of combinations that is kept for testing."""

Way = Literal["together", "by turns"]
Batch = tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch 2"], Int[Tensor, " batch"]]


@dataclass(frozen=True, eq=False)
class Asked:
    """Prompts of one question.

    Attributes:
        ids: the prompts.
        answers: of both tasks, from 0; which of them is asked for is a matter of the question.
        pairs: of both tasks their two symbols as one number.
    """

    ids: Int[Tensor, "batch pos"]
    answers: Int[Tensor, "batch 2"]
    pairs: Int[Tensor, "batch 2"]


def ask(symbols: Int[Tensor, "batch 4"], way: Way, task: int, wording: int) -> Asked:
    """Prompts with a question.

    Args:
        symbols: letters and digits by turns, each from 0.
        way: whether the question is about both tasks.
        task: which one the question is about, where it is about one.
        wording: which of the two tokens that mean the same.
    """
    letters, digits = symbols[:, ::2], symbols[:, 1::2]
    question = wording if way == "together" else len(WORDINGS) * task + wording
    shown = symbols + torch.tensor([0, SYMBOLS, 0, SYMBOLS])
    last = torch.full((len(symbols), 1), len(TASKS) * SYMBOLS + question)
    answers = torch.stack([letters.min(1).values, digits.max(1).values], 1)
    pairs = torch.stack([SYMBOLS * part[:, 0] + part[:, 1] for part in (letters, digits)], 1)
    return Asked(torch.cat([shown, last], 1), answers, pairs)


def combinations(seed: int) -> tuple[Int[Tensor, "batch 4"], Int[Tensor, "batch 4"]]:
    """All combinations of four symbols in an order of the seed's: those for training, those for testing."""
    every = torch.cartesian_prod(*[torch.arange(SYMBOLS)] * 4)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    tested = int(TESTED * len(every))
    return every[order[tested:]], every[order[:tested]]


def task_batches(training: Int[Tensor, "batch 4"], way: Way, size: int, seed: int) -> Callable[[int], Batch]:
    """The batch of step i: so many combinations, with every question; ids, answers, and which task is asked for."""

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        chosen = training[torch.randint(len(training), (size,), generator=generator)]
        asked = [(ask(chosen, way, task, wording), task) for task in range(len(TASKS)) for wording in WORDINGS]
        tasks = torch.cat([torch.full((size,), task) for _, task in asked])
        return torch.cat([one.ids for one, _ in asked]), torch.cat([one.answers for one, _ in asked]), tasks

    return batch


def loss_of(way: Way) -> Callable[[nn.Module, Batch], Tensor]:
    """The mean of -log p of what is asked for, in nats: of both answers among their kinds, or of one among all."""

    def together(module: nn.Module, batch: Batch) -> Tensor:
        logits = _last(module, batch[0])
        kinds = [F.cross_entropy(of_task(logits, task), batch[1][:, task]) for task in range(len(TASKS))]
        return torch.stack(kinds).mean()

    def by_turns(module: nn.Module, batch: Batch) -> Tensor:
        ids, answers, tasks = batch
        return F.cross_entropy(_last(module, ids), answers.gather(1, tasks[:, None])[:, 0] + SYMBOLS * tasks)

    return together if way == "together" else by_turns


def of_task(logits: Float[Tensor, "batch d_vocab"], task: int) -> Float[Tensor, "batch candidate"]:
    """The logits of a task's symbols."""
    return logits[:, SYMBOLS * task : SYMBOLS * (task + 1)]


def _last(module: nn.Module, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch d_vocab"]:
    return module(input_ids=ids, use_cache=False).logits[:, -1]
