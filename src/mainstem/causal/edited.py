"""A model under edits: they are compiled to taps, and hold for every run inside the context.

The runs may be single forward passes or the steps of a generation with cached keys and values; each pass is told apart
by what the model is called with (`_begin`). Values from other runs are had before, by one run for each source, with
whatever edits an outer context has made.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal import edits as methods
from mainstem.causal.changes import Change, Pass, change_taps, copied_by_token
from mainstem.causal.edits import Edit, Values
from mainstem.causal.expert_changes import ExpertChange, expert_taps
from mainstem.causal.head_changes import HeadChange, head_taps, head_values
from mainstem.causal.pieces import Attending, Entries, Expert, Piece, PieceMap, Scale, overlapping
from mainstem.causal.scale_changes import ScaleChange, scale_taps, scales
from mainstem.errors import EditError, LevelRefusedError, PositionError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.points import Point
from mainstem.run.inputs import CACHES, Inputs


@dataclass(frozen=True, eq=False)
class Planned:
    """An edit, and the pieces that it changes."""

    edit: Edit
    pieces: list[Piece]


@contextmanager
def edited(
    model: torch.nn.Module,
    anatomy: Anatomy,
    edits: Sequence[Edit],
    inputs_of: Callable[[Any], Inputs],
    prompt: int | None = None,
) -> Iterator[None]:
    """Every run of the model inside is made under the edits, in their order, after those of an outer context.

    Args:
        model: the module; on leaving, also after an error, it is as it was.
        anatomy: its anatomy.
        edits: what to change. An empty list changes nothing, to the bit.
        inputs_of: makes inputs of what an edit names as its source.
        prompt: how many tokens count as the prompt; by default what the first pass of a generation holds.

    Raises:
        EditError: if an edit cannot be made, or two contradict each other.
        UnitError, LevelRefusedError: if the model has no such point.
        PositionError: during a run, if a position counted from the end is before the prompt.
    """
    plans = plan(anatomy, edits)
    values = _values(model, plans, inputs_of)
    now = Pass(1, 0, prompt=prompt)
    changes: list[Any] = []
    for i, planned in enumerate(plans):
        for n, piece in enumerate(planned.pieces):
            changes.append(_change(planned.edit, piece, values.get((i, n)), n == 0 or planned.edit.at.kind == "input"))
    begin = _Beginning(now, edits, prompt)
    with ExitStack() as stack:
        experts = [change for change in changes if isinstance(change, ExpertChange)]
        taps = [
            *change_taps([change for change in changes if isinstance(change, Change)], now),
            *head_taps([change for change in changes if isinstance(change, HeadChange)], now),
            *scale_taps([change for change in changes if isinstance(change, ScaleChange)], now),
            *stack.enter_context(expert_taps(model, anatomy, experts, now)),
        ]
        stack.enter_context(tapped(model, taps, begin))
        yield
    begin.warn()


def plan(anatomy: Anatomy, edits: Sequence[Edit]) -> list[Planned]:
    """The pieces of each edit.

    Raises:
        EditError, UnitError, LevelRefusedError: as `edited`.
    """
    pieces = PieceMap(anatomy)
    plans = [Planned(edit, pieces.of(edit.at)) for edit in edits]
    for i, late in enumerate(plans):
        for early in plans[:i]:
            if late.edit.method.sets and _meet(early.edit, late.edit) and _same_place(early, late):
                raise EditError(
                    f"{late.edit.at} is given its value after {early.edit.at} was edited, which would be lost",
                    None,
                    "Give one of the two edits, the other first, or different positions.",
                )
    return plans


def _meet(a: Edit, b: Edit) -> bool:
    """Whether two edits may hold for the same position of the same row."""
    if a.row is not None and b.row is not None and a.row != b.row:
        return False
    if isinstance(a.positions, tuple) and isinstance(b.positions, tuple):
        signs = {place < 0 for place in (*a.positions, *b.positions)}
        return len(signs) > 1 or bool(set(a.positions) & set(b.positions))
    return {a.positions, b.positions} != {"prompt", "generated"}


def _same_place(early: Planned, late: Planned) -> bool:
    """Whether a late edit that sets a value drops what an early one did: at the same place, or in a whole write."""
    if overlapping(early.pieces, late.pieces):
        return True
    a, b = early.edit.at, late.edit.at
    whole = b.kind == "write" and b.unit is not None and b.unit.kind == "sublayer"
    return whole and a.unit is not None and a.unit.sublayer == b.unit and early.edit.at != late.edit.at


class _Beginning:
    """What is done when a forward pass begins: the pass is described, and positions are checked."""

    def __init__(self, now: Pass, edits: Sequence[Edit], prompt: int | None) -> None:
        self.now, self.edits, self.prompt = now, edits, prompt
        self.passes = 0
        self.longest = 0

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise EditError("A model under edits is called with input_ids or inputs_embeds", None)
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        now = self.now
        came = now.offset + now.positions
        now.batch, now.positions = ids.shape[:2]
        now.offset = 0 if cache is None else _length(cache, came)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            now.padding = tuple(int(row.long().argmax()) for row in mask)
        else:
            now.padding = ()
        if now.offset == 0:
            now.prompt = self.prompt if self.prompt is not None else now.positions
        self._check()

    def _check(self) -> None:
        self.passes += 1
        lengths = [(self.now.prompt or 0) - padding for padding in self.now.padding or (0,)]
        self.longest = max(self.longest, self.now.offset + self.now.positions)
        for edit in self.edits:
            if isinstance(edit.positions, tuple) and min(edit.positions, default=0) < -min(lengths):
                raise PositionError(
                    f"Position {min(edit.positions)} is outside the prompt",
                    f"edit of {edit.at}; the prompt has {min(lengths)} tokens",
                )

    def warn(self) -> None:
        """Says which edits named positions that no run had."""
        for edit in self.edits if self.passes else ():
            if isinstance(edit.positions, tuple) and min(edit.positions, default=0) >= self.longest:
                warnings.warn(
                    f"The edit of {edit.at} at {list(edit.positions)} changed nothing: no run had that position",
                    stacklevel=4,
                )


def _length(cache: Any, came: int) -> int:
    """How many positions a cache holds; states that count none hold those that came in this context."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        return came


def _change(edit: Edit, piece: Piece, values: Values, first: bool) -> Any:
    """The change that an edit makes of one piece."""
    if isinstance(piece, Entries):
        new = edit.method.new(edit.at, piece.width, values, first)
        return Change(piece.site, new, edit.positions, piece.entries, edit.row)
    if isinstance(piece, Attending):
        width = 1 if piece.source is not None else 0 if piece.what == "pattern" else piece.core.channels.shape[1]
        if piece.what == "pattern" and not _for_patterns(edit):
            raise EditError(f"A pattern is zeroed, scaled, frozen or knocked out, and nothing else: {edit.at}")
        new = edit.method.new(edit.at, width, values, first)
        return HeadChange(piece.core, piece.head, piece.what, new, edit.positions, edit.row, piece.source)
    if isinstance(piece, Scale):
        if values is None or isinstance(edit.method, methods.Subspace):
            raise EditError(f"The scale of a norm is frozen, and nothing else: {edit.at}", None, "Use Edit.freeze.")
        return ScaleChange(piece, edit.method.new(edit.at, 1, values, first), edit.positions, edit.row)
    if edit.method.source is not None:
        raise LevelRefusedError(
            f"{edit.at} cannot take a value from another run",
            None,
            "routing differs from token to token, so the other run may have none",
            "Zero it, scale it, or add to it.",
        )
    new = edit.method.new(edit.at, 1, values, first)
    return ExpertChange(piece.write, piece.expert, piece.neuron, new, edit.positions, edit.row)


def _for_patterns(edit: Edit) -> bool:
    return isinstance(edit.method, methods.Zero | methods.Scale | methods.Patch | methods.Knockout)


# --- values from other runs ---------------------------------------------------------------------------------


@torch.no_grad()
def _values(
    model: torch.nn.Module, plans: Sequence[Planned], inputs_of: Callable[[Any], Inputs]
) -> dict[tuple[int, int], list[Tensor]]:
    """What each piece has in the source of its edit, by the numbers of both; one run for each source."""
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
    """What is at a point in a run, for each row of its inputs, without padding; writes of one unit are added up.

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
    """Taps that keep what a piece is in a run: for each row [pos, entry], without padding."""
    if isinstance(piece, Attending):
        return head_values(piece.core, {(piece.head, piece.what): kept}, now)
    if isinstance(piece, Expert):
        return []
    site = piece.site if isinstance(piece, Entries) else piece.stream

    def tap(leaves) -> None:
        tensor = leaves[site.slot]
        if isinstance(piece, Scale):
            found = scales(piece, tensor, site, now)
        else:
            found = copied_by_token(tensor, site, now)[1]
            found = found if piece.entries is None else found[..., piece.entries.to(found.device)]
        for row in range(now.batch):
            kept.append(found[row, now.padding[row] if now.padding else 0 :])

    return [(site, tap)]
