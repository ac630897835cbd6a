"""Attention knockout: which source positions the answer is read from, and in which layers.

For each layer all heads in a window of layers around it cannot attend from the destination to a set of source
positions; the others share the weight, as a softmax without those sources would give it. The fall of the answer's
probability says that the information passes there then (Geva et al. 2023, "Dissecting recall of factual associations",
section 4; there windows of 9 layers of 48 and 28). One row of a batch for each set and layer.

Windows overlap, so neighbouring layers' changes do not add up. Other positions may still carry what was knocked out to
the destination: they are sets of their own to ask for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mainstem.causal.edit_methods import Knockout
from mainstem.causal.edited_rows import EditedRows, Row
from mainstem.causal.head_changes import HeadChange
from mainstem.causal.pieces import Attending, PieceMap
from mainstem.errors import LevelRefusedError, PositionError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.points import Point
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number


@dataclass(frozen=True, eq=False)
class Knockouts:
    """The answer's log-probability without attention to some sources, layer by layer.

    Attributes:
        sources: the name of each set of source positions.
        layers: the layers that have heads; one window around each.
        window: how many layers at most a window has.
        log_probabilities: of the answer, in nats.
        plain: the same without a knockout.
        answer: its text.
        position: the destination, counted from 0.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    sources: tuple[str, ...]
    layers: tuple[int, ...]
    window: int
    log_probabilities: Float[Tensor, "row layer"]
    plain: float
    answer: str
    position: int
    provenance: Any = None

    @property
    def changes(self) -> Float[Tensor, "row layer"]:
        """The relative change of the answer's probability: -1 where nothing of it is left."""
        return (self.log_probabilities - self.plain).expm1()


def windows(layers: Sequence[int], width: int) -> list[list[int]]:
    """For each layer those within a window around it, cut at both ends; an even window has one more after it.

    Raises:
        UsageError: if a window holds nothing.
    """
    width = whole_number("window", width)
    if width < 1:
        raise UsageError(f"A window of {width} layers holds nothing", None, "Give 1 or more.")
    return [[near for near in layers if layer - (width - 1) // 2 <= near <= layer + width // 2] for layer in layers]


def knock_out(
    rows: EditedRows, answer: Sequence[int], sources: Mapping[str, Sequence[int]], window: int, text: str = ""
) -> Knockouts:
    """Knocks each set of sources out in a window around each layer.

    Args:
        rows: makes runs of the prompt.
        answer: ids of the answer; their probabilities add up.
        sources: positions that cannot be attended to, from 0, by name.
        window: how many layers a window has.
        text: of the answer.

    Raises:
        UsageError: if a window or a set holds nothing.
        PositionError: if a source is outside the prompt, or after the destination of a causal model.
        LevelRefusedError: if no layer has heads, or a head's pattern cannot be changed.
    """
    heads = _heads(rows.anatomy)
    _check(rows, sources)
    layers, around = list(heads), windows(list(heads), window)
    runs = []
    for own in sources.values():
        at = tuple(own)
        runs += [Row(changes=[_change(piece, at, rows) for layer in near for piece in heads[layer]]) for near in around]
    made = rows.logits(runs).double().log_softmax(-1)[:, list(answer)].logsumexp(-1)
    plain = rows.clean.double().log_softmax(-1)[list(answer)].logsumexp(-1)
    shaped = made.reshape(len(sources), len(layers)).cpu()
    return Knockouts(tuple(sources), tuple(layers), window, shaped, float(plain), text, rows.position)


def _heads(anatomy: Anatomy) -> dict[int, list[Attending]]:
    """All heads, by layer."""
    pieces, found = PieceMap(anatomy), dict[int, list[Attending]]()
    for unit in anatomy.sublayers():
        core = anatomy.writes[anatomy.writes_of(unit)[0]].attention
        if core is None or unit.layer is None:
            continue
        for head in range(core.n_heads):
            piece = pieces.of(Point("pattern", Unit.head(unit.layer, head, unit.nth)))[0]
            assert isinstance(piece, Attending)
            found.setdefault(unit.layer, []).append(piece)
    if not found:
        raise LevelRefusedError("No attention to knock out", reason="no layer of this model has heads that are seen")
    return found


def _change(piece: Attending, sources: tuple[int, ...], rows: EditedRows) -> HeadChange:
    new = Knockout(sources).rows(sinks=not piece.core.fused)
    return HeadChange(piece.core, piece.head, "pattern", new, (rows.position,))


def _check(rows: EditedRows, sources: Mapping[str, Sequence[int]]) -> None:
    last = rows.position if rows.anatomy.causal else len(rows.ids) - 1
    if not sources:
        raise UsageError("A knockout needs source positions", None, "Name one set or more.")
    for name, own in sources.items():
        if not own:
            raise UsageError("A knockout needs source positions", f"the set {name!r}", "Name one or more.")
        if outside := [place for place in own if not 0 <= place <= last]:
            raise PositionError(
                f"Source {outside[0]} is not attended to from position {rows.position}",
                f"the set {name!r}",
                f"Sources go from 0 to {last}.",
            )
