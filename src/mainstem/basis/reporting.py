"""The whole basis report: every question, asked of one model on one text."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mainstem.analysis.outliers import PUBLISHED
from mainstem.basis.measuring import kurtosis_section, measure_stream, rotate_stream
from mainstem.basis.outlier_reading import outlier_section
from mainstem.basis.reference import reference
from mainstem.lab.texts import Text
from mainstem.results.basis_report import BasisReport

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS, EVAL_TOKENS = 20_000, 3_072


def report_basis(
    model: "Model",
    text: Text | str | Path = "drama",
    tokens: int = TOKENS,
    eval_tokens: int = EVAL_TOKENS,
    window: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> BasisReport:
    """Measures the basis of the stream.

    Args:
        model: the model; it is not changed.
        text: what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of it the statistics are made of.
        eval_tokens: how many of them perplexities are computed on.
        window: tokens of a window; 512 by default, or the model's context where that is shorter.
        say: is told what is going on.

    Raises:
        TextError: the text cannot be had, or is shorter than a window.
        NotFiniteError: a value of the stream is not finite; names the point.
    """
    on = reference(model, text, tokens, window)
    watched = measure_stream(model, on, say=say)
    say("Rotating the stream")
    rotated = rotate_stream(model, on)
    return BasisReport(
        provenance=model.provenance(),
        warnings=[],
        model=model.summary,
        text=on.summary() | {"eval_tokens": min(eval_tokens, on.windows.n_tokens)},
        kurtosis=kurtosis_section(watched, rotated),
        outliers=outlier_section(model, watched, PUBLISHED),
    )
