"""How well a model predicts a text, and how far changed runs of it are from the plain one, token by token.

Several runs (the model as it is, quantised, rotated, with dimensions taken out) are made of the same windows, batch by
batch, so that what the first one says of each token need not be kept for the whole text: the largest things held are
one batch's logits of two runs and, in float64, the first one's log-probabilities. All numbers are in nats and float64,
one for each counted token, so that runs are compared in pairs (`mainstem.analysis.statistics.difference`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mainstem.analysis.intervals import Interval
from mainstem.analysis.statistics import interval
from mainstem.errors import NotFiniteError
from mainstem.run.windows import Windows

Run = Callable[[Int[Tensor, "batch pos"]], Float[Tensor, "batch pos d_vocab"]]
"""Token ids to logits: a forward pass under whatever the run is about."""

CHUNK = 8
"""Rows that are compared at once; with so few, what is computed of them stays in the processor's caches."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What one run says about each counted token of a text.

    Attributes:
        nats: [token] the negative log-probability of the token.
        kl: [token] KL(first run || this run) of the predictions; zero for the first run itself.
        flips: [token] whether the likeliest token is another one than in the first run.
        top: [token] the probability of the likeliest token: the top-1 mass of the output softmax.
    """

    nats: Float[Tensor, " token"]
    kl: Float[Tensor, " token"]
    flips: Bool[Tensor, " token"]
    top: Float[Tensor, " token"]

    @property
    def loss(self) -> float:
        """The mean of `nats`."""
        return float(self.nats.mean())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def flip_rate(self) -> float:
        """The share of tokens whose likeliest prediction changed."""
        return float(self.flips.double().mean())

    def loss_interval(self, seed: int = 0) -> Interval:
        """The mean loss with its bootstrap interval over tokens."""
        return interval(self.nats.tolist(), seed)


@torch.no_grad()
def evaluate(
    runs: Mapping[str, Run],
    windows: Windows,
    batch: int = 1,
    report: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Evaluation]:
    """Every run on every window, the first run being what the others are compared with.

    Args:
        runs: the runs by name; each is called once for each batch.
        windows: the text. Tokens are counted where `Windows.predicted` says so.
        batch: windows that run together.
        report: called after each batch with the number of tokens done.

    Raises:
        NotFiniteError: a run gives logits that are no numbers.
    """
    collected: dict[str, list[_Rows]] = {name: [] for name in runs}
    done = 0
    for rows in windows.batches(batch):
        ids, counted = windows.ids[rows], windows.predicted(rows)[:, 1:]
        tokens, first = ids[:, 1:][counted], None
        for name, run in runs.items():
            logits = run(ids)[:, :-1][counted]
            if not all(bool(extreme.isfinite()) for extreme in logits.aminmax()):
                raise NotFiniteError("The logits are not finite", name)
            first = _First.of(logits) if first is None else first
            collected[name].append(_compared(logits, first, tokens.to(logits.device)))
        done += len(tokens)
        report(done)
    return {
        name: Evaluation(*(torch.cat(column) for column in zip(*rows, strict=True))) for name, rows in collected.items()
    }


_Rows = tuple[Float[Tensor, " token"], Float[Tensor, " token"], Bool[Tensor, " token"], Float[Tensor, " token"]]


@dataclass(frozen=True, eq=False)
class _First:
    """What the first run says of some tokens: its logits, and its log-probabilities in float64."""

    logits: Float[Tensor, "token d_vocab"]
    logs: Float[Tensor, "token d_vocab"]
    top: Int[Tensor, " token"]

    @classmethod
    def of(cls, logits: Float[Tensor, "token d_vocab"]) -> "_First":
        logs = torch.empty_like(logits, dtype=torch.float64)
        for rows, made in zip(logits.split(CHUNK), logs.split(CHUNK), strict=True):
            made.copy_(rows.double().log_softmax(-1))
        return cls(logits, logs, logits.argmax(-1))


def _compared(logits: Float[Tensor, "token d_vocab"], first: _First, tokens: Int[Tensor, " token"]) -> _Rows:
    """Loss, divergence, flips and top-1 mass of some tokens; a few at a time, in float64."""
    nats, kl, top = [], [], []
    for rows, logs, own in zip(logits.split(CHUNK), first.logs.split(CHUNK), tokens.split(CHUNK), strict=True):
        other = logs.to(logits.device)
        mine = other if logits is first.logits else rows.double().log_softmax(-1)
        nats.append(-mine.gather(-1, own[:, None])[:, 0])
        top.append(mine.amax(-1).exp())
        kl.append(torch.zeros_like(top[-1]) if mine is other else _divergence(other, mine))
    flips = logits.argmax(-1) != first.top.to(logits.device)
    return torch.cat(nats).cpu(), torch.cat(kl).cpu(), flips.cpu(), torch.cat(top).cpu()


def _divergence(
    first: Float[Tensor, "token d_vocab"], other: Float[Tensor, "token d_vocab"]
) -> Float[Tensor, " token"]:
    """KL of log-probabilities; overwrites the second, because fresh memory costs more than what is computed in it."""
    return torch.linalg.vecdot(first.exp(), other.neg_().add_(first))
