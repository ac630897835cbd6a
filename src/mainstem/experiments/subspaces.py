"""Two tasks in one small model: have they subspaces of their own, and does freezing one separate them?

Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits": the stream is wide enough to be divided, and
what is written into one subspace does not reach what reads another. A decoder of one block is trained on two tasks
(`mainstem.lab.two_tasks`), the earlier of two letters and the larger of two digits, and asked at the last position
what it knows between attention, which brings the symbols there, and the MLP, which compares them. In one model a run
does both tasks together, so that the stream has to hold both at once; in another by turns, where one place would do.

Subspace: the directions that hold 95 % of how the stream varies with a task's two symbols, whatever the other's are
(`mainstem.analysis.probes.main_effects`, on prompts of the training). Units: heads and neurons, each held at its mean
at the last position; what that adds to -log p of the right answer is how much the task needs it. Freezing: the run's
part in the subspace is held at its mean over prompts, on combinations of symbols that were kept for testing.

Nulls: random subspaces of as many directions; random sets of as many neurons (hypergeometric). Control, because a
measure that never sees two subspaces share says nothing: one task asked in two ways, each with its own prompts.

The rules, fixed before the runs that the documentation quotes. "Always" is in every seed; 1 to 3 are of the model that
does both tasks together.

1. Disjoint subspaces. reproduced: the overlap is always smaller than that of 99 % of random subspaces, and that of
   one task asked in two ways larger; in part: with the same control, never larger than that of 99 % of random ones.
2. Other neurons. reproduced: the 30 neurons that each task needs most have always so few in common as random sets have
   in less than 1 % of cases, and those of one task asked in two ways so many; in part: with the same control, never so
   many.
3. Freezing separates. reproduced: for both tasks, always, with a task's subspace frozen its accuracy is at most half of
   what it was, the other's at least nine tenths, and with random subspaces frozen its own at least nine tenths; in
   part: always lower than the other's and than with any random subspace.
4. Where they are done by turns the same is measured; nothing was published about it.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import mainstem
from mainstem.analysis.probes import main_effects
from mainstem.analysis.subspace import Span, overlap, span
from mainstem.causal.interchange import Interchange
from mainstem.experiments.outcome import Curves, Experiment
from mainstem.experiments.settings import Settings
from mainstem.experiments.subspaces_claims import Run, claims, common, frozen_table, units_table
from mainstem.lab.decoder import decoder
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.recipes import Recipe
from mainstem.lab.training import train
from mainstem.lab.two_tasks import (
    D_VOCAB,
    LENGTH,
    TASKS,
    WORDINGS,
    Asked,
    Way,
    ask,
    combinations,
    loss_of,
    of_task,
    task_batches,
)
from mainstem.points import Point
from mainstem.run.inputs import base_arguments
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model

WAYS: tuple[Way, Way] = ("together", "by turns")
D_MODEL, N_HEADS, D_MLP = 64, 4, 128
STEPS, COMBINATIONS, LEARNING_RATE, WEIGHT_DECAY, WARMUP = 500, 32, 5e-3, 0.01, 50
"""Of the training; combinations of one batch, each with every question."""

AT = Point("resid_mid", layer=0)
ENERGY = 0.95
FOUND, TESTED, TRIED = 4000, 512, 64
"""Prompts: on which subspaces are found, on which they are frozen, and on which units are taken out."""

DRAWN = 5
"""Random subspaces."""

Key = tuple[int, int]
"""A task and a wording."""

KEYS: tuple[Key, ...] = tuple((task, wording) for task in range(len(TASKS)) for wording in WORDINGS)


def run(settings: Settings) -> Experiment:
    """Runs the experiment.

    Args:
        settings: how; quick has one seed, full three.
    """
    seeds = settings.seed_list(quick=1, full=3)
    found = settings.each(
        WAYS, seeds, lambda way, seed: trained(way, seed, settings), label=lambda way: f"{way}-{STEPS}-steps"
    )
    runs = {way: [Run.of(made) for made in kept] for way, kept in found.items()}
    lines = {
        f"{way}, seed {seed}": [(float(step), loss) for step, loss in enumerate(one.losses, 1)]
        for way, found in runs.items()
        for seed, one in zip(seeds, found, strict=True)
    }
    return Experiment(
        name="subspaces",
        title="Two tasks in one stream",
        question="Have two tasks of one model subspaces of their own, and does freezing one separate them?",
        provenance=settings.provenance(seeds),
        model={"name": "a decoder of one block, two tasks of letters and digits"},
        claims=claims(runs),
        tables=[frozen_table(runs, seeds), units_table(runs, seeds)],
        figures=[Curves("Training loss", "of every batch", "step", "loss, nats", lines, logarithmic=True)],
        notes=[
            "Letters: the earlier of two; digits: the larger of two. Each question has two tokens that mean the same.",
            f"d_model {D_MODEL}, {N_HEADS} heads, {D_MLP} neurons; {STEPS} steps of AdamW.",
            *settings.notes(),
        ],
    )


def trained(way: Way, seed: int, settings: Settings) -> dict[str, Any]:
    """Trains one model, and what is measured of it: the fields of a `Run`."""
    net = decoder(DecoderConfig(D_VOCAB, D_MODEL, 1, N_HEADS, D_MLP, norm="rms"), seed)
    training, testing = combinations(seed)
    recipe = Recipe(STEPS, "adamw", LEARNING_RATE, WEIGHT_DECAY, warmup=WARMUP, schedule="cosine", seed=seed)
    batches = task_batches(training, way, COMBINATIONS, seed)
    losses = train(net, loss_of(way), batches, recipe, device=settings.device, report=settings.report).losses
    return {"losses": losses, **measured(net.cpu(), way, training, testing, seed)}


def measured(net: nn.Module, way: Way, training: Tensor, testing: Tensor, seed: int) -> dict[str, Any]:
    """Everything that is measured of a trained model.

    Args:
        net: the model.
        way: how it was trained.
        training: combinations on which subspaces are found and units are taken out.
        testing: combinations on which subspaces are frozen.
        seed: of random subspaces.
    """
    model = mainstem.open(net, seed=seed)
    at = _place(model, AT)
    values = {key: at.values(ask(training[:FOUND], way, *key).ids)[:, 0].cpu() for key in KEYS}
    spans = {key: _span(values[key], ask(training[:FOUND], way, *key), key[0]) for key in KEYS}
    effects, heads = _effects(model, way, training[:TRIED])
    frozen = _Frozen(at, way, testing[:TESTED], {key: each.mean(0) for key, each in values.items()})
    random = torch.Generator().manual_seed(seed)
    names = dict(enumerate(TASKS))
    return {
        "sizes": {name: len(spans[task, 0]) for task, name in names.items()},
        "plain": {name: frozen.accuracy(None, (task, 0)) for task, name in names.items()},
        "chance": {name: frozen.chance(task) for task, name in names.items()},
        "frozen": {
            name: {other: frozen.accuracy(spans[task, 0], (asked, 0)) for asked, other in names.items()}
            for task, name in names.items()
        },
        "again": {name: frozen.accuracy(spans[task, 0], (task, 1)) for task, name in names.items()},
        "random": {
            name: [frozen.accuracy(_random(spans[task, 0], random), (task, 0)) for _ in range(DRAWN)]
            for task, name in names.items()
        },
        "between": _lying(spans[0, 0], spans[1, 0], seed),
        "same": {name: _lying(spans[task, 0], spans[task, 1], seed) for task, name in names.items()},
        "neurons": common(effects[0, 0], effects[1, 0]),
        "same_neurons": {name: common(effects[task, 0], effects[task, 1]) for task, name in names.items()},
        "heads": {name: heads[task, 0] for task, name in names.items()},
    }


class _Frozen:
    """Accuracies on prompts for testing, with a subspace held at its mean."""

    def __init__(self, at: Interchange, way: Way, symbols: Tensor, means: dict[Key, Tensor]) -> None:
        self.at, self.symbols, self.means = at, symbols, means
        self.way: Way = way

    @torch.no_grad()
    def accuracy(self, subspace: Span | None, key: Key) -> float:
        """How often the right one of a task's symbols is the likeliest."""
        asked = ask(self.symbols, self.way, *key)
        mean = self.means[key]
        directions = mean.new_zeros(1, len(mean)) if subspace is None else subspace.directions
        logits = self.at.logits(asked.ids, mean.expand(len(asked.ids), 1, -1), directions)
        return float((of_task(logits, key[0]).argmax(1) == asked.answers[:, key[0]]).double().mean())

    def chance(self, task: int) -> float:
        """How often the most frequent answer is right."""
        answers = ask(self.symbols, self.way, task, 0).answers[:, task]
        return float(answers.bincount().max() / len(answers))


def _place(model: "Model", at: Point) -> Interchange:
    """A point at the last position."""
    last = LENGTH - 1
    return Interchange(model.module, model.anatomy, at, [last], last, **base_arguments(model.module))


def _span(values: Tensor, asked: Asked, task: int) -> Span:
    """The directions along which the stream varies with the symbols of a task."""
    return span(main_effects(values, list(asked.pairs.T))[task], energy=ENERGY)


def _random(like: Span, generator: torch.Generator) -> Span:
    """A random subspace of as many directions."""
    return span(torch.randn(like.directions.shape, generator=generator, dtype=torch.float64))


def _lying(first: Span, second: Span, seed: int) -> dict[str, Any]:
    found = overlap(first, second, seed=seed)
    names = ("overlap", "expected", "spread", "p_disjoint", "p_shared", "verdict")
    return {name: getattr(found, name) for name in names}


@torch.no_grad()
def _effects(model: "Model", way: Way, symbols: Tensor) -> tuple[dict[Key, list[float]], dict[Key, list[float]]]:
    """What each neuron and each head, held at its mean, adds to -log p of the right answers, in nats."""
    units = [Unit.ffn_neuron(0, number) for number in range(D_MLP)]
    heads = [Unit.head(0, number) for number in range(N_HEADS)]
    places = [_place(model, Point("write", unit)) for unit in [*units, *heads]]
    neurons_of, heads_of = {}, {}
    for key in KEYS:
        asked = ask(symbols, way, *key)
        values = places[0].values_beside(asked.ids, places)

        def surprise(place: Interchange, held: Tensor, asked: Asked = asked, task: int = key[0]) -> float:
            log_p = of_task(place.logits(asked.ids, held, None), task).double().log_softmax(1)
            return -float(log_p.gather(1, asked.answers[:, task, None]).mean())

        plain = surprise(places[0], values[0])
        added = [surprise(*pair) - plain for pair in zip(places, map(_mean, values), strict=True)]
        neurons_of[key], heads_of[key] = added[: len(units)], added[len(units) :]
    return neurons_of, heads_of


def _mean(values: Tensor) -> Tensor:
    """The mean over prompts, for every prompt."""
    return values.mean(0, keepdim=True).expand_as(values)
