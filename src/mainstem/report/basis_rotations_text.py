"""A rotated model beside itself, in words: what the tables for the terminal and the page both say."""

from mainstem.experiments.outcome import ExperimentTable
from mainstem.report.text import NOTHING, count, plain, plural, scientific, visible_or
from mainstem.results.basis_rotations import KurtosisRow, PrecisionRow, RotationSection

TITLE = "The model in a rotated basis"


def summary(section: RotationSection) -> list[str]:
    """What was rotated, how well, and what was written; one sentence each."""
    kind = section.rotation if section.objective is None else f"{section.rotation} for least {section.objective}"
    ones = ", keeps the vector of ones" if section.keeps_ones else ""
    said = [
        f"{kind}, seed {section.seed}, {count(section.d_model)} dimensions, orthogonal to "
        f"{scientific(section.orthogonality)}{ones}",
        f"{plural(section.turned, 'tensor')} rotated, {plural(section.folded, 'gain')} folded"
        + (f", untied: {', '.join(map(visible_or, section.untied))}" if section.untied else ""),
        f"in float64 with casts lifted the logits are {scientific(section.certificate['logits'])} apart, relative to "
        "the largest",
    ]
    made = section.checkpoint
    if made is not None:
        size = f"{count(round(made.bytes / 1e6))} MB" if made.bytes >= 1e6 else f"{count(made.bytes)} bytes"
        said.append(
            f"written to {visible_or(made.path)}: {plural(len(made.files), 'file')}, {size}; loaded again, its logits "
            f"are {scientific(made.logits)} apart"
        )
    return said


def tables(section: RotationSection) -> list[ExperimentTable]:
    """Precisions, then kurtosis of the states and of what is read."""
    states = [row for row in section.points if row.kind == "stream"]
    inputs = [row for row in section.points if row.kind != "stream"]
    failures = [visible_or(row.failure or "") for row in section.precisions]
    losses = [_precision(row) for row in section.precisions]
    heads = list(_PRECISION_HEADS)
    if any(failures):
        heads.append("why none")
        losses = [[*row, failure] for row, failure in zip(losses, failures, strict=True)]
    return [
        ExperimentTable("Losses", _PRECISION_CAPTION, heads, losses),
        ExperimentTable("Kurtosis of the stream", _caption(section), _POINT_HEADS, [_point(row) for row in states]),
        ExperimentTable("Kurtosis of what is read", _caption(section), _POINT_HEADS, [_point(row) for row in inputs]),
    ]


_PRECISION_CAPTION = (
    "nats for each token, the model and its rotated copy in the same dtype; KL and changed first guesses against the "
    "model; logits: the largest difference over the largest logit"
)
_PRECISION_HEADS = ["dtype", "tokens", "loss", "rotated", "change", "KL", "changed", "logits"]


def _precision(row: PrecisionRow) -> list[str]:
    dtype = f"{row.dtype}, casts lifted" if row.lifted else row.dtype
    change = NOTHING if row.change is None else scientific(row.change) if row.change else "0"
    flips = NOTHING if row.flips is None else f"{row.flips:.1%}"
    kl, logits = (NOTHING if value is None else scientific(max(value, 0.0)) for value in (row.kl, row.logits))
    return [
        dtype,
        count(row.tokens),
        _loss(row.loss),
        _loss(row.rotated_loss),
        change,
        kl,
        flips,
        logits,
    ]


def _loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.6f}"


def _caption(section: RotationSection) -> str:
    return f"without first positions; a random direction has {plain(section.expectation, 3)}"


_POINT_HEADS = ["place", "before", "rotated"]


def _point(row: KurtosisRow) -> list[str]:
    return [row.name.removesuffix(".input"), plain(row.kurtosis), plain(row.rotated)]
