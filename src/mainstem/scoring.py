"""Scores of a trace's units, those that are computed and those that need the model to run again, in one call."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.ranking import KIND_LEVELS
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.scores import RULES, Scores, check_score, chosen_groups, score_all
from mainstem.causal.gradients import STEPS, Differentiator
from mainstem.errors import ChoiceError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.run.inputs import base_arguments
from mainstem.targets import Target

if TYPE_CHECKING:
    from mainstem.session import Trace


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
            values[name] = measured(trace, decomposition, target, name, kinds, row, steps)
    return Scores(decomposition, chosen_groups(decomposition, kinds), norm, {name: values[name] for name in names})


def measured(
    trace: "Trace",
    decomposition: Decomposition,
    target: Target,
    name: str,
    kinds: Sequence[str] | None = None,
    row: int = 0,
    steps: int = STEPS,
) -> list[Tensor]:
    """A score that needs the model to run again, one tensor for each of `chosen_groups`."""
    module, inputs = trace.model.module, trace.inputs
    ids = inputs.ids[row, inputs.padding[row] :]
    differentiator = Differentiator(module, decomposition, target, ids, kinds, **base_arguments(module))
    return differentiator.gradient() if name == "gradient" else differentiator.integrated(steps).scores


def measured_levels(
    trace: "Trace", decompositions: Mapping[str, Decomposition], target: Target, name: str, kinds: set[str], row: int
) -> dict[str, list[Tensor]]:
    """A measured score on every level that the kinds need."""
    out = {}
    for level in dict.fromkeys(KIND_LEVELS[kind] for kind in sorted(kinds)):
        own = [kind for kind in kinds if KIND_LEVELS[kind] == level]
        out[level] = measured(trace, decompositions[level], target, name, own, row)
    return out


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
        raise UsageError(f"this model has no {missing}", "--kinds", f"It has: {', '.join(known) or 'none to rank'}.")
