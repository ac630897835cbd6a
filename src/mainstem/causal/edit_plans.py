"""Edits on their way to a run: the pieces that each changes, and whether one would be lost in another.

Where edits meet at one place they are made in the order in which they are given. Across places the order is that of the
forward pass: a head's query comes before its pattern, that before what the head writes, and that before the sublayer's
write. An edit that is lost is refused: where a later edit of the same place, or any edit downstream that leaves nothing
of it, says what the value is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.causal import edits as methods
from mainstem.causal.changes import Change
from mainstem.causal.edit_methods import Values
from mainstem.causal.edits import Edit
from mainstem.causal.expert_changes import ExpertChange
from mainstem.causal.head_changes import HeadChange
from mainstem.causal.pieces import Attending, Entries, Piece, PieceMap, Scale, overlapping
from mainstem.causal.scale_changes import ScaleChange
from mainstem.errors import EditError, LevelRefusedError
from mainstem.model.anatomy import Anatomy

AnyChange = Change | HeadChange | ScaleChange | ExpertChange


@dataclass(frozen=True, eq=False)
class Planned:
    """An edit, and the pieces that it changes."""

    edit: Edit
    pieces: list[Piece]


def plan(anatomy: Anatomy, edits: Sequence[Edit], before: Sequence[Planned] = ()) -> list[Planned]:
    """The pieces of each edit.

    Args:
        anatomy: the model's.
        edits: in their order.
        before: edits that hold already, and come first.

    Raises:
        EditError: if an edit cannot be made, or would be lost.
        UnitError, LevelRefusedError: if the model has no such point.
    """
    pieces, plans = PieceMap(anatomy), list(before)
    for edit in edits:
        if not isinstance(edit, Edit):
            raise EditError(f"{edit!r} is no edit", None, "Make one with a class method, such as Edit.zero('L5.mlp').")
        own = pieces.of(edit.at)
        once = isinstance(edit.method, methods.Add) and edit.at.kind != "input"  # each matrix receives its own copy
        late = Planned(edit, own[:1] if once else own)
        for early in plans:
            _require_kept(early, late)
        plans.append(late)
    return plans[len(before) :]


def _require_kept(early: Planned, late: Planned) -> None:
    a, b = early.edit, late.edit
    if not _meet(a, b):
        return
    here = overlapping(early.pieces, late.pieces)
    for lost, kept in ((a, b), (b, a)):
        if kept.method.sets and ((here and kept is b) or _covers(kept, lost)):
            raise EditError(
                f"The edit of {lost.at} would be lost, because the value of {kept.at} is given",
                None,
                "Give one of the two edits, the other first if both are of one place, or different positions.",
            )
    if here and isinstance(b.method, methods.Knockout) and isinstance(a.method, methods.Scale | methods.Zero):
        raise EditError(
            f"{a.at} is edited before sources are knocked out, so that its weights have no sum to share",
            None,
            "Give the knockout first.",
        )


def _meet(a: Edit, b: Edit) -> bool:
    """Whether two edits may hold for the same position of the same row."""
    if a.row is not None and b.row is not None and a.row != b.row:
        return False
    if (a.at.kind in ("key", "value")) != (b.at.kind in ("key", "value")):
        return True  # sources and destinations
    if isinstance(a.positions, tuple) and isinstance(b.positions, tuple):
        signs = {place < 0 for place in (*a.positions, *b.positions)}
        return len(signs) > 1 or bool(set(a.positions) & set(b.positions))
    return {a.positions, b.positions} != {"prompt", "generated"}


def _covers(down: Edit, up: Edit) -> bool:
    """Whether what is edited at `up` reaches the rest of the model through `down` alone."""
    if down.at.unit is None or up.at.unit is None or down.at == up.at:
        return False
    if down.positions is not None and up.at.kind in ("key", "value", "input"):
        return False  # later destinations attend to these positions
    unit, other = down.at.unit, up.at.unit
    if down.at.kind == "write" and unit.kind == "sublayer":
        return other.sublayer == unit
    if other.sublayer != unit.sublayer or other.head_index is None or other.head_index != unit.head_index:
        return False
    if down.at.kind == "write" and unit.kind == "head":
        return up.at.kind in ("query", "key", "value", "pattern") or other.source is not None
    return down.at.kind == "pattern" and up.at.kind in ("query", "key")


def change_of(edit: Edit, piece: Piece, values: Values) -> AnyChange:
    """The change that an edit makes of one piece.

    Raises:
        EditError, LevelRefusedError: if it cannot be made there.
    """
    method = edit.method
    if isinstance(method, methods.Knockout) and not isinstance(piece, Attending):
        raise EditError(f"Only sources of a pattern are knocked out, not {edit.at}", None, "Use Edit.knockout.")
    if isinstance(piece, Entries):
        new = method.new(edit.at, piece.width, values)
        return Change(piece.site, new, edit.positions, piece.entries, edit.row)
    if isinstance(piece, Attending):
        return _head_change(edit, piece, values)
    if isinstance(piece, Scale):
        if not isinstance(method, methods.Patch):
            raise EditError(f"The scale of a norm is frozen, and nothing else: {edit.at}", None, "Use Edit.freeze.")
        return ScaleChange(piece, method.new(edit.at, 1, values), edit.positions, edit.row)
    if method.source is not None:
        raise LevelRefusedError(
            f"{edit.at} cannot take a value from another run",
            None,
            "routing differs from token to token, so the other run may have none",
            "Zero it, scale it, or add to it.",
        )
    new = method.new(edit.at, 1, values)
    return ExpertChange(piece.write, piece.expert, piece.neuron, new, edit.positions, edit.row)


def _head_change(edit: Edit, piece: Attending, values: Values) -> HeadChange:
    method = edit.method
    if piece.what != "pattern":
        new = method.new(edit.at, piece.core.channels.shape[1], values)
    elif isinstance(method, methods.Knockout):
        new = method.rows(sinks=not piece.core.fused)
    elif isinstance(method, methods.Zero | methods.Scale | methods.Patch):
        new = method.new(edit.at, 1, values)
    else:
        raise EditError(f"A pattern is zeroed, scaled, frozen or knocked out, and nothing else: {edit.at}")
    return HeadChange(piece.core, piece.head, piece.what, new, edit.positions, edit.row, piece.source)
