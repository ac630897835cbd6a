"""Putting direct, total and repaired effects together: the trace's run, the units, and a reference text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mainstem.causal.reference import LONGEST, reference_text
from mainstem.causal.repair import Removal, Repairs, repair
from mainstem.intervene.intervening import rows_of
from mainstem.run.inputs import Inputs, context_length
from mainstem.targets import Target
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.tracing import Trace


def repair_trace(
    trace: "Trace",
    units: Sequence[Unit | str],
    target: Target | str | None = None,
    *,
    removal: Removal = "zero",
    reference: Any = None,
    draws: int = 5,
    position: int = -1,
    row: int = 0,
) -> Repairs:
    """For each unit its direct effect on a logit, the total effect of removing it, and what later layers do about it.

    Args:
        trace: the run.
        units: addresses of anything that can be edited: heads, neurons, sublayers, subvalues, embeddings.
        target: a token, a set, or either against rivals; by default the likeliest token.
        removal: `zero`, `mean` or `resample`: what is put in the unit's place.
        reference: a text, texts or token ids for the last two; by default the text that comes with the package.
        draws: how many values `resample` takes, by the model's seed.
        position: the destination, negative from the end.
        row: which prompt of a batch.

    Raises:
        ChoiceError, UsageError: for an unknown removal, no unit, no draw or no reference.
        TargetError, TokenError: if the target has no logit of its own at one destination.
        UnitError, LevelRefusedError, EditError: if a unit cannot be removed so.
    """
    trace.run.require_same_edits()
    model = trace.model
    inputs = model.inputs(trace.ids(row))
    rows = rows_of(model, inputs, position)
    wanted = model.target(target or f"id:{int(rows.clean.argmax())}") if not isinstance(target, Target) else target
    if removal != "zero":
        reference = _reference(trace, reference)
    made = repair(
        rows,
        trace.decompose("sublayers", position, row),
        wanted,
        [Unit.parse(unit) if isinstance(unit, str) else unit for unit in units],
        removal,
        reference,
        draws,
        model.seed,
    )
    return replace(made, provenance=model.provenance())


def _reference(trace: "Trace", given: Any) -> Inputs | None:
    """The inputs of what was given, or of the package's text; None without a tokenizer."""
    model = trace.model
    if given is not None:
        return model.inputs(given)
    if model.tokenizer is None:
        return None
    longest = min(LONGEST, context_length(model.module) or LONGEST)
    return model.inputs(model.encode(reference_text())[:longest])
