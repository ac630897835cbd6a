"""Subspaces that hold named information: the previous token, and the subject of the sentence.

Elhage et al. 2021 say that layers talk through subspaces of the stream, that different ones hold different information,
and that what reads one is not reached by another. The last position of sentences like "Then Mary saw the lamp and"
(`mainstem.experiments.named_sentences`) is asked, a third of the way up, for the token before it and for the subject:
both vary independently, and both had to be moved there by attention. Of words no training sentence has:

1. A subspace holds it. A probe for the token's embedding (`mainstem.analysis.probes`) names the right one of the
   held-out words through 16 directions: those along which training sentences vary with this word alone. Controls: 16
   random directions; targets drawn at random for each word, which only a leak of the split could make right; the probe
   asked for the other word of the same sentence.
2. The two subspaces lie apart: their overlap beside that of random ones.
3. Interchange: one subspace is given the values of a sentence with other words. Two blocks later, probes trained on
   unchanged runs are asked what the run holds. Attention goes on bringing the base's words there, so that what an
   interchange of all directions moves is the most that there is to move. Control: random subspaces of as many
   directions.
4. Readers. By their weights alone: the 20 neurons of those blocks that read the subspace most and the other least
   (`mainstem.experiments.named_readers`). A neuron's change is the root mean square of what the interchange adds to it
   over that of an interchange of all directions. Controls: the other subspace's readers and 20 random neurons of the
   same blocks under the same interchange, and the same readers under random subspaces. The same of heads: the five
   sides (queries, keys or values) of those blocks' heads that read the subspace most and the other least
   (`mainstem.experiments.named_heads`), judged by the same rule.

The rules, fixed before the runs that the documentation quotes. "Above" says that bootstrap intervals of 95 % of two
means, over words or over neurons, do not meet.

1. reproduced: above all controls through the subspace; in part: above the last two through the whole stream.
2. reproduced: smaller than that of random subspaces in 99 % of draws; in part: like that of random ones.
3. reproduced: the source's word is told above random subspaces, half as often at least as after the interchange of all
   directions, and the other word of the base nine tenths as often as without any; in part: above random subspaces.
4. reproduced: the readers change above all three controls, and the other's readers not above random ones and at most
   half as much; in part: the readers change above all three controls. (That the other's readers must change half as
   little was added after the first runs: a planted model with both in one subspace passed without it.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.probes import Probe, main_effects, train_probe
from mainstem.analysis.subspace import Span, overlap, span
from mainstem.causal.interchange import Interchange
from mainstem.errors import UsageError
from mainstem.experiments.named_heads import HeadSide, chosen_heads
from mainstem.experiments.named_readers import chosen_neurons
from mainstem.experiments.named_sentences import KINDS, SENTENCE, Sentences, sentences
from mainstem.experiments.named_subspaces_claims import EVERYTHING, NOTHING, RANDOM, Changed, Held, claims, swap_table
from mainstem.experiments.outcome import Experiment
from mainstem.points import Point
from mainstem.run.inputs import base_arguments
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model

DIRECTIONS = 16
DRAWN = 3
"""How many random subspaces."""

LATER = 2
"""How many blocks after the interchange the run is asked what it holds."""


@dataclass(frozen=True, eq=False)
class Places:
    """The points of the runs: where probes and interchanges are, where probes are later, and where the words are."""

    early: Interchange
    late: Interchange
    words: Interchange


@dataclass(frozen=True, eq=False)
class Read:
    """What a set of sentences has at the points, and the embedding of each kind's words [type, d_model]."""

    early: Float[Tensor, "batch d_model"]
    late: Float[Tensor, "batch d_model"]
    embeddings: dict[str, Float[Tensor, "type d_model"]]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run had at the last position: late in it, of the neurons, and what entered each block in between."""

    late: Float[Tensor, "batch d_model"]
    neurons: Float[Tensor, "batch neuron"]
    streams: dict[int, Float[Tensor, "batch d_model"]]


@dataclass(frozen=True, eq=False)
class Readers:
    """By group, whose changes are measured."""

    neurons: dict[str, list[Unit]]
    heads: dict[str, list[HeadSide]]


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the experiment.

    Args:
        model: the model, with its tokenizer.
        quick: 200 sentences for training and 60 for testing instead of 400 and 120.
        report: receives a line of progress for each step.

    Raises:
        UsageError: if the model has no tokenizer, too few blocks, or too few of the words are single tokens.
    """
    if model.tokenizer is None:
        raise UsageError("The case is text, and this model came without a tokenizer", None, "Give it one.")
    training, testing = (200, 60) if quick else (400, 120)
    made = sentences(model, training, testing)
    places = _places(model, made)
    report("reading the sentences ...")
    read = _read(places, made)
    spans = _spans(read, made, training)
    held = [_held(read, made, kind, spans[kind], training, model.seed) for kind in KINDS]
    report("interchanging ...")
    blocks = range(places.early.at.layer or 0, places.late.at.layer or 0)
    readers, shares = chosen_neurons(model, blocks, spans)
    heads, shares_of_heads = chosen_heads(model, blocks, spans)
    changed = _changed(model, made, places, read, spans, Readers(readers, heads), training)
    between = overlap(spans[KINDS[0]], spans[KINDS[1]], seed=model.seed)
    return Experiment(
        name="named-subspaces",
        title="Subspaces that hold named information",
        question="Do subspaces of the stream hold the previous token and the subject, apart from each other?",
        provenance=model.provenance(),
        model=model.summary,
        claims=claims(held, between, changed),
        tables=[swap_table(changed, f"at {places.early.at}, told at {places.late.at}"), shares, *shares_of_heads],
        notes=[
            f"Sentences are {SENTENCE!r}, read at the last position; {training} with words that {testing} others lack.",
            "A guess is right 1 in " + " and 1 in ".join(f"{one.candidates} ({one.kind})" for one in held) + ".",
        ],
    )


def _places(model: "Model", made: Sentences) -> Places:
    """A third of the way up, and `LATER` blocks further.

    Raises:
        UsageError: if there are too few blocks.
    """
    blocks = len(model.anatomy.blocks)
    early = max(blocks // 3, 1)
    if early + LATER >= blocks:
        raise UsageError(f"{blocks} blocks are too few", model.loaded.name, f"Take a model with {LATER + 3} or more.")
    words = [made.places[kind] for kind in KINDS]
    at = [Point("resid_pre", layer=layer) for layer in (early, early + LATER, 0)]
    return Places(_place(model, made, at[0]), _place(model, made, at[1]), _place(model, made, at[2], words))


def _place(model: "Model", made: Sentences, at: Point, positions: list[int] | None = None) -> Interchange:
    """A point at the last position, or at others."""
    last = made.ids.shape[1] - 1
    return Interchange(model.module, model.anatomy, at, positions or [last], last, **base_arguments(model.module))


def _read(places: Places, made: Sentences) -> Read:
    early, late, words = (
        values.double().cpu()
        for values in places.early.values_beside(made.ids, [places.early, places.late, places.words])
    )
    embeddings = {}
    for number, kind in enumerate(KINDS):
        table = words.new_zeros(made.words[kind], words.shape[-1])
        table[made.types[kind]] = words[:, number]
        embeddings[kind] = table
    return Read(early[:, 0], late[:, 0], embeddings)


def _spans(read: Read, made: Sentences, training: int) -> dict[str, Span]:
    effects = main_effects(read.early[:training], [made.types[kind][:training] for kind in KINDS])
    return {kind: span(effect, DIRECTIONS) for kind, effect in zip(KINDS, effects, strict=True)}


def _held(read: Read, made: Sentences, kind: str, found: Span, training: int, seed: int) -> Held:
    """How often held-out words are named, by word."""
    types, embeddings = made.types[kind], read.embeddings[kind]
    other = next(name for name in KINDS if name != kind)

    def right(vectors: Tensor, targets: Tensor, asked: str = kind) -> list[float]:
        probe = train_probe(vectors[:training], types[:training], targets, seed)
        candidates = (targets if asked == kind else read.embeddings[asked])[: made.words[asked] // 3]
        return _by_type(probe.told(vectors[training:], candidates), made.types[asked][training:])

    drawn = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    random = [right(read.early @ directions.T, embeddings) for directions in _random(read.early.shape[1], seed)]
    return Held(
        kind,
        directions=len(found),
        candidates=made.words[kind] // 3,
        inside=right(read.early @ found.directions.T, embeddings),
        whole=right(read.early, embeddings),
        random=[sum(values) / len(values) for values in zip(*random, strict=True)],
        drawn=right(read.early, drawn),
        other=right(read.early, embeddings, other),
    )


def _by_type(told: Int[Tensor, " batch"], types: Int[Tensor, " batch"]) -> list[float]:
    """How often each word that occurs was told."""
    return [float((told[types == kind] == kind).double().mean()) for kind in types.unique()]


def _changed(
    model: "Model",
    made: Sentences,
    places: Places,
    read: Read,
    spans: dict[str, Span],
    readers: Readers,
    training: int,
) -> list[Changed]:
    """What the run holds and what readers do after each interchange, on held-out sentences."""
    test = made.part(slice(training, None))
    sources = _others(test)
    values = read.early[training:][sources][:, None]
    layers = range(places.early.at.layer or 0, places.late.at.layer or 0)
    entering = [_place(model, made, Point("resid_pre", layer=layer)) for layer in layers]
    watched = [_place(model, made, Point("write", unit)) for group in readers.neurons.values() for unit in group]
    runs: dict[str, Run] = {}
    for name, directions in _interchanges(read, spans, model.seed).items():
        seen = places.early.values_after(test.ids, values, directions, [places.late, *entering, *watched])
        late, *others = (part.double().cpu() for part in seen)
        streams = dict(zip(layers, (part[:, 0] for part in others), strict=False))
        runs[name] = Run(late[:, 0], torch.cat(others[len(layers) :], 2)[:, 0], streams)
    probes = {
        kind: train_probe(read.late[:training], made.types[kind][:training], read.embeddings[kind], model.seed)
        for kind in KINDS
    }
    plain, everything = runs[NOTHING], runs[EVERYTHING]
    full = _size(everything.neurons - plain.neurons).clamp_min(1e-12)
    lengths = [len(group) for group in readers.neurons.values()]
    found = []
    for name, one in runs.items():
        told = {kind: _told(probes[kind], one.late, read, test, kind, sources) for kind in KINDS}
        changes = [part.tolist() for part in (_size(one.neurons - plain.neurons) / full).split(lengths)]
        heads = {
            group: [_of(side.change(plain.streams, one.streams), side.change(plain.streams, everything.streams))
                    for side in sides]
            for group, sides in readers.heads.items()
        }  # fmt: skip
        found.append(Changed(name, told, dict(zip(readers.neurons, changes, strict=True)), heads))
    return found


def _of(change: float, full: float) -> float:
    return change / max(full, 1e-12)


def _interchanges(read: Read, spans: dict[str, Span], seed: int) -> dict[str, Tensor | None]:
    """Directions by name; None for all."""
    width = read.early.shape[1]
    found: dict[str, Tensor | None] = {NOTHING: read.early.new_zeros(1, width)}
    found |= {kind: one.directions for kind, one in spans.items()}
    found |= {f"{RANDOM} {number}": one for number, one in enumerate(_random(width, seed + 1), 1)}
    return {**found, EVERYTHING: None}


def _random(width: int, seed: int) -> list[Float[Tensor, "direction d_model"]]:
    """Random subspaces as large as those that are found."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWN, DIRECTIONS, width, generator=generator, dtype=torch.float64)
    return [span(rows).directions for rows in drawn]


def _size(change: Float[Tensor, "batch neuron"]) -> Float[Tensor, " neuron"]:
    return change.square().mean(0).sqrt()


def _told(
    probe: Probe, late: Tensor, read: Read, test: Sentences, kind: str, sources: Int[Tensor, " batch"]
) -> tuple[list[float], list[float]]:
    """How often the base's word and the source's are told, by word."""
    told = probe.told(late, read.embeddings[kind][: test.words[kind] // 3])
    own = test.types[kind]
    return _by_type(told, own), _by_type(told, own[sources])


def _others(test: Sentences) -> Int[Tensor, " batch"]:
    """For each sentence the next one, going round, with another word of each kind.

    Raises:
        UsageError: if a sentence has none.
    """
    count, found = len(test.ids), []
    for base in range(count):
        turn = [(base + step) % count for step in range(1, count)]
        fits = [i for i in turn if all(types[i] != types[base] for types in test.types.values())]
        if not fits:
            raise UsageError("No two sentences differ in both words", None, "Take another seed.")
        found.append(fits[0])
    return torch.tensor(found)
