"""Induction in the wild: which heads continue what was there before, what is lost without them, and what they read.

Olsson et al. 2022, "In-context Learning and Induction Heads": some heads look at the token after the last copy of the
present one ([A][B] ... [A] -> [B]); where they are taken out, in-context learning suffers; they read what
previous-token heads wrote (K-composition, Elhage et al. 2021). Here: all heads are measured
(`mainstem.weights.head_reading`);
those found are taken out together on other random repeated tokens, beside random heads of the same layers; composition
is computed from the weights and held against pairs that cannot compose and against other heads of the writers' layers;
and the example [Pot][ters] ... [Pot] -> [ters] is run.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mainstem.causal.edits import Edit
from mainstem.causal.head_controls import same_layer_heads
from mainstem.causal.recorded import logits_of
from mainstem.causal.reference import reference_text
from mainstem.errors import LevelRefusedError, UsageError
from mainstem.experiments.induction_claims import Composed, Continued, assemble
from mainstem.experiments.outcome import Experiment
from mainstem.lab.repeated import RandomTokens
from mainstem.units import Unit
from mainstem.weights.head_ablation import METHODS, in_context_score, take_out
from mainstem.weights.head_reading import read_heads

if TYPE_CHECKING:
    from mainstem.analysis.composition import Compositions
    from mainstem.session import Model

TEXT = "{name} moved here last spring with three children and a dog. Everybody in the village likes the Pot"
NAMES = ("The Potters", "The Dursleys")
"""Who moves in: the name that the last word begins, and another one."""

SETS = 1000
"""Draws of other writers of the same layers, for composition."""


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the case.

    Args:
        model: the model, with its tokenizer.
        quick: four texts of random tokens, three draws of random heads, one method, instead of ten, ten and three.
        report: receives a line of progress for each step.

    Raises:
        UsageError: if the model has no tokenizer.
        LevelRefusedError, PairError, PromptError: as `read_heads`.
    """
    if model.tokenizer is None:
        raise UsageError("The case needs text, and this model came without a tokenizer", None, "Give it one.")
    draws = 3 if quick else 10
    reading = read_heads(model, examples=4 if quick else 10, report=report)
    induction, previous = (one.found() for one in (reading.get("prefix"), reading.get("previous", "text")))
    known = list(reading.looks_first["random"])
    tokens = RandomTokens.of(model.encoder)
    ablations = []
    for name, heads in (("prefix", induction), ("previous", previous)):
        methods = METHODS if name == "prefix" and not quick else METHODS[:1]
        ablations += take_out(model, name, heads, known, tokens, draws, report, methods)
    report("in-context learning without them ...")
    without = in_context_score(model, induction) if induction else None
    report("composition, from the weights ...")
    composed = _composed(model, induction, previous, known)
    report("[Pot][ters] ...")
    return assemble(model, reading, ablations, without, composed, _continued(model, induction, known, draws))


def _composed(model: "Model", readers: Sequence[str], writers: Sequence[str], known: Sequence[str]) -> Composed | str:
    """K-composition of writers into readers; why there is none, where there is none."""
    try:
        table: Compositions = model.composition(("k",)).tables["k"][0]
    except LevelRefusedError as error:
        return error.description
    places = _places(table, readers, writers)
    if not places:
        return "no previous-token head comes before an induction head"
    others = [head for head in known if head not in writers]
    generator = torch.Generator().manual_seed(model.seed)
    drawn = [_mean(table, _places(table, readers, same_layer_heads(writers, others, generator))) for _ in range(SETS)]
    named = [(str(table.readers[i]), str(table.writers[j])) for i, j in places]
    numbers = [[float(column[place]) for column in (table.strength, table.z, table.q)] for place in places]
    passing = float((table.q[table.causal] <= 0.05).double().mean())
    return Composed(named, numbers, _mean(table, places), drawn, table.null, passing)


def _places(table: "Compositions", readers: Sequence[str], writers: Sequence[str]) -> list[tuple[int, int]]:
    rows = [table.readers.index(unit) for unit in map(Unit.parse, readers) if unit in table.readers]
    columns = [table.writers.index(unit) for unit in map(Unit.parse, writers) if unit in table.writers]
    return [(i, j) for i in rows for j in columns if bool(table.causal[i, j])]


def _mean(table: "Compositions", places: Sequence[tuple[int, int]]) -> float:
    return sum(float(table.z[place]) for place in places) / max(len(places), 1)


def _continued(model: "Model", heads: Sequence[str], known: Sequence[str], draws: int) -> Continued | None:
    """The example; None where the tokenizer does not part the name so."""
    before, after = model.encode("the Pot"), model.encode("the Potters")
    if after[: len(before)] != before or len(after) != len(before) + 1:
        return None
    answer = after[-1]
    texts = [TEXT.format(name=name) for name in NAMES]
    reference = model.encode(reference_text())[:128]

    def probability(text: str, taken: Sequence[str] = ()) -> float:
        with model.edited(*(Edit.mean(head, reference) for head in taken)):
            return _probability(model, text, answer)

    generator = torch.Generator().manual_seed(model.seed)
    others = [head for head in known if head not in heads]
    sets = [same_layer_heads(heads, others, generator) for _ in range(draws if heads else 0)]
    return Continued(
        text=texts[0],
        answer=model.token(answer),
        probability=probability(texts[0]),
        other=probability(texts[1]),
        without=probability(texts[0], heads),
        random=[probability(texts[0], taken) for taken in sets],
    )


@torch.no_grad()
def _probability(model: "Model", text: str, answer: int) -> float:
    inputs = model.inputs(text)
    logits = logits_of(model.module(input_ids=inputs.ids, **inputs.forward))[0, -1]
    return float(logits.double().softmax(-1)[answer])
