"""The whole basis report: every question, asked of one model on one text.

Each section is made by a function that is named here, and only if the state does not hold it: what costs much and is
shared, the pass over the text, is made when the first section asks for it.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainstem.analysis.outliers import PUBLISHED
from mainstem.analysis.quantizers import PUBLISHED as PUBLISHED_INT8
from mainstem.basis.ablating import ablation_section
from mainstem.basis.kept_sections import Finished, KeptSections, identity
from mainstem.basis.measuring import Watched, kurtosis_section, measure_stream, rotate_stream
from mainstem.basis.outlier_reading import outlier_section
from mainstem.basis.quantising import chosen_quantisers, quantiser_section, quantiser_warnings, rotated_copy
from mainstem.basis.recommending import recommend
from mainstem.basis.reference import Reference, reference
from mainstem.basis.rounding_reading import overflows, rounding_section
from mainstem.causal.linear_layers import refuse_quantised
from mainstem.errors import AnatomyError, CertificateError
from mainstem.lab.texts import Text
from mainstem.results.basis_report import BasisReport

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS, EVAL_TOKENS = 20_000, 3_072
ROTATION = "hadamard"
SHOWN = (*(name for name, each in PUBLISHED_INT8.items() if each.threshold is None), "llm.int8", "w4", "w4a4")
"""The quantisers of the report: the five of LLM.int8() without decomposition and itself, and 4 bits."""

Say = Callable[[str], None]

REFUSALS = (AnatomyError,)
"""What leaves a section out, with a note, instead of ending the report: a structure that it cannot be had for."""


def report_basis(
    model: "Model",
    text: Text | str | Path = "drama",
    tokens: int = TOKENS,
    eval_tokens: int = EVAL_TOKENS,
    window: int | None = None,
    state: Path | None = None,
    say: Say = lambda text: None,
) -> BasisReport:
    """Measures the basis of the stream.

    Args:
        model: the model; it is not changed.
        text: what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of it the statistics are made of.
        eval_tokens: how many of them perplexities are computed on.
        window: tokens of a window; 512 by default, or `tokens` or the model's context where that is shorter.
        state: a file that keeps finished sections; an interrupted report goes on from it.
        say: is told what is going on.

    Raises:
        UsageError: the state is one of another report, or cannot be kept.
        TextError: the text cannot be had, or is shorter than a window.
        NotFiniteError: a value of the stream is not finite; names the point.
    """
    on = reference(model, text, tokens, window)
    kept = KeptSections(state, identity(model, on, eval_tokens=eval_tokens))
    short = on.first(eval_tokens)
    warnings: list[dict[str, Any]] = []
    notes: list[str] = []
    made: dict[str, Any] = {}
    for name, make in _makers(model, on, short, say).items():
        try:
            finished = kept.get(name, make)
        except REFUSALS as refusal:
            notes.append(f"No {name}: {refusal}")
            continue
        made[name] = finished.section
        warnings += finished.warnings
        notes += finished.notes
    return BasisReport(
        provenance=model.provenance(),
        warnings=warnings,
        model=model.summary,
        text=on.summary() | {"eval_tokens": short.windows.n_tokens},
        recommendation=recommend(**made),
        notes=notes,
        **made,
    )


def _makers(model: "Model", on: Reference, short: Reference, say: Say) -> dict[str, Callable[[], Finished]]:
    """What makes each section, in their order."""

    @cache
    def watched() -> Watched:
        return measure_stream(model, on, say=say)

    return {
        "kurtosis": lambda: Finished(kurtosis_section(watched(), rotate_stream(model, on, say=say))),
        "outliers": lambda: Finished(outlier_section(model, watched(), PUBLISHED)),
        "ablations": lambda: _ablations(model, short, say),
        "quantisers": lambda: _quantisers(model, short, say),
        "rounding": lambda: _rounding(model, short),
    }


def _ablations(model: "Model", on: Reference, say: Say) -> Finished:
    """The outlier features taken out, or the most varied dimensions."""
    section, warnings, notes = ablation_section(model, on, say=say)
    return Finished(section, [warning.as_dict() for warning in warnings], notes)


def _quantisers(model: "Model", on: Reference, say: Say) -> Finished:
    """The int8 quantisers in the model's own basis and a rotated one, where it can be rotated, and 4 bits."""
    refuse_quantised(model.module)
    copies, notes = {}, []
    try:
        copies = {"rotated": rotated_copy(model, ROTATION, say)}
    except (*REFUSALS, CertificateError) as refusal:
        notes.append(f"No quantisers in a rotated basis: {refusal}")
    section = quantiser_section(model, [on], chosen_quantisers(SHOWN), copies, say)
    return Finished(section, quantiser_warnings(section), notes)


def _rounding(model: "Model", on: Reference) -> Finished:
    """What rounding takes of each write."""
    section = rounding_section(model, on)
    return Finished(section, [warning.as_dict() for warning in overflows(section)])
