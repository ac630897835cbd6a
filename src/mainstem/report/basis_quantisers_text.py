"""What quantisers do, in words: what the tables for the terminal and the page both say."""

import math

from mainstem.experiments.outcome import ExperimentTable
from mainstem.report.text import NOTHING, count, plain, plural, scientific, signed
from mainstem.results.basis_quantisers import (
    FULL,
    CloserRow,
    LayerErrorRow,
    QuantiserRow,
    QuantiserSection,
    named,
)

TITLE = "Quantisers"
RUNS_CAPTION = (
    "change of the loss, with its bootstrap interval of 95 %, and KL(full precision || quantised) in nats a token; "
    "flips: tokens whose likeliest prediction is another"
)
CLOSER_CAPTION = "the difference of KL to full precision, token by token; negative where the first is closer"


def caption(section: QuantiserSection) -> str:
    """Which part of the model is quantised."""
    share = section.parameters / section.matrices
    return (
        f"{count(section.parameters)} weights, {share:.1%} of the matrices that are no embedding; the embedding and "
        "the unembedding stay as they are"
    )


def found(section: QuantiserSection) -> str:
    """The sentence that the numbers come to, on the first text."""
    name = section.texts[0]["name"]
    rows = [row for row in section.rows if row.text == name and row.quantiser != FULL]
    best, worst = (pick(rows, key=lambda row: row.kl) for pick in (min, max))
    measured = f"KL {plain(best.kl, 4)} nats a token, {best.flips:.1%} of predictions flip"
    if len(rows) == 1:
        return f"on {name}, {named(best.quantiser, best.basis)} is this far from full precision: {measured}"
    return (
        f"on {name}, {named(best.quantiser, best.basis)} is closest to full precision ({measured}), "
        f"{named(worst.quantiser, worst.basis)} is farthest ({plain(worst.kl, 4)}, {worst.flips:.1%})"
    )


def tables(section: QuantiserSection) -> list[ExperimentTable]:
    """All tables, in their order: runs of each text, pairs of runs, layers by what they are for."""
    several = len({row.basis for row in section.rows}) > 1
    roles = list(dict.fromkeys(row.role for row in section.layers))
    by_quantiser: dict[str, list[LayerErrorRow]] = {}
    for row in section.layers:
        by_quantiser.setdefault(named(row.quantiser, row.basis), []).append(row)
    return [
        *(
            ExperimentTable(
                f"{TITLE} on {text['name']}", RUNS_CAPTION, ["quantiser", *["basis"] * several, *_RUN_HEADS],
                [_run(row, several) for row in section.rows if row.text == text["name"]],
            )
            for text in section.texts
        ),
        ExperimentTable("Closer to full precision", CLOSER_CAPTION, _CLOSER_HEADS,
                        [_closer(row) for row in section.closer]),
        ExperimentTable("Error of each product", layers_caption(section), ["quantiser", *roles, "worst", "kept"],
                        [_layers(name, rows, roles) for name, rows in by_quantiser.items()]),
    ]  # fmt: skip


_RUN_HEADS = ["perplexity", "change of loss", "interval", "KL", "flips"]


def _run(row: QuantiserRow, several: bool) -> list[str]:
    numbers = [f"{row.perplexity:,.2f}" if row.perplexity < 1e6 else scientific(row.perplexity)]
    if row.change or row.kl:
        numbers += [signed(row.change, 4), _interval(row)]
        numbers += [plain(row.kl, 4), f"{row.flips:.1%}"]
    else:
        numbers += [NOTHING] * 4
    return [row.quantiser, *[row.basis] * several, *numbers]


_CLOSER_HEADS = ["text", "first", "second", "difference", "interval", "closer"]


def _closer(row: CloserRow) -> list[str]:
    return [row.text, row.first, row.second, signed(row.difference, 4), _interval(row), row.closer or "neither"]


def _interval(row: QuantiserRow | CloserRow) -> str:
    """Its ends, or nothing where one token has none."""
    return NOTHING if math.isnan(row.low) else f"{signed(row.low, 4)} to {signed(row.high, 4)}"


def layers_caption(section: QuantiserSection) -> str:
    """How a layer's error is measured."""
    return (
        f"||quantised - full|| / ||full|| on {plural(section.layer_tokens, 'token')}, means over layers with the same "
        "role; kept: the share of input dimensions that stay in the float dtype"
    )


def _layers(name: str, rows: list[LayerErrorRow], roles: list[str]) -> list[str]:
    means = []
    for role in roles:
        own = [row.relative_error for row in rows if row.role == role]
        means.append(f"{sum(own) / len(own):.2%}" if own else NOTHING)
    worst = max(rows, key=lambda row: row.relative_error)
    kept = sum(row.kept for row in rows) / len(rows)
    return [name, *means, f"{worst.layer} {worst.relative_error:.1%}", f"{kept:.2%}" if kept else NOTHING]
