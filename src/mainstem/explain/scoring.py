"""Scores of a trace's units, those that are computed and those that need the model to run again, in one call."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.ranking import KIND_LEVELS
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.scores import RULES, Scores, check_score, chosen_groups, score_all
from mainstem.causal.gradients import STEPS, Differentiator, Integrated
from mainstem.errors import ChoiceError, UsageError
from mainstem.intervene.intervening import require_whole_edits
from mainstem.model.anatomy import Anatomy
from mainstem.run.inputs import base_arguments
from mainstem.targets import Target

if TYPE_CHECKING:
    from mainstem.tracing import Trace

GAP = 0.05
"""From this gap on, in nats or as a part of the layer's change, a note says that a layer does not add up."""


def scores(
    trace: "Trace",
    target: Target,
    names: Sequence[str],
    level: str = "units",
    kinds: Sequence[str] | None = None,
    norm: NormConvention = "frozen",
    position: int = -1,
    row: int = 0,
    steps: int = STEPS,
) -> Scores:
    """Several scores of every unit of one level at one destination.

    Args:
        trace: the run.
        target: what is scored for.
        names: which scores (see `mainstem.analysis.scores`); those that read the vocabulary share their products.
        level: of the decomposition.
        kinds: of the units; all that the level has by default.
        norm: `frozen` or `recompute`.
        position: the destination, negative from the end.
        row: which prompt of a batch.
        steps: of integrated gradients.

    Raises:
        ChoiceError, UsageError: if an argument is wrong; LevelRefusedError, CertificateError as in `Trace.decompose`.
        RunError: if the model cannot be differentiated. NotFiniteError: if a score is NaN; names the unit.
    """
    for name in names:
        check_score(name, norm, rivals=bool(target.against))
    for kind in kinds or ():
        if kind not in KIND_LEVELS:
            raise ChoiceError("kind", kind, tuple(KIND_LEVELS))
    decomposition = trace.decompose(level, position, row)  # type: ignore[arg-type]
    computed = [name for name in names if not RULES[name].measured]
    values = score_all(decomposition, target, computed, norm, kinds)
    for name in names:
        if RULES[name].measured:
            values[name], _ = measured(trace, decomposition, target, name, kinds, row, steps)
    return Scores(decomposition, chosen_groups(decomposition, kinds), norm, {name: values[name] for name in names})


def measured(
    trace: "Trace",
    decomposition: Decomposition,
    target: Target,
    name: str,
    kinds: Sequence[str] | None = None,
    row: int = 0,
    steps: int = STEPS,
) -> tuple[list[Tensor], list[str]]:
    """A score that needs the model to run again, one tensor for each of `chosen_groups`, and notes on it."""
    trace.run.require_same_edits()
    require_whole_edits(trace.model)
    module, inputs = trace.model.module, trace.inputs
    ids = inputs.ids[row, inputs.padding[row] :]
    differentiator = Differentiator(module, decomposition, target, ids, kinds, **base_arguments(module))
    if name == "gradient":
        return differentiator.gradient(), []
    found = differentiator.integrated(steps)
    return found.scores, _gap_notes(found, steps)


def _gap_notes(found: Integrated, steps: int) -> list[str]:
    """Where a layer's integrated gradients do not add up to what turning it off takes."""
    if not found.gaps:
        return []
    unit, gap = max(found.gaps.items(), key=lambda item: abs(item[1]))
    change = found.changes[unit]
    if abs(gap) <= GAP * max(1.0, abs(change)):
        return []
    return [
        f"integrated gradients with {steps} points leave {gap:+.3f} of the {change:+.3f} nats of {unit} unexplained; "
        "more steps help, unless the layer's writes are normed before they are added."
    ]


def measured_levels(
    trace: "Trace", decompositions: Mapping[str, Decomposition], target: Target, name: str, kinds: set[str], row: int
) -> tuple[dict[str, list[Tensor]], list[str]]:
    """A measured score on every level that the kinds need, and notes on it."""
    out, notes = {}, []
    for level in dict.fromkeys(KIND_LEVELS[kind] for kind in sorted(kinds)):
        own = [kind for kind in kinds if KIND_LEVELS[kind] == level]
        out[level], more = measured(trace, decompositions[level], target, name, own, row)
        notes += more
    return out, notes


def existing_kinds(anatomy: Anatomy) -> list[str]:
    """The kinds of units that a model has, in the order of `KIND_LEVELS`."""
    writes = anatomy.writes
    attention = any(w.attention is not None for w in writes)
    found = {
        "sublayer": any(w.unit.kind == "sublayer" for w in writes),
        "head": attention,
        "attention_subvalue": attention,
        "attention_neuron": attention,
        "ffn_neuron": any(w.neurons and w.shared_expert is None for w in writes),
        "expert_neuron": any(w.experts is not None or w.shared_expert is not None for w in writes),
    }
    return [kind for kind in KIND_LEVELS if found[kind]]


def require_kinds(anatomy: Anatomy, kinds: Sequence[str]) -> None:
    """UsageError if a model has no unit of any of the kinds; names those that it has."""
    known = existing_kinds(anatomy)
    if not any(kind in known for kind in kinds):
        missing = " and ".join(kind.replace("_", " ") + "s" for kind in kinds)
        raise UsageError(f"This model has no {missing}", "--kinds", f"It has: {', '.join(known) or 'none to rank'}.")
