"""Units to zero for the labels certificate: where each acts, how to zero it there, and what its write should lose.

A head or one coordinate of it is zeroed in attention's result, a source in attention's values, a neuron in what the
output matrix reads. A unit that hardly writes is no evidence: each probe is the strongest of a few draws, and where
none would show a wrong label nothing is counted as checked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.analysis.certificate import SAFETY
from mainstem.analysis.decompose import product_bound
from mainstem.model.anatomy import AttentionCore, Write
from mainstem.model.hooks import Site
from mainstem.model.views import heads_first, result_rows
from mainstem.run.moment import HeadRun, Moment, channel_factors
from mainstem.units import Unit

CANDIDATES = 6
ROUNDS = 4


@dataclass(frozen=True, eq=False)
class Probe:
    """One unit to zero: what to do in its row of the batch, and how the write should change ([d_model] float64).

    `part` is what a decomposition should have under the unit's address.
    """

    unit: Unit
    writes: tuple[int, ...]
    site: Site
    edit: Callable[[Tensor, int, int], Tensor]
    expected: Tensor
    bound: float
    part: Tensor


def draw_probes(before: Moment, per_level: int, generator: torch.Generator) -> list[Probe]:
    """`per_level` random heads, coordinates, sources and neurons; fewer where none of the draws writes enough."""
    anatomy = before.anatomy
    cores = {w.attention.site: w.attention for w in anatomy.writes if w.attention is not None}
    neurons: dict[Site, list[int]] = {}
    for i, write in enumerate(anatomy.writes):
        if write.neurons and write.source is not None:
            neurons.setdefault(write.source, []).append(i)
    makers: list[Callable[[], Probe]] = []
    for make in (_head_probe, _coordinate_probe, _source_probe):
        makers += [
            lambda make=make, core=core: make(before, core, generator)
            for core in choose(list(cores.values()), per_level, generator)
        ]
    makers += [
        lambda site=site: _neuron_probe(before, site, neurons[site], generator)
        for site in choose(list(neurons), per_level, generator)
    ]
    drawn = [_strongest(maker) for maker in makers]
    return [probe for probe in drawn if probe is not None]


def _strongest(draw: Callable[[], Probe]) -> Probe | None:
    """The strongest of a few draws, of more if those hardly write; None if a wrong label would not show in any."""
    for _ in range(ROUNDS):
        best = max((draw() for _ in range(CANDIDATES)), key=lambda probe: float(probe.expected.norm()))
        if float(best.expected.norm()) > 2 * SAFETY * best.bound:
            return best
    return None


def choose(items: list, count: int, generator: torch.Generator) -> list:
    """`count` items in random order, again from the first where there are fewer."""
    if not items:
        return []
    order = torch.randperm(len(items), generator=generator).tolist()
    return [items[order[i % len(order)]] for i in range(count)]


def _random(size: int, generator: torch.Generator) -> int:
    return int(torch.randint(size, (1,), generator=generator))


def _part(before: Moment, core: AttentionCore, removed: Tensor) -> Tensor:
    """What a piece of attention's result [n_heads, d_value] writes, factors on the way as they are in the run."""
    heads = before.attention[core.site]
    z = torch.zeros(core.channels.numel(), dtype=torch.float64, device=removed.device)
    z[core.channels.to(removed.device).reshape(-1)] = removed.double().reshape(-1)
    total = torch.zeros_like(before.stream, dtype=torch.float64)
    for write in before.anatomy.writes:
        if write.attention is not None and write.attention.site == core.site and write.projection is not None:
            total = total + write.projection.columns(slice(None)).double() @ (z * heads.multiplier)
    return total


def _attention_change(before: Moment, core: AttentionCore, changed: Tensor) -> tuple[tuple[int, ...], Tensor, float]:
    """What the core's writes should change by when attention's result becomes `changed` [n_heads, d_value]."""
    heads: HeadRun = before.attention[core.site]
    channels = core.channels.to(changed.device)
    indices = tuple(
        i for i, w in enumerate(before.anatomy.writes) if w.attention is not None and w.attention.site == core.site
    )

    def entering(result: Tensor) -> Tensor:
        z = torch.zeros(channels.numel(), dtype=torch.float64, device=result.device)
        z[channels.reshape(-1)] = result.reshape(-1)
        return z * channel_factors(core, heads.gates, result)

    old, new = entering(heads.result()), entering(changed)
    expected, bound = torch.zeros_like(before.stream, dtype=torch.float64), 0.0
    for i in indices:
        write = before.anatomy.writes[i]
        assert write.projection is not None
        matrix = write.projection.columns(slice(None))
        expected = expected + matrix.double() @ (new - old)
        extra = 2 * (old.abs() + new.abs()) * (float(heads.uncertainty.max()) + torch.finfo(write.dtype).eps)
        bound += 2 * float(product_bound(matrix, old.abs() + new.abs(), write.dtype, extra).norm())
    return indices, expected, bound


def _zero_at(arrange: Callable[[Tensor, int], Tensor], select) -> Callable[[Tensor, int, int], Tensor]:
    """An edit that zeroes what `select(arranged, row)` picks, whatever the tensor's own layout."""

    def edit(tensor: Tensor, row: int, batch: int) -> Tensor:
        index = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        out = tensor.clone(memory_format=torch.contiguous_format)
        out.view(-1)[select(arrange(index, batch), row).reshape(-1)] = 0
        return out

    return edit


def _result_edit(core: AttentionCore, head: int, place: int, coordinate: int | slice):
    """The site and the edit that zero a head's result, or one coordinate of it, at a destination.

    Where the result is seen nowhere the head's values are zeroed at all sources, which does the same at the last
    destination.
    """
    if "result" in core.layouts:

        def result(index: Tensor, batch: int) -> Tensor:
            return result_rows(index, core.layouts["result"], core.sizes, batch)

        return core.result_site, _zero_at(result, lambda rows, row: rows[row, head, place, coordinate])

    def values(index: Tensor, batch: int) -> Tensor:
        return heads_first(index, core.layouts["value"], core.sizes, batch)

    return core.argument_site("value"), _zero_at(values, lambda rows, row: rows[row, head, :, coordinate])


def _head_probe(before: Moment, core: AttentionCore, generator: torch.Generator) -> Probe:
    head = _random(core.n_heads, generator)
    changed = before.attention[core.site].result().clone()
    changed[head] = 0
    writes, expected, bound = _attention_change(before, core, changed)
    site, edit = _result_edit(core, head, before.position, slice(None))
    unit = before.anatomy.writes[writes[0]].unit
    address = Unit.head(unit.layer or 0, head, nth=unit.nth)
    part = _part(before, core, before.attention[core.site].result() - changed)
    return Probe(address, writes, site, edit, expected, bound, part)


def _coordinate_probe(before: Moment, core: AttentionCore, generator: torch.Generator) -> Probe:
    head, coordinate = _random(core.n_heads, generator), _random(core.channels.shape[1], generator)
    changed = before.attention[core.site].result().clone()
    changed[head, coordinate] = 0
    writes, expected, bound = _attention_change(before, core, changed)
    site, edit = _result_edit(core, head, before.position, coordinate)
    unit = before.anatomy.writes[writes[0]].unit
    address = Unit.attention_neuron(unit.layer or 0, head, coordinate, nth=unit.nth)
    part = _part(before, core, before.attention[core.site].result() - changed)
    return Probe(address, writes, site, edit, expected, bound, part)


def _source_probe(before: Moment, core: AttentionCore, generator: torch.Generator) -> Probe:
    """A source's value zeroed: for one head where the call has a value for each, else for all that share it."""
    heads = before.attention[core.site]
    head, source = _random(core.n_heads, generator), _random(heads.pattern.shape[1], generator)
    group, own = heads.group(), not core.fused and core.value_groups * heads.value.shape[0] == core.n_heads
    shared = [head] if own else [h for h in range(core.n_heads) if int(group[h]) == int(group[head])]
    changed = heads.result().clone()
    for h in shared:
        changed[h] -= heads.pattern[h, source] * heads.value[group[h], source].double()
    writes, expected, bound = _attention_change(before, core, changed)

    def arrange(index: Tensor, batch: int) -> Tensor:
        return heads_first(index, core.layouts["value"], core.sizes, batch)

    def select(arranged: Tensor, row: int) -> Tensor:
        copies = arranged.shape[1]  # of all the value heads together
        places = sorted({h * copies // core.n_heads for h in shared})
        return arranged[row, places, source]

    unit = before.anatomy.writes[writes[0]].unit
    address = Unit.subvalue(unit.layer or 0, head, source, nth=unit.nth)
    own_piece = torch.zeros_like(changed)
    own_piece[head] = heads.pattern[head, source] * heads.value[group[head], source].double()
    edit, part = _zero_at(arrange, select), _part(before, core, own_piece)
    return Probe(address, writes, core.argument_site("value"), edit, expected, bound, part)


def _neuron_probe(before: Moment, site: Site, indices: list[int], generator: torch.Generator) -> Probe:
    activations = before.sources[indices[0]]
    neuron, place = _random(len(activations), generator), before.position
    expected, bound = torch.zeros_like(before.stream, dtype=torch.float64), 0.0
    for i in indices:
        write = before.anatomy.writes[i]
        assert write.projection is not None
        expected = expected - activations[neuron].double() * write.projection.columns(slice(None))[:, neuron].double()
        bound += 2 * float(product_bound(write.projection.columns(slice(None)), activations, write.dtype).norm())

    def arrange(index: Tensor, batch: int) -> Tensor:
        first = site.positions_first and index.shape[:2] == (before.n_sources, batch)
        ordered = index.transpose(0, 1) if first else index
        return ordered.reshape(batch, -1, len(activations))

    edit = _zero_at(arrange, lambda arranged, row: arranged[row, place, neuron])
    write = before.anatomy.writes[indices[0]]
    layer, nth = write.unit.layer or 0, write.unit.nth
    if write.shared_expert is None:
        address = Unit.ffn_neuron(layer, write.first_neuron + neuron, nth=nth)
    else:
        address = Unit.shared_neuron(layer, write.shared_expert, neuron, nth=nth)
    part = _neuron_part(before, write, neuron)
    return Probe(address, tuple(indices), site, edit, expected, bound, part)


def _neuron_part(before: Moment, like: Write, neuron: int) -> Tensor:
    """What a neuron writes through its matrix and through adapters beside it, which may read it elsewhere."""
    total = torch.zeros_like(before.stream, dtype=torch.float64)
    for i, write in enumerate(before.anatomy.writes):
        same = write.unit == like.unit and write.shared_expert == like.shared_expert
        if same and write.neurons and write.first_neuron == like.first_neuron and write.projection is not None:
            column = write.projection.columns(slice(None))[:, neuron].double()
            total = total + before.sources[i][neuron].double() * column
    return total
