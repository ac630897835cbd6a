"""Compositions in words: what the table for the terminal and the page both say."""

from mainstem.report.text import count, plain, plural, scientific
from mainstem.results.composition import CompositionReading, KindRow, PairRow

NAMES = {
    "q": "Q-composition: read by queries",
    "k": "K-composition: read by keys",
    "v": "V-composition: read by values",
    "mlp": "read by MLPs",
    "neuron": "read by neurons",
}
PAIR_COLUMNS = ("reader", "writer", "composition", "z", "q", "without shared", "z", "q")


def what_is_shown(r: CompositionReading) -> str:
    """What the numbers are, and which are the nulls."""
    rotary = f"; rotary embedding at offset {r.offset}" if {row.kind for row in r.kinds} & {"q", "k"} else ""
    return f"||R W|| / (||R|| ||W||), of weights alone{rotary}; a random rotation gives {r.null:.4f}"


def judged(r: CompositionReading) -> str:
    """How pairs are judged."""
    return (
        "z: squared composition above a random rotation’s, in its standard deviations; q: false discovery rate against "
        "pairs of this model whose writer comes after the reader, as many layers apart"
    )


def title(row: KindRow, r: CompositionReading) -> str:
    """Who reads and who writes."""
    writers = r.of if r.of and r.writers == "heads" else r.writers
    return f"{NAMES[row.kind]}{f' of {r.of}' if r.of and r.writers == 'neurons' else ''}, written by {writers}"


def kind_text(row: KindRow, r: CompositionReading) -> str:
    """All pairs of a kind in one sentence."""
    return (
        f"{count(row.above)} of {count(row.pairs)} pairs above the {count(row.acausal)} impossible ones and "
        f"{count(row.below)} below, at a rate of {r.rate:g} ({count(row.above_without)} and "
        f"{count(row.below_without)} without shared directions); mean {row.mean:.4f} against {row.mean_acausal:.4f}; "
        f"|z| above 3 in {row.beyond:.0%} against {row.beyond_acausal:.0%}"
        + (f"; {count(row.undefined)} pairs with a norm of 0" if row.undefined else "")
    )


def pair_cells(row: PairRow) -> list[str]:
    """A pair's cells, in the order of `PAIR_COLUMNS`."""
    numbers = (row.composition, row.z, row.q, row.composition_without, row.z_without, row.q_without)
    texts = [f"{value:.3f}" if i in (0, 2, 3, 5) else plain(value, 0) for i, value in enumerate(numbers)]
    return [row.reader, row.writer, *texts]


def shared_text(r: CompositionReading, kind: str) -> str:
    """Which directions the repetition leaves out."""
    shared = r.shared[kind]
    if not shared.directions:
        return "no direction is shared by many units"
    places = ", ".join(
        f"{weight:.1f} ({dimension}: {entry:.2f})"
        for weight, (dimension, entry) in zip(shared.weights[:6], shared.dimensions[:6], strict=True)
    )
    return (
        f"{plural(shared.directions, 'shared direction')} left out in the repetition; times the share of a direction "
        f"like any other (strongest dimension: its entry): {places}"
    )


def certificate_text(r: CompositionReading) -> str:
    """Both certificates."""
    factors, pairs = r.factors, r.certificate
    return (
        f"{count(factors.checked)} sides and writes rebuilt from factors, worst relative error "
        f"{scientific(factors.worst)} (tolerance {scientific(factors.tolerance)}); {count(pairs.pairs)} pairs alone in "
        f"float64, {scientific(pairs.worst)} ({scientific(pairs.tolerance)})"
    )
