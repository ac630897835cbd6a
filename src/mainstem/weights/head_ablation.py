"""What is lost without some heads: the loss on repeated tokens, and the in-context-learning score.

Heads are taken out together, by causal edits: at nothing, at their mean over random tokens that are not repeated, or at
what they are at random such tokens. Beside them as many random heads of the same layers, none of them found.

The in-context-learning score is the loss of tokens late in a context minus that early in one (Olsson et al. 2022: the
500th and the 50th token of 512). Here both are the same tokens of the text, in contexts that begin at different places,
so that hard tokens do not count; both indices are scaled to the context that the text allows, and stated.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.statistics import interval
from mainstem.causal.edits import Edit
from mainstem.causal.head_controls import same_layer_heads
from mainstem.causal.head_runs import losses
from mainstem.causal.recorded import logits_of
from mainstem.causal.reference import reference_text
from mainstem.lab.repeated import PERIOD, RandomTokens
from mainstem.results.heads import AblationRow, Control, InContext
from mainstem.run.inputs import context_length

if TYPE_CHECKING:
    from mainstem.session import Model

METHODS = ("mean", "zero", "resample")
TESTED = 4
"""Texts of random tokens that heads are taken out on; none of those that they were found on."""

LONGEST = 512
EARLY, LATE = 50 / 512, 500 / 512
STARTS = 6
"""Contexts that the in-context-learning score is a mean over, and as many shorter ones."""


def take_out(
    model: "Model",
    behaviour: str,
    heads: Sequence[str],
    known: Sequence[str],
    tokens: RandomTokens,
    draws: int,
    report: Callable[[str], None] = lambda text: None,
    methods: Sequence[str] = METHODS,
) -> list[AblationRow]:
    """Heads taken out together by each method, beside random heads of the same layers; nothing for no heads."""
    if not heads:
        return []
    rng = random.Random(model.seed + 1)
    texts = [tokens.text(rng, repeats=2) for _ in range(TESTED)]
    reference = model.inputs([tokens.text(rng, repeats=2, repeated=False) for _ in range(2)])
    generator = torch.Generator().manual_seed(model.seed)
    others = [head for head in known if head not in heads]
    sets = [same_layer_heads(heads, others, generator) for _ in range(draws)]
    plain = _halves(model, texts)
    rows = []
    for method in methods:
        report(f"without the heads found for {behaviour}: {method} ...")
        own, *drawn = (
            _halves(model, texts, _edits(one, method, reference, model.seed)) - plain for one in (heads, *sets)
        )
        first, repeated = torch.stack(drawn).T.tolist()
        size = sum(map(abs, repeated)) / len(repeated)
        control = Control(sets, repeated, first)
        ratio = float(own[1]) / size if size > 0 else None
        rows.append(AblationRow(behaviour, list(heads), method, float(own[1]), float(own[0]), control, ratio))
    return rows


def _edits(heads: Sequence[str], method: str, reference, seed: int) -> list[Edit]:
    if method == "zero":
        return [Edit.zero(head) for head in heads]
    if method == "mean":
        return [Edit.mean(head, reference) for head in heads]
    return [Edit.resample(head, reference, seed) for head in heads]


def _halves(model: "Model", texts: Sequence[list[int]], edits: Sequence[Edit] = ()) -> Float[Tensor, "2"]:
    """The mean loss on the first copy and on the second, but for its first token, which nothing announces."""
    found = _losses(model, texts, edits).mean(0)
    return torch.stack([found[:PERIOD].mean(), found[PERIOD + 1 :].mean()])


@torch.no_grad()
def _losses(model: "Model", texts: Sequence[list[int]], edits: Sequence[Edit] = ()) -> Float[Tensor, "prompt token"]:
    with model.edited(*edits):
        runs = []
        for text in texts:
            inputs = model.inputs(text)
            runs.append(losses(logits_of(model.module(input_ids=inputs.ids, **inputs.forward))[0], inputs.ids[0]))
    return torch.stack(runs)


def in_context_score(model: "Model", without: Sequence[str] = ()) -> InContext | None:
    """The in-context-learning score on the package's text; None without a tokenizer, or where the text is too short.

    Args:
        model: the model.
        without: heads to take out, at their means over the text, for a second score.
    """
    if model.tokenizer is None:
        return None
    ids = model.encode(reference_text())
    context = min(LONGEST, context_length(model.module) or LONGEST, len(ids) // 2)
    early, late = round(EARLY * context), round(LATE * context)
    width = early // 2
    if width < 2:
        return None
    starts = [round(i * (len(ids) - context) / max(STARTS - 1, 1)) for i in range(STARTS)]
    long = [ids[start : start + late + 1] for start in starts]
    short = [ids[start + late - early : start + late + 1] for start in starts]

    def differences(edits: Sequence[Edit] = ()) -> list[float]:
        ends = [_losses(model, texts, edits)[:, -width:] for texts in (long, short)]
        return (ends[0] - ends[1]).flatten().tolist()

    found = differences()
    made = interval(found, model.seed)
    lost = None
    if without:
        reference = model.inputs(ids[:context])
        lost = interval(differences([Edit.mean(head, reference) for head in without]), model.seed).mean
    return InContext(made.mean, made.low, made.high, early, late, context, len(found), lost)
