"""The use of the stream's room, on a text: effective ranks block by block, and who writes each dimension's variance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mainstem.analysis.bandwidth import Bandwidth, bandwidth
from mainstem.results.subspace import Map, SubspaceReading
from mainstem.weights.managing_memory import traced

if TYPE_CHECKING:
    from mainstem.session import Model

COLUMNS = 32
"""How many dimensions the map shows: those of the largest variance."""


def read_bandwidth(model: "Model", text: str | Sequence[int] | None = None) -> SubspaceReading:
    """How many directions the stream fills after each block, and who writes each dimension's variance.

    Args:
        model: the model.
        text: what to run on; the reference text by default. Its first token is left out: in many models it is a sink.

    Raises:
        UsageError: if the text is too short.
    """
    trace = traced(model, text)
    count = len(model.anatomy.blocks)
    streams = [trace.run.stream(layer)[1:].cpu() for layer in range(count + 1)]
    made = bandwidth(streams, model.seed)
    names = ["embed", *(f"L{layer}" for layer in range(count))]
    widest = made.variances.argsort(descending=True)[:COLUMNS]
    return SubspaceReading(
        subject="bandwidth",
        title="The stream’s room",
        verdict=f"at most {max(rank.participation for rank in made.ranks):.1f} directions by participation, "
        f"{max(rank.entropy for rank in made.ranks):.1f} by entropy; white noise has {made.noise.participation:.1f} "
        f"and {made.noise.entropy:.1f}",
        provenance=model.provenance(),
        warnings=[],
        model=model.summary,
        facts={
            "tokens": made.tokens,
            "noise": {"participation": made.noise.participation, "entropy": made.noise.entropy},
            "unexplained": made.unexplained,
        },
        rows=_rows(names, made),
        caption="effective rank of the stream after each, and the share of the final variance that each writes",
        maps=[
            Map(
                "Who writes each dimension",
                "share of the final variance of a dimension, those of most variance; the rows of a column add up to 1",
                names,
                [str(int(place)) for place in widest],
                made.shares[:, widest].tolist(),
            )
        ],
        notes=[f"The stream of {made.tokens} tokens fills {made.tokens - 1} directions at most."],
    )


def _rows(names: Sequence[str], made: Bandwidth) -> list[dict[str, Any]]:
    """A row for the embeddings and for each block."""
    total = made.shares @ made.variances / made.variances.sum()
    middle = made.shares.median(1).values
    return [
        {
            "layer": name,
            "participation": rank.participation,
            "entropy": rank.entropy,
            "share": float(total[i]),
            "median_share": float(middle[i]),
            "erasing": float((made.shares[i] < 0).double().mean()),
        }
        for i, (name, rank) in enumerate(zip(names, made.ranks, strict=True))
    ]
