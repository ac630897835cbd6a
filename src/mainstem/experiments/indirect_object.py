"""Indirect objects: who moves the name, after "When Mary and John went to the store, John gave a drink to".

Wang et al. 2022, "Interpretability in the Wild", found in GPT-2 small a circuit of 26 heads of 144 that reads the
repeated name at its second place and writes the other one at the last position, with heads that write against it.
Here: a residual sweep of that prompt against the one with the other giver says where what decides is, layer by layer;
exact sweeps of all heads over pairs of the project's own task (`mainstem.lab.tasks`) name the heads; and those are
taken out together, at their means over other prompts, on pairs that were not used to find them, beside as many random
heads, from anywhere and from the same layers.

Effects are of denoising: 0 leaves the corrupted run as it is, 1 makes it the clean one. Pairs that the model does not
solve both ways are left out.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.edits import Edit
from mainstem.causal.head_controls import random_heads, same_layer_heads
from mainstem.causal.metrics import Metric
from mainstem.errors import UsageError
from mainstem.experiments.indirect_object_claims import STRONG, Ablated, assemble, heads_by_effect, mean
from mainstem.experiments.outcome import Experiment
from mainstem.intervene.attributing import PatchPair
from mainstem.intervene.patch_reading import read_patch
from mainstem.lab.pairs import PromptPair, encode_pair
from mainstem.lab.tasks import indirect_object
from mainstem.model.outputs import logits_of

if TYPE_CHECKING:
    from mainstem.session import Model

PUBLISHED = PromptPair(
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
    (" Mary",),
    (" John",),
    "the published prompt",
)
DRAWS = 10


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the case.

    Args:
        model: the model, with its tokenizer.
        quick: three pairs to find heads on and three to test them on, instead of eight and eight.
        report: receives a line of progress for each step.

    Raises:
        UsageError: if the model has no tokenizer, or solves too few pairs.
        TokenError, PairError: if the names are not tokens of it.
    """
    if model.tokenizer is None:
        raise UsageError("The case is text, and this model came without a tokenizer", None, "Give it one.")
    count = 3 if quick else 8
    pairs, tried = _solved(model, 2 * count)
    if len(pairs) < 4:
        raise UsageError(f"The model solves {len(pairs)} of {tried} pairs, too few to find heads on", model.loaded.name)
    half = (len(pairs) + 1) // 2
    report("where the name is: the residual stream ...")
    stream = read_patch(model, [PUBLISHED], grid="resid")
    report(f"which heads move it: {half} pairs ...")
    heads = read_patch(model, pairs[:half], grid="heads")
    found = heads_by_effect(heads)
    strong = [name for name, effect in found if effect.mean >= STRONG]
    report("what attribution patching says of them ...")
    estimates = _estimates(model, pairs[:half])
    report("taking them out ...")
    ablated = _ablate(model, strong, [name for name, _ in found], pairs[half:], pairs[:half])
    return assemble(model, stream, heads, found, ablated, estimates, len(pairs) - half, tried)


def _solved(model: "Model", count: int) -> tuple[list[PromptPair], int]:
    """Pairs whose two prompts the model answers rightly, up to `count`, and how many were tried."""
    candidates = indirect_object(model.encoder, 2 * count, model.seed)
    clean = _differences(model, candidates)
    corrupted = _differences(model, [PromptPair(p.corrupted, p.clean, p.answers, p.wrong_answers) for p in candidates])
    right = ((clean > 0) & (corrupted < 0)).tolist()
    return [pair for pair, good in zip(candidates, right, strict=True) if good][:count], len(candidates)


@torch.no_grad()
def _differences(model: "Model", pairs: Sequence[PromptPair], *edits: Edit) -> Float[Tensor, " prompt"]:
    """The logit difference of each clean prompt, in one batch, under edits."""
    inputs = model.inputs([pair.clean for pair in pairs])  # type: ignore[misc]
    with model.edited(*edits):
        logits = logits_of(model.module(input_ids=inputs.ids, **inputs.forward))[:, -1].double().cpu()
    encoded = [encode_pair(pair, model.encoder) for pair in pairs]
    right, wrong = (torch.tensor([getattr(pair, name)[0] for pair in encoded]) for name in ("answers", "wrong_answers"))
    rows = torch.arange(len(pairs))
    return logits[rows, right] - logits[rows, wrong]


def _ablate(
    model: "Model",
    heads: Sequence[str],
    known: Sequence[str],
    tested: Sequence[PromptPair],
    reference: Sequence[PromptPair],
) -> Ablated:
    """Heads at their means over other prompts, beside as many random ones."""
    prompts = [PUBLISHED, *tested]
    texts = [pair.clean for pair in reference] + [pair.corrupted for pair in reference]
    plain = _differences(model, prompts)

    def lost(taken: Sequence[str]) -> list[float]:
        without = _differences(model, prompts, *(Edit.mean(head, texts) for head in taken))
        scale = torch.cat([plain[:1], plain[1:].mean().expand(len(tested))])
        return ((plain - without) / scale).tolist()

    own = lost(heads)
    others = [head for head in known if head not in heads]
    controls = {"random": [], "same layers": []}
    generator = torch.Generator().manual_seed(model.seed)
    for _ in range(DRAWS if heads else 0):
        for name, drawn in (
            ("random", random_heads(others, len(heads), generator)),
            ("same layers", same_layer_heads(heads, others, generator)),
        ):
            controls[name].append(mean(lost(drawn)[1:]))
    return Ablated(own[1:], own[0], controls)


def _estimates(model: "Model", pairs: Sequence[PromptPair]) -> dict[str, float]:
    """The effect of each head by attribution patching, of the mean over pairs as in `read_patch`."""
    totals: dict[str, float] = defaultdict(float)
    span = 0.0
    for pair in pairs:
        ids = encode_pair(pair, model.encoder)
        metric = Metric("logit-difference", ids.answers, ids.wrong_answers)
        asked = PatchPair(ids.clean, ids.corrupted, metric)
        made = model.attribution_patching(asked, direction="restore", gradient="integrated", kinds=("head",)).estimates
        span += made.donor - made.base
        for (_, unit), score in made.of_kind("head").items():
            totals[str(unit)] += score
    return {name: total / span for name, total in totals.items()}
