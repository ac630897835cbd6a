"""What is measured of an attention-only model while it learns induction (see `induction_training`).

    prefix       attention from a token to the one after its earlier copy, on 25 random tokens twice: the best head's
    previous     attention to the token before, on the same text: the best head's
    repeats      the loss on the second copies of the text that is trained on, in nats
    unrepeated   its null: the loss at the same places where the segment is not repeated
    in_context   the loss late in a sequence less that early in it: the tokens around 500/512 and 50/512 of it

Definitions are those of `mainstem.analysis.attending` (Olsson et al. 2022); both indices of the in-context score are
scaled to the sequence. Patterns are seen where an anatomy found before training says that attention is.
"""

import random
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mainstem.analysis.attending import BEHAVIOURS, probes
from mainstem.causal.head_runs import head_run
from mainstem.lab.bigrams import START, RepeatedBigrams, RepeatedText
from mainstem.lab.repeated import RandomTokens
from mainstem.model.anatomy import Anatomy
from mainstem.run.inputs import Inputs
from mainstem.units import Unit

EXAMPLES = 4
"""Texts of random tokens that patterns are measured on."""

HELD_OUT = 10**6
"""A step that is never trained on."""

EARLY, LATE, AROUND = 50 / 512, 500 / 512, 4


@dataclass(frozen=True, eq=False)
class InductionProbe:
    """Measures a model; called by `train` while it learns.

    Attributes:
        anatomy: of the model, found before training.
        text: what it is trained on.
    """

    anatomy: Anatomy
    text: RepeatedBigrams

    def __call__(self, module: nn.Module) -> dict[str, float]:
        """All measures."""
        held_out = self.text.sample(HELD_OUT)
        losses = token_losses(module, held_out.ids)
        early, late = (round(part * self.text.length) for part in (EARLY, LATE))
        return {
            "prefix": max(self.heads(module, "prefix").values()),
            "previous": max(self.heads(module, "previous").values()),
            "repeats": _repeated(losses, held_out),
            "unrepeated": _unrepeated(module, self.text),
            "in_context": float((_around(losses, late) - _around(losses, early)).mean()),
        }

    def heads(self, module: nn.Module, behaviour: str) -> dict[Unit, float]:
        """Every head's attention where a behaviour looks, a mean over texts of random tokens."""
        probe, number = BEHAVIOURS[behaviour]
        rng, found = random.Random(0), dict[Unit, float]()
        tokens = random_tokens(self.text)
        device = next(module.parameters()).device
        for _ in range(EXAMPLES):
            ids = torch.tensor(tokens.text(rng, repeats=2))
            wanted = probes(ids)
            measure = wanted[probe].numbers.index(number)
            inputs = Inputs(ids[None].to(device), (0,), {"use_cache": False})
            for unit, measures in (
                head_run(module, self.anatomy, inputs, {probe: wanted[probe]}).measures[probe].items()
            ):
                found[unit] = found.get(unit, 0.0) + float(measures[measure]) / EXAMPLES
        return found


def random_tokens(text: RepeatedBigrams) -> RandomTokens:
    """Random tokens of the vocabulary, after the start."""
    return RandomTokens(range(START + 1, text.d_vocab), START)


@torch.no_grad()
def token_losses(module: nn.Module, ids: Tensor) -> Float[Tensor, "batch pos"]:
    """Minus the log-probability of each token but the first; at [:, i] that of token i, the first column is 0."""
    ids = ids.to(next(module.parameters()).device)
    predicted = module(input_ids=ids).logits[:, :-1].log_softmax(-1)
    losses = torch.zeros(ids.shape)
    losses[:, 1:] = -predicted.gather(-1, ids[:, 1:, None])[..., 0].cpu()
    return losses


def _repeated(losses: Tensor, text: RepeatedText) -> float:
    return float(losses[text.repeated].mean())


def _unrepeated(module: nn.Module, text: RepeatedBigrams) -> float:
    null = text.sample(HELD_OUT, repeat=False)
    return _repeated(token_losses(module, null.ids), null)


def _around(losses: Tensor, place: int) -> Float[Tensor, " batch"]:
    last = losses.shape[1] - 1
    return losses[:, max(place - AROUND, 1) : min(place + AROUND, last) + 1].mean(1)
