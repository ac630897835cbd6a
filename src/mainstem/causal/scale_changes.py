"""The scale of a norm frozen at that of another run: what the norm gave is rescaled where it is read.

With b the norm's bias and s = 1 / root mean square of what is normed, y - b is proportional to s; so the frozen norm
gives b + (y - b) s' / s, with s' of the other run.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import New, Pass, Places, copied_by_token
from mainstem.causal.pieces import Scale
from mainstem.model.hooks import Site, Tap


@dataclass(frozen=True, eq=False)
class ScaleChange:
    """`new` gives the scales [pos, 1] from those of the run."""

    scale: Scale
    new: New
    positions: Places = None
    row: int | None = None


Taps = list[tuple[Site, Tap]]


def scale_taps(changes: Iterable[ScaleChange], now: Pass) -> tuple[Taps, Taps]:
    """Taps that take the scales of what is normed, and those that rescale what the norm gave."""
    watching: Taps = []
    rescaling: Taps = []
    for change in changes:
        held: list[Tensor] = []
        watching.append((change.scale.stream, _watching(change.scale, held, now)))
        rescaling += [(site, _rescaling(change, site, held, now)) for site in change.scale.results]
    return watching, rescaling


def scales(scale: Scale, tensor: Tensor, site: Site, now: Pass) -> Float[Tensor, "batch pos 1"]:
    """The scale of each position, from what is at the site before the norm."""
    return scale.norm.scale(copied_by_token(tensor, site, now)[1].double())


def _watching(scale: Scale, held: list[Tensor], now: Pass) -> Tap:
    def tap(leaves) -> None:
        held[:] = [scales(scale, leaves[scale.stream.slot], scale.stream, now)]

    return tap


def _rescaling(change: ScaleChange, site: Site, held: list[Tensor], now: Pass) -> Tap:
    def tap(leaves):
        out, tokens = copied_by_token(leaves[site.slot], site, now)
        bias = 0.0 if change.scale.norm.bias is None else change.scale.norm.bias.to(tokens)
        for row in now.rows(change.row):
            places, indices = now.find(row, change.positions)
            if len(places):
                indices = indices.to(tokens.device)
                own = held[0][row, indices]
                ratio = (change.new(own, places) / own).to(tokens)
                tokens[row, indices] = bias + (tokens[row, indices] - bias) * ratio
        new = list(leaves)
        new[site.slot] = out
        return new

    return tap
