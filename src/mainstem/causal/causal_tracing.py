"""Causal tracing: at which positions and layers the clean run's states bring the answer back to a corrupted run.

    clean       the prompt as it is
    corrupted   another prompt of as many tokens (the default, which stays among what the model knows), or the same one
                with Gaussian noise on the embeddings of its subject, `noise` standard deviations of all entries that
                the embedding writes for the prompt; the mean over several draws
    restored    the corrupted run with the clean run's value at one position, of the stream after a block, or of what
                attention or MLPs write in a window of layers around it

(Meng et al. 2022, "Locating and editing factual associations in GPT", section 2; there noise of 3 standard deviations,
10 draws and windows of 10 layers. Replaced tokens: Zhang and Nanda 2024, "Towards best practices of activation
patching".) The indirect effect of a state is the metric of the restored run minus that of the corrupted one.

One row of a batch for each cell and draw, each a whole forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.changes import Change, set_by_position
from mainstem.causal.edited_rows import EditedRows, Row
from mainstem.causal.knockouts import windows
from mainstem.causal.pieces import Entries, PieceMap
from mainstem.causal.tracked import LogitMetric
from mainstem.errors import ChoiceError, LevelRefusedError, PositionError, UsageError
from mainstem.model.hooks import Site
from mainstem.points import Point
from mainstem.units import Unit

KINDS = ("resid", "attn", "mlp")


@dataclass(frozen=True, eq=False)
class CausalTrace:
    """The metric of restored runs.

    Attributes:
        restored: for each kind of state; NaN where a layer has none.
        clean, corrupted: the metric of these runs; the latter a mean over draws.
        layers: the number of each block.
        window: how many layers `attn` and `mlp` are restored in.
        corruption: how the prompt was corrupted, in words.
        metric: its name.
        position: the destination, counted from 0.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    restored: dict[str, Float[Tensor, "layer pos"]]
    clean: float
    corrupted: float
    layers: tuple[int, ...]
    window: int
    corruption: str
    metric: str
    position: int
    provenance: Any = None

    @property
    def total_effect(self) -> float:
        """Clean minus corrupted."""
        return self.clean - self.corrupted

    def indirect_effects(self, kind: str) -> Float[Tensor, "layer pos"]:
        """Restored minus corrupted.

        Raises:
            ChoiceError: if the kind was not restored.
        """
        if kind not in self.restored:
            raise ChoiceError("kind of state", kind, tuple(self.restored))
        return self.restored[kind] - self.corrupted


def replaced(ids: Int[Tensor, " pos"]) -> list[Row]:
    """The corrupted run: another prompt."""
    return [Row(ids)]


def noised(rows: EditedRows, subject: Sequence[int], noise: float, draws: int, seed: int) -> list[Row]:
    """The corrupted runs: noise on the embeddings of some positions, the same for the same seed.

    Raises:
        UsageError: if there is no subject, no draw or no noise.
        PositionError: if the subject is outside the prompt.
    """
    if not subject or draws < 1 or not noise > 0:
        raise UsageError("Noise needs the subject's positions, a size above 0 and one draw at least", None)
    if outside := [place for place in subject if not 0 <= place < len(rows.ids)]:
        raise PositionError(f"Position {outside[0]} is outside the prompt", "the subject")
    site = _site(PieceMap(rows.anatomy), Point("write", Unit.parse("embed")))
    written = rows.values([site])[site].double()
    generator = torch.Generator().manual_seed(seed)
    size = noise * float(written.std())
    made = []
    for _ in range(draws):
        added = size * torch.randn(written.shape, generator=generator, dtype=torch.float64)
        made.append(Row(changes=[Change(site, _adding(added), tuple(subject))]))
    return made


def trace_causes(
    rows: EditedRows,
    corrupted: Sequence[Row],
    metric: LogitMetric,
    kinds: Sequence[str] = KINDS,
    window: int = 1,
    corruption: str = "",
    name: str = "metric",
) -> CausalTrace:
    """Restores every state of some kinds.

    Args:
        rows: makes runs of the clean prompt.
        corrupted: the corrupted runs, by `replaced` or `noised`.
        metric: from logits to numbers.
        kinds: of states: `resid`, `attn`, `mlp`.
        window: how many layers `attn` and `mlp` are restored in at once.
        corruption: how the prompt was corrupted, in words.
        name: of the metric.

    Raises:
        ChoiceError: if there is no such kind.
        LevelRefusedError: if no layer has such a state.
        UsageError: if a window holds nothing.
    """
    sites = {kind: _sites(rows, kind) for kind in kinds}
    clean = rows.values([site for own in sites.values() for site in own.values()])
    layers = [block.layer for block in rows.anatomy.blocks]
    positions = rows.position + 1 if rows.anatomy.causal else len(rows.ids)
    restored = {}
    for kind, own in sites.items():
        around = dict(zip(layers, windows(layers, 1 if kind == "resid" else window), strict=True))
        found = torch.full((len(layers), positions), torch.nan, dtype=torch.float64)
        for layer in own:
            held = [own[other] for other in around[layer] if other in own]
            cells = [
                [Change(site, set_by_position(clean[site]), (place,)) for site in held] for place in range(positions)
            ]
            runs = [Row(row.ids, row.edits, [*row.changes, *cell]) for cell in cells for row in corrupted]
            found[layers.index(layer)] = metric(rows.logits(runs)).reshape(positions, -1).mean(-1).cpu()
        restored[kind] = found
    return CausalTrace(
        restored,
        float(metric(rows.clean[None])),
        float(metric(rows.logits(corrupted)).mean()),
        tuple(layers),
        window,
        corruption,
        name,
        rows.position,
    )


def _sites(rows: EditedRows, kind: str) -> dict[int, Site]:
    """Where the states of a kind are, by layer."""
    if kind not in KINDS:
        raise ChoiceError("kind of state", kind, KINDS)
    anatomy, pieces = rows.anatomy, PieceMap(rows.anatomy)
    points: dict[int, Point] = {}
    for block in anatomy.blocks:
        unit = Unit.write(block.layer, kind) if kind != "resid" else None
        if unit is None:
            points[block.layer] = Point("resid_post", layer=block.layer)
        elif anatomy.writes_of(unit):
            points[block.layer] = Point("write", unit)
    if not points:
        raise LevelRefusedError(f"No {kind} to restore", reason="no layer of this model has one")
    return {layer: _site(pieces, at) for layer, at in points.items()}


def _site(pieces: PieceMap, at: Point) -> Site:
    found = pieces.of(at)
    if len(found) > 1 or not isinstance(found[0], Entries):
        raise LevelRefusedError(f"No {at} to restore", reason="it is written in several pieces")
    return found[0].site


def _adding(added: Float[Tensor, "pos d_model"]):
    return lambda old, places: old + added[places].to(old)
