"""The places of a run whose basis can be measured: the stream's states, what each sublayer reads, what W_O reads.

All come from the anatomy. What several matrices read after one norm (queries, keys and values; gate and up) is one
place. What W_O reads is in the space of heads, not of the stream, and is kept apart for that reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap
from mainstem.model.layouts import by_token
from mainstem.model.spine import spine_states

PointKind = Literal["stream", "input", "heads"]


@dataclass(frozen=True)
class StreamPoint:
    """One place.

    Attributes:
        name: the unit that wrote last, for a state of the stream; `L5.attn.input` and `L5.attn.heads` for what a
            sublayer's matrices and its output matrix read.
        kind: "stream", "input" or "heads".
        layer: the block; None for the embedding.
        site: where it is seen.
    """

    name: str
    kind: PointKind
    layer: int | None
    site: Site


def stream_points(anatomy: Anatomy, *kinds: PointKind) -> list[StreamPoint]:
    """The places of some kinds, each kind in the order of execution.

    Args:
        anatomy: the model's.
        kinds: which; all by default.
    """
    made = {"stream": _states, "input": _inputs, "heads": _heads}
    return [point for kind in kinds or made for point in made[kind](anatomy)]


def _states(anatomy: Anatomy) -> list[StreamPoint]:
    sites = dict(zip(anatomy.spine, anatomy.spine_sites, strict=True))
    nodes, units = spine_states(anatomy)
    return [StreamPoint(str(unit), "stream", unit.layer, sites[node]) for node, unit in zip(nodes, units, strict=True)]


def _inputs(anatomy: Anatomy) -> list[StreamPoint]:
    found: dict[int, StreamPoint] = {}
    taken: dict[str, int] = {}
    for read in anatomy.reads:
        if read.node not in found:
            name = f"{read.unit}.input"
            taken[name] = taken.get(name, 0) + 1
            again = f".{taken[name]}" if taken[name] > 1 else ""
            found[read.node] = StreamPoint(name + again, "input", read.unit.layer, read.input_site)
    return list(found.values())


def _heads(anatomy: Anatomy) -> list[StreamPoint]:
    return [
        StreamPoint(f"{write.unit}.heads", "heads", write.unit.layer, write.source)
        for write in anatomy.writes
        if write.attention is not None and write.source is not None
    ]


def tap_at(point: StreamPoint, see: Callable[[Tensor], None], batch: Callable[[], tuple[int, int]]) -> tuple[Site, Tap]:
    """A tap that looks on, for `mainstem.model.hooks.tapped`.

    Args:
        point: where.
        see: receives [batch, pos, d_model] of each run.
        batch: the size of the run that goes on, (batch, pos).
    """

    def tap(leaves: list[Any]) -> None:
        see(by_token(leaves[point.site.slot], point.site, *batch()))

    return point.site, tap
