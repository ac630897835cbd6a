"""What is at a point in another run: the values that patches, means and draws take, without padding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import Pass, copied_by_token
from mainstem.causal.edit_plans import Planned
from mainstem.causal.head_changes import head_values
from mainstem.causal.pieces import Attending, Entries, Expert, Piece, PieceMap
from mainstem.causal.scale_changes import scales
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.points import Point
from mainstem.run.inputs import Inputs

InputsOf = Callable[[Any], Inputs]
"""Makes the inputs of what an edit names as its source."""


@torch.no_grad()
def source_values(
    model: torch.nn.Module, plans: Sequence[Planned], inputs_of: InputsOf
) -> dict[tuple[int, int], list[Float[Tensor, "pos entry"]]]:
    """What each piece has in each row of its edit's source, by the numbers of both; one run for each source."""
    by_source: dict[int, list[int]] = {}
    for i, planned in enumerate(plans):
        if planned.edit.method.source is not None:
            by_source.setdefault(id(planned.edit.method.source), []).append(i)
    values: dict[tuple[int, int], list[Tensor]] = {}
    for indices in by_source.values():
        inputs = inputs_of(plans[indices[0]].edit.method.source)
        now = Pass(*inputs.ids.shape, padding=inputs.padding)
        taps: list[tuple[Site, Tap]] = []
        for i in indices:
            for n, piece in enumerate(plans[i].pieces):
                taps += _keeping(piece, values.setdefault((i, n), []), now)
        with tapped(model, taps):
            model(input_ids=inputs.ids, **inputs.forward)
    return values


@torch.no_grad()
def point_values(
    model: torch.nn.Module, anatomy: Anatomy, at: Point, inputs: Inputs
) -> list[Float[Tensor, "pos entry"]]:
    """What is at a point in a run, for each row of its inputs; writes of one unit are added up.

    Raises:
        UnitError, LevelRefusedError: if the model has no such point, or no other run can have its value.
    """
    pieces = PieceMap(anatomy).of(at)
    if not all(isinstance(piece, Entries) for piece in pieces):
        raise LevelRefusedError(f"No value of {at}", reason="routing differs from token to token")
    now = Pass(*inputs.ids.shape, padding=inputs.padding)
    kept: list[list[Tensor]] = [[] for _ in pieces]
    with tapped(model, [tap for piece, own in zip(pieces, kept, strict=True) for tap in _keeping(piece, own, now)]):
        model(input_ids=inputs.ids, **inputs.forward)
    return [torch.stack(rows).sum(0) for rows in zip(*kept, strict=True)]


def _keeping(piece: Piece, kept: list[Tensor], now: Pass) -> list[tuple[Site, Tap]]:
    """Taps that keep what a piece is in a run: for each row [pos, entry]."""
    if isinstance(piece, Attending):
        return head_values(piece.core, {(piece.head, piece.what): kept}, now)
    if isinstance(piece, Expert):
        return []
    site = piece.site if isinstance(piece, Entries) else piece.stream

    def tap(leaves) -> None:
        tensor = leaves[site.slot]
        if isinstance(piece, Entries):
            found = copied_by_token(tensor, site, now)[1]
            found = found if piece.entries is None else found[..., piece.entries.to(found.device)]
        else:
            found = scales(piece, tensor, site, now)
        for row in range(now.batch):
            kept.append(found[row, now.padding[row] if now.padding else 0 :])

    return [(site, tap)]
