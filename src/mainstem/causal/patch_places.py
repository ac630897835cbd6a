"""Where each unit of a model can be patched: sites, and which entries of what is there are whose.

A sublayer or an embedding is its whole write. A head is its entries of what W_O reads, an attention neuron one of
them, an FFN neuron one entry of what the output matrix reads. Where attention is fused, queries, keys and values are
places, too; keys and values that several heads share are listed under the first of those heads.

Limits: neurons of routed experts have no entry of their own, because routing differs from token to token; attention
and W_O as one operation has no place for its heads. Their sublayers have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.analysis.parts import UnitGrid
from mainstem.errors import ChoiceError
from mainstem.model.anatomy import Anatomy, AttentionCore, Write
from mainstem.model.hooks import Site
from mainstem.model.layouts import by_token
from mainstem.model.views import heads_first, query_rows
from mainstem.units import Unit

PlaceKind = Literal[
    "embedding",
    "sublayer",
    "head",
    "attention_neuron",
    "ffn_neuron",
    "expert_neuron",
    "query",
    "key",
    "value",
]
PLACE_KINDS: tuple[PlaceKind, ...] = get_args(PlaceKind)
"""Kinds of places; expert neurons are those of shared experts."""


@dataclass(frozen=True, eq=False)
class Place:
    """Units that are entries of what is at a site.

    Attributes:
        kind: what they are.
        units: their addresses.
        sites: where they are; several where a sublayer writes several times, such as by shared and routed experts.
        entries: for each unit its entries of the last axis; None: one unit is all of it.
        core: the attention whose argument is at the site, for queries, keys and values.
        heads: how many distinct heads that argument has.
    """

    kind: PlaceKind
    units: Sequence[Unit]
    sites: tuple[Site, ...]
    entries: Int[Tensor, "unit entry"] | None = None
    core: AttentionCore | None = None
    heads: int = 0

    def rows(self, tensor: Tensor, site: Site, runs: int, positions: int) -> Tensor:
        """What is at one of the sites (or anything of its shape) as [run, pos, unit, entry]."""
        if self.core is not None:
            arrange = query_rows if self.kind == "query" else heads_first
            found = arrange(tensor, self.core.layouts[self.kind], self.core.sizes, runs).transpose(1, 2)
            return found.unflatten(2, (self.heads, -1)).flatten(3)  # copies of one head are patched together
        found = by_token(tensor, site, runs, positions)
        return found[:, :, None] if self.entries is None else found[..., self.entries.to(found.device)]


def patch_places(anatomy: Anatomy, kinds: Iterable[str]) -> list[Place]:
    """The places of the units of some kinds, in the order in which the anatomy has its writes.

    Raises:
        ChoiceError: if there is no such kind of place.
    """
    wanted = list(kinds)
    for kind in wanted:
        if kind not in PLACE_KINDS:
            raise ChoiceError("kind", kind, PLACE_KINDS)
    return [place for place in _all_places(anatomy) if place.kind in wanted and not _is_joint(place)]


def _all_places(anatomy: Anatomy) -> list[Place]:
    found: dict[tuple[str, Unit], Place] = {}
    for write in anatomy.writes:
        for place in _places(write):
            key = place.kind, place.units[0]
            known = found.get(key, place)
            found[key] = replace(known, sites=tuple(dict.fromkeys([*known.sites, *place.sites])))
    return list(found.values())


def _is_joint(place: Place) -> bool:
    """Whether parts of a sublayer are read by several matrices, whose gradients at them cannot be told apart."""
    return len(place.sites) > 1 and place.kind not in ("embedding", "sublayer")


def without_places(anatomy: Anatomy, kinds: Iterable[str]) -> dict[Unit, str]:
    """The sublayers whose units of some of the kinds have no place, and why."""
    wanted = set(kinds)
    heads = wanted & {"head", "attention_neuron"}
    operands = wanted & {"query", "key", "value"}
    found: dict[Unit, str] = {}
    for write in anatomy.writes:
        core = write.attention
        if write.experts is not None and wanted & {"ffn_neuron", "expert_neuron"}:
            found[write.unit] = "its experts are chosen token by token"
        elif core is not None and write.source is None and heads:
            found[write.unit] = "attention and its output matrix are one operation"
        elif core is not None and not core.fused and operands:
            found[write.unit] = "its attention is not fused, so that query and key are not seen"
        elif (
            core is None
            and write.unit.place == "attn"
            and wanted & {"head", "attention_neuron", "query", "key", "value"}
        ):
            found[write.unit] = write.refusals.get("heads", "it is not split into heads")
    for place in _all_places(anatomy):
        if place.kind in wanted and _is_joint(place):
            found[place.units[0].sublayer] = "several matrices read them, such as an adapter's: merge it first"
    return found


def _places(write: Write) -> list[Place]:
    unit = write.unit
    found = [Place("embedding" if unit.kind == "embedding" else "sublayer", [unit], (write.site,))]
    if write.attention is not None:
        found += _attention_places(write, write.attention)
    elif write.neurons and write.source is not None and write.projection is not None:
        found.append(_neurons(write, write.source, write.projection.n_in))
    return found


def _neurons(write: Write, source: Site, count: int) -> Place:
    layer, nth, expert, first = write.unit.layer, write.unit.nth, write.shared_expert, write.first_neuron
    assert layer is not None
    entries = torch.arange(count)[:, None]
    if expert is None:
        units = UnitGrid(count, lambda i: Unit.ffn_neuron(layer, first + i, nth=nth))
        return Place("ffn_neuron", units, (source,), entries)
    units = UnitGrid(count, lambda i: Unit.shared_neuron(layer, expert, i, nth=nth))
    return Place("expert_neuron", units, (source,), entries)


def _attention_places(write: Write, core: AttentionCore) -> list[Place]:
    layer, nth = write.unit.layer, write.unit.nth
    assert layer is not None
    found = []
    n_heads, width = core.channels.shape
    if write.source is not None:
        heads = [Unit.head(layer, head, nth=nth) for head in range(n_heads)]
        found.append(Place("head", heads, (write.source,), core.channels))
        grid = UnitGrid(n_heads * width, lambda i: Unit.attention_neuron(layer, i // width, i % width, nth=nth))
        found.append(Place("attention_neuron", grid, (write.source,), core.channels.reshape(-1, 1)))
    if core.fused:
        counts: dict[PlaceKind, int] = {"query": n_heads, "key": core.n_keys, "value": core.n_key_value_heads}
        for kind, count in counts.items():
            units = [Unit.head(layer, head * n_heads // count, nth=nth) for head in range(count)]
            found.append(Place(kind, units, (core.argument_site(kind),), core=core, heads=count))
    return found
