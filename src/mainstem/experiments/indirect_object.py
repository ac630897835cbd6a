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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.statistics import Interval, interval
from mainstem.causal.edits import Edit
from mainstem.errors import UsageError
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, Figure, finding
from mainstem.lab.pairs import PromptPair, encode_pair
from mainstem.lab.tasks import indirect_object
from mainstem.patch_description import PatchReading
from mainstem.patch_reading import read_patch

if TYPE_CHECKING:
    from mainstem.session import Model

PUBLISHED = PromptPair(
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
    (" Mary",),
    (" John",),
    "the published prompt",
)
SOURCE = "Wang et al., Interpretability in the Wild, 2022"
STRONG = 0.1
"""The effect from which a head counts as found."""

HALF = 0.5
CIRCUIT = 26 / 144
"""The part of all heads that the published circuit is."""

DRAWS = 10
LISTED = 10

Head = tuple[str, Interval]


@dataclass(frozen=True)
class Ablated:
    """What taking heads out does: the part of the mean logit difference that is lost, for each prompt.

    Attributes:
        found: without the heads that were found.
        published: the same on the published prompt alone.
        controls: by name, for each draw the mean part that is lost.
    """

    found: list[float]
    published: float
    controls: dict[str, list[float]]


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
    report("taking them out ...")
    ablated = _ablate(model, strong, [name for name, _ in found], pairs[half:], pairs[:half])
    return _assemble(model, stream, heads, found, ablated, len(pairs) - half, tried)


def heads_by_effect(reading: PatchReading) -> list[Head]:
    """All heads of a sweep of heads, the largest effects first."""
    low, high = reading.low or reading.effects, reading.high or reading.effects
    found = []
    for i, row in enumerate(reading.rows):
        for j, column in enumerate(reading.columns):
            if (effect := reading.effects[i][j]) is not None:
                found.append((f"{row}{column}", Interval(effect, low[i][j] or 0.0, high[i][j] or 0.0)))
    return sorted(found, key=lambda head: -head[1].mean)


# --- what is run ------------------------------------------------------------------------------------------


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
        result = model.module(input_ids=inputs.ids, **inputs.forward)
    logits = (result.logits if hasattr(result, "logits") else result)[:, -1].double().cpu()
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
            ("random", _drawn(others, len(heads), generator)),
            ("same layers", _alike(heads, others, generator)),
        ):
            controls[name].append(_mean(lost(drawn)[1:]))
    return Ablated(own[1:], own[0], controls)


def _drawn(heads: Sequence[str], count: int, generator: torch.Generator) -> list[str]:
    return [heads[int(i)] for i in torch.randperm(len(heads), generator=generator)[:count]]


def _alike(heads: Sequence[str], others: Sequence[str], generator: torch.Generator) -> list[str]:
    """For each head another one of its layer, as far as there are any."""
    drawn: list[str] = []
    for head in heads:
        layer = head.rpartition("H")[0]
        drawn += _drawn([one for one in others if one.rpartition("H")[0] == layer and one not in drawn], 1, generator)
    return drawn


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


# --- what is claimed --------------------------------------------------------------------------------------


def _assemble(
    model: "Model",
    stream: PatchReading,
    heads: PatchReading,
    found: Sequence[Head],
    ablated: Ablated,
    tested: int,
    tried: int,
) -> Experiment:
    strong = [head for head in found if head[1].mean >= STRONG]
    against = [head for head in reversed(found) if head[1].mean <= -STRONG]
    return Experiment(
        name="indirect-object",
        title="Indirect objects: which heads move the name",
        question=f"{PUBLISHED.clean!r} is continued by {PUBLISHED.answers[0]!r}: logit difference {stream.clean:.2f}, "
        f"{stream.corrupted_value:.2f} with the other giver",
        provenance=model.provenance(),
        model=model.summary,
        claims=[
            moved(stream),
            few(strong, found),
            opposed(against),
            taken_out(strong, ablated, model.seed),
            nulls(ablated),
        ],
        tables=[_course(stream), _heads(found), _ablations(ablated, len(strong), model.seed)],
        figures=[
            Figure("Effects of single heads", *_bars([*strong[:LISTED], *reversed(against)])),
            Figure(
                "Part of the logit difference that is lost; of controls the least and the most over draws",
                *_losses(ablated, model.seed),
            ),
        ],
        warnings=[warning for warning in heads.warnings if warning["code"] != "chat"],
        notes=[
            f"Heads were found on {heads.pairs} pairs and taken out on {tested} others: of {tried} drawn the first that "
            "the model solves both ways.",
            f"Effects of heads over halves of the pairs correlate with {heads.stability.half:.2f}."
            if heads.stability
            else "Heads were found on one pair, without intervals.",
            *heads.notes,
        ],
    )


def moved(stream: PatchReading) -> Claim:
    """Whether what decides goes from where the prompts differ to the last position, through no other."""
    end = stream.position
    clean, corrupted = stream.prompt["ids"], stream.corrupted["ids"]
    start = next(i for i, (a, b) in enumerate(zip(clean, corrupted, strict=True)) if a != b)
    effects = torch.tensor(stream.effects, dtype=torch.float64)
    at = int((effects[:, end] > effects[:, start]).double().argmax())
    rest = effects.clone()
    rest[:, [start, end]] = 0
    elsewhere = float(rest.abs().max())
    tokens = stream.prompt["tokens"]
    return Claim(
        "The name is read where it is repeated, and moved from there to the last position.",
        SOURCE,
        "in GPT-2 small by heads of layers 7 to 9 of 12",
        f"up to {stream.rows[max(at - 1, 0)]} most is at the second {tokens[start]!r} "
        f"({effects[max(at - 1, 0), start]:.2f} of the difference), from {stream.rows[at]} on at the last token, "
        f"{tokens[end]!r} ({effects[at, end]:.2f})",
        f"other positions: at most {elsewhere:.2f} at any layer",
        finding(elsewhere < HALF and 0 < at < len(effects) - 1),
        {"from": start, "to": end, "layer": stream.rows[at], "elsewhere": elsewhere},
    )


def few(strong: Sequence[Head], found: Sequence[Head]) -> Claim:
    """Whether the heads that matter are as few as in the published circuit."""
    rest = sorted(abs(effect.mean) for _, effect in found if effect.mean < STRONG)
    named = ", ".join(f"{name} {effect.mean:+.2f} [{effect.low:.2f}, {effect.high:.2f}]" for name, effect in strong)
    return Claim(
        "A few heads do it.",
        SOURCE,
        "26 of 144 heads (18 %) in GPT-2 small",
        f"{len(strong)} of {len(found)} heads bring {STRONG:.0%} or more of the difference back, each alone: "
        f"{named or 'none'}",
        f"the median of the other heads: {rest[len(rest) // 2] if rest else 0.0:.3f}",
        finding(0 < len(strong) <= CIRCUIT * len(found)),
        {"heads": [name for name, _ in strong]},
    )


def opposed(against: Sequence[Head]) -> Claim:
    """Whether there are heads that write against the answer, beyond chance over pairs."""
    sure = [name for name, effect in against if effect.high < 0]
    named = ", ".join(f"{name} {effect.mean:+.2f} [{effect.low:.2f}, {effect.high:.2f}]" for name, effect in against)
    return Claim(
        "Some heads write against the answer.",
        SOURCE,
        "2 negative name movers in GPT-2 small",
        named or f"no head takes {STRONG:.0%} or more away",
        "an interval over pairs that holds 0",
        finding(bool(sure), bool(against)),
        {"heads": [name for name, _ in against]},
    )


def taken_out(strong: Sequence[Head], ablated: Ablated, seed: int) -> Claim:
    """Whether the heads together hold more than half of the logit difference."""
    lost = interval(ablated.found, seed)
    return Claim(
        "Without those heads, more than half of the logit difference is gone.",
        "expected of heads that move the name",
        "more than half",
        f"{lost.mean:.0%} [{lost.low:.0%}, {lost.high:.0%}] is lost on {len(ablated.found)} other prompts, "
        f"{ablated.published:.0%} on the published one, without {len(strong)} heads together",
        "0 % without any",
        finding(lost.low > HALF and ablated.published > HALF, lost.mean > HALF or ablated.published > HALF),
        {"lost": lost.mean, "published": ablated.published},
    )


def nulls(ablated: Ablated) -> Claim:
    """Whether as many random heads lose less than half, in every draw."""
    own = _mean(ablated.found)
    draws = ablated.controls["random"]
    text = {
        name: f"{_mean(values):.0%} ({min(values):.0%} to {max(values):.0%})"
        for name, values in ablated.controls.items()
        if values
    }
    below = bool(draws) and max(draws) < min(HALF, own)
    return Claim(
        "As many random heads do not.",
        "expected of heads that move the name",
        "less than half, in every draw",
        f"random heads from anywhere: {text.get('random', 'none drawn')} over {len(draws)} draws",
        f"heads of the same layers: {text.get('same layers', 'none drawn')}; those found: {own:.0%}",
        finding(below, bool(draws) and _mean(draws) < min(HALF, own)),
        {name: list(values) for name, values in ablated.controls.items()},
    )


def _course(stream: PatchReading) -> ExperimentTable:
    """The two positions' effects along the layers."""
    values = moved(stream).values
    start, end = values["from"], values["to"]
    tokens = stream.prompt["tokens"]
    return ExperimentTable(
        "Where the name is",
        "the effect of the stream that enters each layer, at the two positions; 0 corrupted, 1 clean",
        ["before", f"{start} {tokens[start].strip()}", f"{end} {tokens[end].strip()}"],
        [[row, effects[start], effects[end]] for row, effects in zip(stream.rows, stream.effects, strict=True)],
    )


def _heads(found: Sequence[Head]) -> ExperimentTable:
    ends = [*found[:LISTED], *found[-3:]]
    return ExperimentTable(
        "Heads",
        f"the {LISTED} largest effects and the 3 lowest, each head alone, at all positions; intervals over pairs",
        ["head", "effect"],
        [[name, effect] for name, effect in dict(ends).items()],
    )


def _ablations(ablated: Ablated, count: int, seed: int) -> ExperimentTable:
    rows: list[list] = [["the heads found", count, 1, interval(ablated.found, seed)]]
    rows += [[name, count, len(values), _spread(values)] for name, values in ablated.controls.items() if values]
    return ExperimentTable(
        "Heads taken out together",
        "the part of the mean logit difference that is lost; of controls the mean, least and most over draws",
        ["heads", "how many", "draws", "lost"],
        rows,
    )


def _spread(values: Sequence[float]) -> Interval:
    """A mean between the least and the most."""
    return Interval(_mean(values), min(values), max(values))


def _bars(heads: Sequence[Head]) -> tuple[list[str], list[Interval]]:
    return [name for name, _ in heads], [effect for _, effect in heads]


def _losses(ablated: Ablated, seed: int) -> tuple[list[str], list[Interval]]:
    names, bars = ["the heads found"], [interval(ablated.found, seed)]
    for name, values in ablated.controls.items():
        if values:
            names.append(name)
            bars.append(_spread(values))
    return names, bars
