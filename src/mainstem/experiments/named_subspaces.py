"""Subspaces that hold named information: the previous token, and the subject of the sentence.

Elhage et al. 2021 say that layers talk through subspaces of the stream, and that different ones hold different
information. On sentences like "Then Mary said that the red lamp" the last position is asked for two things that vary
independently there: the token before it (red), and the subject (Mary). A ridge probe for each is trained on two thirds
of the sentences a third of the way up, and tested on the rest, beside a control task: labels drawn for each type of the
last token itself, which a probe can learn but the model did not put there. The subspace is
that of the classes' means on the training sentences: the directions along which the stream varies with the label, which
the weights of a probe need not be (Haufe et al. 2014).

The two subspaces' overlap stands beside random ones'. Then one is interchanged with that of a sentence that has another
subject and another previous token, and two blocks later, probes trained there on unchanged runs are asked what the run
now holds: the interchanged information must become the source's, the other must stay the base's. Controls are random
subspaces of the same size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.probes import Probe, control_labels, train_probe
from mainstem.analysis.subspace import Overlap, Span, overlap, span
from mainstem.causal.interchange import Interchange
from mainstem.errors import UsageError
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, finding
from mainstem.lab.wording import EVENTS, NAMES, PLACES, THINGS
from mainstem.points import Point
from mainstem.run.inputs import base_arguments

if TYPE_CHECKING:
    from mainstem.session import Model

SOURCE = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits"
SENTENCE = "Then {subject} said that the {previous} {last}"
PREVIOUS = ("red", "old", "new", "big", "small", "green", "black", "white")
CLASSES = 6
RANDOM = 3
LATER = 2
"""How many blocks after the interchange the run is asked what it holds."""

KINDS = ("previous token", "subject")


@dataclass(frozen=True, eq=False)
class Sentences:
    """Token ids of equal length, the labels of each kind, and the type of the last token."""

    ids: Int[Tensor, "batch pos"]
    labels: dict[str, Int[Tensor, " batch"]]
    types: list[int]


@dataclass(frozen=True, eq=False)
class Found:
    """One kind's probe at the point: accuracies on held-out sentences, and the subspace."""

    accuracy: float
    control: float
    span: Span


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the experiment.

    Args:
        model: the model, with its tokenizer.
        quick: 150 sentences instead of 360.
        report: receives a line of progress for each step.

    Raises:
        UsageError: if the model has no tokenizer, or too few of the words are single tokens of it.
    """
    if model.tokenizer is None:
        raise UsageError("The case is text, and this model came without a tokenizer", None, "Give it one.")
    made = sentences(model, 150 if quick else 360)
    blocks = len(model.anatomy.blocks)
    points = [
        Point("resid_pre", layer=max(blocks // 3, 1)),
        Point("resid_pre", layer=min(max(blocks // 3, 1) + LATER, blocks - 1)),
    ]
    last = made.ids.shape[1] - 1
    places = [
        Interchange(model.module, model.anatomy, at, [last], last, **base_arguments(model.module)) for at in points
    ]
    report("reading the sentences ...")
    early, late = (place.values(made.ids)[:, 0].double().cpu() for place in places)
    held = len(early) // 3
    found = {kind: _found(early, made, kind, held, model.seed) for kind in KINDS}
    later = {kind: train_probe(late[held:], made.labels[kind][held:], model.seed) for kind in KINDS}
    report("interchanging ...")
    rows = _interchanged(model, made, places, found, later, held)
    beside = overlap(found[KINDS[0]].span, found[KINDS[1]].span, seed=model.seed)
    return _experiment(model, points, found, beside, rows, held)


def sentences(model: "Model", count: int) -> Sentences:
    """Sentences drawn by the model's seed, of words that are single tokens.

    Raises:
        UsageError: if there are too few such words.
    """
    single = {
        name: [word for word in words if len(model.encode(f"the {word}")) == len(model.encode("the")) + 1]
        for name, words in (("subject", NAMES), ("previous", PREVIOUS), ("last", (*THINGS, *PLACES, *EVENTS)))
    }
    if min(len(words) for words in single.values()) < CLASSES:
        raise UsageError("Too few words are single tokens", model.loaded.name, "Take another model.")
    generator = torch.Generator().manual_seed(model.seed)
    drawn = {
        name: torch.randint(len(words) if name == "last" else CLASSES, (count,), generator=generator)
        for name, words in single.items()
    }
    texts = [
        SENTENCE.format(**{name: single[name][int(places[i])] for name, places in drawn.items()}) for i in range(count)
    ]
    ids = torch.tensor([model.encode(text) for text in texts], device=next(model.module.parameters()).device)
    return Sentences(ids, {KINDS[0]: drawn["previous"], KINDS[1]: drawn["subject"]}, drawn["last"].tolist())


def _found(values: Float[Tensor, "batch d_in"], made: Sentences, kind: str, held: int, seed: int) -> Found:
    labels, control = made.labels[kind], control_labels(made.types, CLASSES, seed)
    probe = train_probe(values[held:], labels[held:], seed)
    chance = train_probe(values[held:], control[held:], seed).accuracy(values[:held], control[:held])
    means = torch.stack([values[held:][labels[held:] == label].mean(0) for label in labels[held:].unique()])
    return Found(probe.accuracy(values[:held], labels[:held]), chance, span(means - means.mean(0)))


def _interchanged(
    model: "Model",
    made: Sentences,
    places: list[Interchange],
    found: dict[str, Found],
    later: dict[str, Probe],
    held: int,
) -> list[dict]:
    """Of held-out sentences: how often each kind is the base's and the source's after each interchange."""
    pairs = torch.tensor([(i, j) for i in range(held) if (j := _other(made, i, held)) is not None])
    if not len(pairs):
        raise UsageError("No two sentences differ in both", None, "Take another seed.")
    base, source = pairs.T
    sources = places[0].values(made.ids[source])
    generator = torch.Generator().manual_seed(model.seed)
    size, width = len(found[KINDS[0]].span), sources.shape[-1]
    chosen = {kind: one.span.directions for kind, one in found.items()}
    chosen |= {
        f"random {n}": span(torch.randn(size, width, generator=generator)).directions for n in range(1, RANDOM + 1)
    }
    rows = []
    for name, directions in chosen.items():
        values = places[0].values_after(made.ids[base], sources, directions, places[1])[:, 0].double().cpu()
        row: dict = {"interchanged": name, "pairs": len(pairs)}
        for kind, probe in later.items():
            told = probe.labels(values)
            row[f"{kind} of the base"] = float((told == made.labels[kind][base]).double().mean())
            row[f"{kind} of the source"] = float((told == made.labels[kind][source]).double().mean())
        rows.append(row)
    return rows


def _other(made: Sentences, base: int, held: int) -> int | None:
    """The next sentence, going round, with another label of each kind."""
    turn = [(base + step) % held for step in range(1, held)]
    return next((i for i in turn if all(labels[i] != labels[base] for labels in made.labels.values())), None)


def _experiment(
    model: "Model", points: list[Point], found: dict[str, Found], beside: Overlap, rows: list[dict], held: int
) -> Experiment:
    return Experiment(
        name="named-subspaces",
        title="Subspaces that hold named information",
        question="Do subspaces of the stream hold the previous token and the subject, apart from each other?",
        provenance=model.provenance(),
        model=model.summary,
        claims=[*(_held(kind, one, held) for kind, one in found.items()), _apart(beside), *_swapped(rows)],
        tables=[ExperimentTable("Interchange", f"at {points[0]}, told at {points[1]}", list(rows[0]),
                                [list(row.values()) for row in rows])],
        notes=[f"Sentences are {SENTENCE!r}; probes read the last position; a guess is right 1 in {CLASSES}."],
    )  # fmt: skip


def _held(kind: str, one: Found, held: int) -> Claim:
    chance = 1 / CLASSES
    above = one.accuracy > chance + 3 * (chance * (1 - chance) / held) ** 0.5
    return Claim(
        f"A subspace holds the {kind}.",
        SOURCE,
        "no number",
        f"a probe tells it in {one.accuracy:.1%} of {held} held-out sentences; {len(one.span)} directions",
        f"{chance:.1%} by guessing; {one.control:.1%} on a control task: selectivity {one.accuracy - one.control:+.2f}",
        finding(above and one.accuracy > one.control, partly=above),
        {"accuracy": one.accuracy, "control": one.control, "selectivity": one.accuracy - one.control, "held_out": held},
    )


def _apart(beside: Overlap) -> Claim:
    return Claim(
        "The two lie in disjoint subspaces.",
        SOURCE,
        "disjoint subspaces do not interact",
        f"overlap {beside.overlap:.3f}, p {beside.p_disjoint:.3f} of one so small",
        f"{beside.expected:.3f} ± {beside.spread:.3f} for random subspaces, p {beside.p_shared:.3f} of one so large",
        finding(beside.verdict == "disjoint", partly=beside.verdict == "as random"),
        {"overlap": beside.overlap, "expected": beside.expected, "spread": beside.spread, "z": beside.z,
         "p_disjoint": beside.p_disjoint, "p_shared": beside.p_shared},
    )  # fmt: skip


def _swapped(rows: list[dict]) -> list[Claim]:
    by_name = {row["interchanged"]: row for row in rows}
    random = [row for row in rows if row["interchanged"].startswith("random")]
    claims = []
    for kind, other in (KINDS, KINDS[::-1]):
        row = by_name[kind]
        moved, kept = row[f"{kind} of the source"], row[f"{other} of the base"]
        chance, plain = max(r[f"{kind} of the source"] for r in random), min(r[f"{other} of the base"] for r in random)
        error = (moved * (1 - moved) / row["pairs"]) ** 0.5
        changes, stays = moved > max(chance, 0.5), kept >= plain - 0.1
        claims.append(
            Claim(
                f"What reads the {kind} reads the source's after its subspace is interchanged; the {other} stays.",
                SOURCE,
                "no number",
                f"later the {kind} is the source's in {moved:.1%}, the {other} still the base's in {kept:.1%}",
                f"random subspaces: at most {chance:.1%} and at least {plain:.1%}",
                finding(changes and stays, partly=changes or (stays and moved > chance + 3 * error)),
                {"moved": moved, "kept": kept, "random_moved": chance, "random_kept": plain},
            )
        )
    return claims
