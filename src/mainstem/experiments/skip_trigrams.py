"""Skip trigrams: what one layer of attention learns, read off its circuits, and what it cannot help getting wrong.

Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits": a model of one attention layer predicts by
bigrams and by skip trigrams [source] ... [destination] -> [out]. Its QK circuit says which destination looks at which
source, its OV circuit what is then predicted. As a head is the product of both, two skip trigrams of one source force
two more: keep ... in -> mind and keep ... at -> bay also make keep ... in -> bay ("skip-trigram bugs").

Here: models of one layer of four heads, no norms, no positions, trained on text in which eight skip trigrams are
planted and nothing else can be known (`mainstem.lab.skip_trigrams`); [perfect] ... [are] -> [perfect] is one of them.
All skip trigrams of the vocabulary are ranked by how much likelier the source makes the output according to the
circuits alone (`mainstem.analysis.skip_trigram_table`). The direct path W_U W_E can repair the bug where a destination
has one output; the second arm plants two more, harbour ... in -> bay and calm ... at -> mind, so that both destinations
have both.

The rules, fixed before the runs that the documentation quotes. "Always" is in every seed.

1. They are learned. The mean probability of the planted outputs, in sequences not trained on. Null: that in running
   text where other sources stand for theirs. reproduced: always at least 0.9, the null at most 0.1; in part: always at
   least 0.5, the null at most half of it.
2. They are read off the circuits, and nothing else is. reproduced: the eight of the largest increase are always the
   eight planted ones; in part: always at least six. Null: the same before training.
3. [perfect] ... [are] -> [perfect]. reproduced: it is always among those eight, and the model's own probability of it
   in running text is at least 0.9, without `perfect` at most 0.1; in part: the probabilities alone.
4. The heads force the bug. What they add to the logit of a forced output, over what they add to that of the planted
   one at the same source and destination, both above the mean of other sources' outputs. Null: the same for the one of
   those that they add most to. reproduced: always at least 0.5, the null at most half of it, for both forced ones; in
   part: for one.
5. It shows where the direct path cannot repair it (second arm). The probability of the forced output in running text.
   Null: the same where other sources stand for it. reproduced: always at least 0.01 and ten times the null, for both;
   in part: for one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from mainstem.analysis.skip_trigram_table import SkipTrigramTable, mean_table, skip_trigram_table
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.settings import Settings
from mainstem.experiments.skip_trigrams_claims import Run, claims, curves, tables
from mainstem.lab.decoder import Decoder, decoder
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.recipes import Recipe
from mainstem.lab.skip_trigrams import FILLERS, FORCED, PLANTED, SkipTrigram, SkipTrigramText
from mainstem.lab.training import next_token_loss, train
from mainstem.session import Model, open
from mainstem.weights.circuit_reading import circuits_of

CROSSING = (SkipTrigram("harbour", "in", "bay"), SkipTrigram("calm", "at", "mind"))
"""With these both destinations have both outputs, and only the source tells them apart."""

ARMS = {"planted": PLANTED, "crossed": PLANTED + CROSSING}
STEPS, LEARNING_RATE, START = 600, 1e-2, 0.1
OTHERS = 16
"""Words of a context beside source and destination, as many as there are on average in training."""

HELD_OUT = 10**6
"""A step that is never trained on."""

CONTEXTS = 200


def run(settings: Settings) -> Experiment:
    """Runs the experiment.

    Raises:
        DivergedError: a loss became infinite.
    """
    seeds = settings.seed_list(quick=1, full=3)
    found = settings.each(ARMS, seeds, lambda arm, seed: trained(ARMS[arm], seed, settings))
    runs = {arm: [Run(**made) for made in kept] for arm, kept in found.items()}
    return Experiment(
        name="skip-trigrams",
        title="Skip trigrams",
        question="Are planted skip trigrams read off the circuits of one layer, and which come with them unasked?",
        provenance=settings.provenance(seeds),
        model={"name": "one layer of attention, four heads, d_model 64, no norms and no positions"},
        claims=claims(runs["planted"], runs["crossed"]),
        tables=tables(runs["planted"], runs["crossed"], seeds),
        figures=[curves(runs, seeds)],
        notes=[
            f"{STEPS} steps of AdamW at {LEARNING_RATE:g}, batches of 64 sequences of 24 words.",
            f"Circuits are read in contexts with one more source and {OTHERS - 1} words that mean nothing.",
            *settings.notes(),
        ],
    )


def trained(trigrams: tuple[SkipTrigram, ...], seed: int, settings: Settings) -> dict[str, Any]:
    """Trains one model, and what is read of it: the fields of a `Run`."""
    text = SkipTrigramText(trigrams, seed=seed)
    config = DecoderConfig(
        vocab_size=len(text.words), d_model=64, n_layers=1, n_heads=4, norm="none", positions="none",
        max_positions=text.length, initializer_range=START,
    )  # fmt: skip
    model = decoder(config, seed)
    before = table(model, text)
    training = train(
        model,
        next_token_loss,
        text,
        Recipe(STEPS, learning_rate=LEARNING_RATE, warmup=20, schedule="cosine", seed=seed),
        probes={"planted": lambda module: planted_probability(module, text)},
        every=50,
        device=settings.device,
        report=settings.report,
    )
    model.cpu()
    found = table(model, text)
    asked = (*trigrams, *FORCED)
    return {
        "learning": training.probe("planted"),
        "learned": planted_probability(model, text),
        "read": _named(found, text),
        "read_before": _named(before, text),
        "heads": {_name(each): _heads(found, text, each) for each in asked},
        "spoken": {_name(each): probability(model, text, each) for each in asked},
        "unspoken": {_name(each): probability(model, text, each, source=False) for each in asked},
    }


def table(model: Decoder, text: SkipTrigramText) -> SkipTrigramTable:
    """What the model's circuits say of every skip trigram."""
    opened: Model = open(model)
    circuits = [circuits_of(opened, head) for head in opened.weights.heads]
    direct = model.embed.weight.detach() @ model.unembed.weight.detach().T
    instead = torch.zeros(len(text.words))
    instead[_ids(text, FILLERS)] = 1 / len(FILLERS)
    beside = _ids(text, sorted({trigram.source for trigram in text.trigrams})).tolist()
    contexts = [(OTHERS - 1) * instead + torch.eye(len(text.words))[source] for source in beside]
    return mean_table([skip_trigram_table(direct, circuits, others, instead) for others in contexts], beside)


@torch.no_grad()
def planted_probability(module: nn.Module, text: SkipTrigramText) -> float:
    """The mean probability of planted outputs in sequences not trained on."""
    sample = text.sample(HELD_OUT)
    device = next(module.parameters()).device
    predicted = module(input_ids=sample.ids.to(device)).logits[:, :-1].softmax(-1).cpu()
    planted = predicted.gather(-1, sample.ids[:, 1:, None])[..., 0]
    return float(planted[sample.planted[:, 1:]].mean())


@torch.no_grad()
def probability(model: Decoder, text: SkipTrigramText, trigram: SkipTrigram, source: bool = True) -> float:
    """The mean probability of an output after its destination, in contexts like those of training.

    Two sources are somewhere before it: the skip trigram's own, unless it is to be left out, and others of which no
    skip trigram has this output.
    """
    generator = torch.Generator().manual_seed(0)
    fillers = _ids(text, FILLERS)
    own = {each.source for each in text.trigrams if each.out == trigram.out} | {trigram.source}
    others = _ids(text, sorted({each.source for each in text.trigrams} - own))
    ids = fillers[torch.randint(len(fillers), (CONTEXTS, OTHERS + 2), generator=generator)]
    present = others[torch.rand(CONTEXTS, len(others), generator=generator).argsort(1)[:, :2]]
    if source:
        present[:, 0] = text.id_of(trigram.source)
    ids.scatter_(1, torch.rand(CONTEXTS, text.length // 2, generator=generator).argsort(1)[:, :2], present)
    ids[:, -1] = text.id_of(trigram.destination)
    return float(model(input_ids=ids).logits[:, -1].softmax(-1)[:, text.id_of(trigram.out)].mean())


def _heads(found: SkipTrigramTable, text: SkipTrigramText, trigram: SkipTrigram) -> dict[str, float]:
    """What the heads add to the logit of an output, and the most to that of another source's output.

    Above the mean of other sources' outputs: all outputs together are raised against other words by any source.
    """
    row = found.heads[text.id_of(trigram.source), text.id_of(trigram.destination)]
    own = {each.out for each in text.trigrams if each.source == trigram.source}
    others = row[_ids(text, [each.out for each in text.trigrams if each.out not in own])]
    return {"own": float(row[text.id_of(trigram.out)] - others.mean()), "others": float(others.max() - others.mean())}


def _named(found: SkipTrigramTable, text: SkipTrigramText, count: int = 16) -> list[tuple[str, float]]:
    return [(_name([text.words[i] for i in places]), value) for places, value in found.largest(count)]


def _name(trigram: Sequence[str]) -> str:
    source, destination, out = trigram
    return f"{source} ... {destination} -> {out}"


def _ids(text: SkipTrigramText, words: Sequence[str]) -> Int[Tensor, " token"]:
    return torch.tensor([text.id_of(word) for word in words])
