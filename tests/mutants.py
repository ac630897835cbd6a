"""Ways to get a stream's account wrong on purpose: each takes a right anatomy and gives a wrong one.

A `Subject` is a model with its anatomy and one run. A mutation takes a subject and gives a `Mutant`, or None
where the model has nothing of the kind. `caught_by` runs the certificates on a mutant and says which fails. A
mutant changes the anatomy, or, where the mistake would be made while a run is read (a wrong key/value head, a
shifted source), every `Moment` that is made of a run, those of the labels certificate included.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import zoo
from tiny_models import build
from torch import nn

from mainstem.analysis.attribution import attribute
from mainstem.analysis.certificate import Check, certify, check_reads
from mainstem.analysis.decompose import Level, decompose
from mainstem.causal import labels
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, AttentionCore, Projection, Write
from mainstem.model.discovery import discover
from mainstem.model.graph import Node, SumNode, Term
from mainstem.run.capture import Captured, capture
from mainstem.run.inputs import base_arguments
from mainstem.run.moment import HeadRun, Moment, moment
from mainstem.targets import Target

T = TypeVar("T")
LENGTH = 9
TARGET = Target(ids=(7,), against=(), text="id:7")
LEVELS: tuple[Level, ...] = ("units", "attention_neurons", "heads", "sublayers")
"""The levels whose sums are checked; `units` is subvalues and neurons at once."""


@dataclass(eq=False)
class Subject:
    """A model, its anatomy, and one run kept at its last destination."""

    name: str
    model: nn.Module
    anatomy: Anatomy
    ids: torch.Tensor
    forward: dict[str, Any]
    captured: Captured

    @cached_property
    def moment(self) -> Moment:
        return moment(self.anatomy, self.captured, 0, 0, 0)

    @cached_property
    def earlier(self) -> Moment:
        """The same run, one destination before."""
        last = self.captured.destinations
        return moment(self.anatomy, capture(self.model, self.anatomy, self.ids, last - 1, **self.forward), 0, 0, 0)


@dataclass(frozen=True, eq=False)
class Mutant:
    """What to believe in place of the truth.

    Attributes:
        by: the check that is expected to fail, and is tried first.
        moment: changes every moment.
        patches: attributes to replace while the model runs.
        run: whether the run has to be captured anew.
    """

    anatomy: Anatomy
    moment: Callable[[Moment], Moment] | None = None
    by: str = "units"
    patches: tuple[tuple[Any, str, Any], ...] = ()
    run: bool = False


Mutation = Callable[[Subject], Mutant | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    """Gives a mutation its name."""
    MUTATIONS[function.__name__.replace("_", " ")] = function
    return function


def subject(name: str, **overrides: Any) -> Subject:
    """The subject of a family or of a handmade model.

    Raises:
        NotBuilt, RefusedError: as `zoo.build` and `discover` do.
    """
    model = build(name, **overrides)
    forward = base_arguments(model)
    anatomy = discover(model, **forward)
    ids = zoo.prompt(LENGTH, seed=1)
    captured = capture(model, anatomy, ids, torch.tensor([[LENGTH - 1]]), **forward)
    return Subject(name, model, anatomy, ids, forward, captured)


# --- certificates -------------------------------------------------------------------------------------------


def caught_by(subject: Subject, mutant: Mutant, per_level: int = 3, seed: int = 0) -> str | None:
    """The first certificate that fails on a mutant, with its place; None if all hold."""
    return next(failures(subject, mutant, per_level, seed), None)


def failures(subject: Subject, mutant: Mutant, per_level: int = 3, seed: int = 0) -> Iterator[str]:
    """The certificates that fail: sum of each level, attribution, reads, labels; the expected one first."""
    with ExitStack() as stack:
        for target, name, value in mutant.patches:
            stack.enter_context(patch.object(target, name, value))
        captured = subject.captured
        if mutant.run:
            captured = capture(subject.model, mutant.anatomy, subject.ids, captured.destinations, **subject.forward)
        made = moment(mutant.anatomy, captured, 0, 0, 0)
        if mutant.moment is not None:
            changed = mutant.moment
            made = changed(made)
            original = labels.moment
            stack.enter_context(patch.object(labels, "moment", lambda *a, **k: changed(original(*a, **k))))
        checks: dict[str, Callable[[], str | None]] = {level: partial(_sum, made, level) for level in LEVELS}
        checks["attribution"] = partial(unexplained, made)
        checks["reads"] = lambda: _where(check_reads(decompose(made, "sublayers")))
        checks["labels"] = lambda: _where(
            labels.check_labels(subject.model, mutant.anatomy, subject.ids, per_level, seed, **subject.forward)
        )
        for name in dict.fromkeys([mutant.by, *checks]):
            failed = checks[name]()
            if failed is not None:
                yield f"{name}: {failed}"


def _where(check: Check) -> str | None:
    return None if check.holds else check.where


def _sum(made: Moment, level: Level) -> str | None:
    try:
        return certify(decompose(made, level)).failed
    except LevelRefusedError:
        return None


def unexplained(made: Moment) -> str | None:
    """What direct attribution leaves of a logit, if that is more than rounding."""
    try:
        found = attribute(decompose(made, "sublayers"), TARGET)
    except LevelRefusedError:
        return None
    size = 1 + abs(found.functional.total) + sum(float(s.abs().sum()) for s in found.scores)
    if abs(found.unexplained) <= 1e-4 * size:
        return None
    return f"{found.unexplained:.2g} of {found.functional.total:.2g} is unexplained"


# --- tools --------------------------------------------------------------------------------------------------


def with_writes(anatomy: Anatomy, change: Callable[[int, Write], Write]) -> Anatomy:
    return replace(anatomy, writes=tuple(change(i, write) for i, write in enumerate(anatomy.writes)))


def with_nodes(anatomy: Anatomy, changed: dict[int, Node]) -> Anatomy:
    nodes = tuple(changed.get(i, node) for i, node in enumerate(anatomy.graph.nodes))
    return replace(anatomy, graph=replace(anatomy.graph, nodes=nodes))


def with_terms(anatomy: Anatomy, node: int, terms: tuple[Term, ...]) -> Anatomy:
    made = anatomy.graph.nodes[node]
    assert isinstance(made, SumNode)
    return with_nodes(anatomy, {node: replace(made, terms=terms)})


def with_cores(anatomy: Anatomy, change: Callable[[AttentionCore], AttentionCore]) -> Anatomy:
    cores = {core.site: change(core) for core in cores_of(anatomy)}
    return with_writes(
        anatomy, lambda i, w: w if w.attention is None else replace(w, attention=cores[w.attention.site])
    )


def cores_of(anatomy: Anatomy) -> list[AttentionCore]:
    found = {w.attention.site: w.attention for w in anatomy.writes if w.attention is not None and not _refused(w)}
    return list(found.values())


def _refused(write: Write) -> bool:
    return bool(write.refusals)


def neuron_writes(anatomy: Anatomy) -> list[int]:
    return [i for i, w in enumerate(anatomy.writes) if w.neurons and w.projection and not w.refusals]


def with_heads(change: Callable[[HeadRun], HeadRun]) -> Callable[[Moment], Moment]:
    """A change of every attention product of a run."""
    return lambda m: replace(m, attention={site: change(heads) for site, heads in m.attention.items()})


def with_matrix(write: Write, change: Callable[[torch.Tensor], torch.Tensor]) -> Write:
    """A write whose first matrix is another."""
    assert write.projection is not None
    first, *rest = write.projection.factors
    return replace(write, projection=Projection((change(first), *rest)))


def middle(items: list[T]) -> T | None:
    return items[len(items) // 2] if items else None


def swapped(count: int, a: int, b: int) -> torch.Tensor:
    """The numbers up to count, with a and b in each other's place."""
    order = torch.arange(count)
    order[a], order[b] = b, a
    return order
