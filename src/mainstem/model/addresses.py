"""Addresses of writes: blocks in the order of execution, sublayers in each, and embeddings by what they depend on."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mainstem.model.experts import ExpertSum
from mainstem.model.paths import Path
from mainstem.model.recording import Call, Frame, Value
from mainstem.units import Unit

Kind = Literal["embed", "attn", "mlp", "mixer"]


@dataclass
class Draft:
    """What is known of one write before it has an address."""

    value: Value
    path: Path
    kind: Kind
    inputs: list[Value]
    experts: ExpertSum | None
    cores: list[Call] = field(default_factory=list)


def _block_frame(leaf: Value) -> Frame | None:
    """The outermost module call that is an entry of a list of modules."""
    frame = leaf.call.frame if leaf.call is not None else None
    if frame is None:
        return None
    numbered = [f for f in frame.stack() if f.path.rpartition(".")[2].isdigit()]
    return numbered[-1] if numbered else None


def blocks_in_order(drafts: list[Draft]) -> list[tuple[str, int, list[int]]]:
    """Blocks as (path, call, writes): calls of the entries of a list of modules, or, without one, by what repeats."""
    blocks: dict[tuple[str, int], list[int]] = {}
    for i, draft in enumerate(drafts):
        frame = _block_frame(draft.value)
        if frame is not None:
            blocks.setdefault((frame.path, frame.call), []).append(i)
    inside = [i for i, draft in enumerate(drafts) if draft.kind != "embed"]
    if blocks or not inside:
        return [(path, call, found) for (path, call), found in blocks.items()]
    repeated: list[list[int]] = []
    kinds: dict[str, tuple] = {}
    for i in inside:  # a block ends where a kind of sublayer comes again, reading another value
        key = tuple(value.id for value in drafts[i].inputs)
        if not repeated or kinds.get(drafts[i].kind, key) != key:
            repeated.append([])
            kinds = {}
        repeated[-1].append(i)
        kinds[drafts[i].kind] = key
    frames = [drafts[found[0]].value.call for found in repeated]
    paths = [call.frame.path if call is not None and call.frame is not None else "" for call in frames]
    return [(path, 0, found) for path, found in zip(paths, repeated, strict=True)]


def addresses(drafts: list[Draft], layer_of: dict[int, int]) -> list[Unit]:
    """Addresses: per block one for each attention product, and one for each set of stream values read by others.

    A write between blocks counts with the block before it.
    """
    units: list[Unit] = []
    places: dict[tuple[int, str], list[Any]] = {}
    layer = 0
    for i, draft in enumerate(drafts):
        if draft.kind == "embed":
            units.append(_embedding_unit(draft.value, units))
            continue
        layer = layer_of.get(i, layer)
        key = id(draft.path.core) if draft.path.core is not None else tuple(v.id for v in draft.inputs)
        keys = places.setdefault((layer, draft.kind), [])
        if key not in keys:
            keys.append(key)
        units.append(Unit.write(layer, draft.kind, nth=keys.index(key) + 1))
    return units


def _embedding_unit(leaf: Value, units: list[Unit]) -> Unit:
    """embed for what depends on the tokens, embed.pos for what differs by position alone, embed.type for the rest."""
    rows = leaf.tensor.reshape(-1, leaf.shape[-1])
    if torch.equal(rows, rows[:1].expand_as(rows)):
        which = "type"
    else:
        which = "pos" if not leaf.active or _counts_positions(leaf) else None
    place = Unit.embedding(which).place
    return Unit.embedding(which, nth=1 + sum(1 for unit in units if unit.place == place))


def _counts_positions(leaf: Value) -> bool:
    """Whether a table is looked up by numbers that count one by one, which some models compute from the tokens."""
    index = (
        [o for o in leaf.call.active_operands() if not o.tensor.is_floating_point()] if leaf.call is not None else []
    )
    return bool(index) and bool((index[0].tensor.flatten().diff() == 1).all())
