"""The labels certificate: a unit is zeroed in a real run, and its write must change by minus its part.

A sum is blind to labels: permuted heads, a wrong head-to-group map or shifted sources still add up. So for some random
units of each level the model itself is run with the unit zeroed where it acts: a head or one coordinate of it in
attention's result, a source in attention's values, a neuron in what the output matrix reads. All edits go as rows of
one batch, beside a row without any; each row's change is compared at the edited sublayer, before it spreads. Experts'
neurons are zeroed inside the recorded operations of their module. Names are held against evidence in `names`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mainstem.analysis.certificate import SAFETY, Check, summary
from mainstem.analysis.decompose import Decomposition, decompose, product_bound
from mainstem.causal.names import expert_of, name_results, part_by_address
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, AttentionCore, Write
from mainstem.model.experts import find_sum, zeroed_change
from mainstem.model.hooks import Site, Tap
from mainstem.model.recorder import recorded_call
from mainstem.model.views import heads_first, result_rows
from mainstem.run.capture import Captured, capture
from mainstem.run.moment import HeadRun, Moment, channel_factors, moment
from mainstem.units import Unit

CANDIDATES = 6
ROUNDINGS = 64


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


@torch.no_grad()
def check_labels(
    model: torch.nn.Module,
    anatomy: Anatomy,
    input_ids: Tensor,
    per_level: int = 3,
    seed: int = 0,
    **forward,
) -> Check:
    """Zeroes `per_level` random units of each level and compares the changes of their writes with their parts.

    Args:
        model: the module.
        anatomy: its anatomy.
        input_ids: [1, pos] a prompt.
        per_level: how many heads, subvalues, attention neurons, neurons and experts' neurons to check.
        seed: which.
        forward: further arguments of the forward call.
    """
    generator = torch.Generator().manual_seed(seed)
    last = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device)
    alone = capture(model, anatomy, input_ids, last, **forward)
    before = moment(anatomy, alone, 0, 0, 0)
    probes = _probes(before, per_level, generator)
    zeroed = _run_probes(model, before, alone, input_ids, probes, **forward)
    zeroed += _expert_results(model, before, input_ids, per_level, generator, **forward)
    named = _address_results(before, probes) + name_results(model, anatomy, input_ids, alone, **forward)
    found = summary([(str(unit), error, bound) for unit, error, bound in zeroed])
    wrong = summary(named)
    return found if wrong.holds else replace(found, holds=False, where=found.where or wrong.where)


def _address_results(before: Moment, probes: list[Probe]) -> list[tuple[str, float, float]]:
    """The parts that decompositions have under the probes' addresses against what the probes take away."""
    results = []
    levels = {"head": "heads", "attention_neuron": "attention_neurons"}
    made: dict[str, Decomposition | None] = {}
    for probe in probes:
        level = levels.get(probe.unit.kind, "units")
        if level not in made:
            try:
                made[level] = decompose(before, level)  # type: ignore[arg-type]
            except LevelRefusedError:
                made[level] = None
        decomposition = made[level]
        if decomposition is None:
            continue
        found = part_by_address(decomposition, probe.unit)
        error = float("inf") if found is None else float((found - probe.part).norm())
        scale = max(float(probe.part.norm()), SAFETY * probe.bound, 1e-300)
        results.append((f"the address {probe.unit}", error / scale, SAFETY * probe.bound / scale))
    return results


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


def _probes(before: Moment, per_level: int, generator: torch.Generator) -> list[Probe]:
    anatomy = before.anatomy
    cores = {w.attention.site: w.attention for w in anatomy.writes if w.attention is not None}
    neurons: dict[Site, list[int]] = {}
    for i, write in enumerate(anatomy.writes):
        if write.neurons and write.source is not None:
            neurons.setdefault(write.source, []).append(i)
    probes: list[Probe] = []
    for make in (_head_probe, _coordinate_probe, _source_probe):
        for core in _choose(list(cores.values()), per_level, generator):
            made = [make(before, core, generator) for _ in range(CANDIDATES)]
            probes.append(max(made, key=lambda probe: float(probe.expected.norm())))
    for site in _choose(list(neurons), per_level, generator):
        made = [_neuron_probe(before, site, neurons[site], generator) for _ in range(CANDIDATES)]
        probes.append(max(made, key=lambda probe: float(probe.expected.norm())))
    return probes


def _choose(items: list, count: int, generator: torch.Generator) -> list:
    if not items:
        return []
    order = torch.randperm(len(items), generator=generator).tolist()
    return [items[order[i % len(order)]] for i in range(count)]


def _random(size: int, generator: torch.Generator) -> int:
    return int(torch.randint(size, (1,), generator=generator))


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


def _result_site(core: AttentionCore) -> Site:
    site = core.site
    return Site(site.path, site.call, "result", 0, site.function, site.ordinal)


def _result_edit(core: AttentionCore, head: int, place: int, coordinate: int | slice):
    """The site and the edit that zero a head's result, or one coordinate of it, at a destination.

    Where the result is seen nowhere the head's values are zeroed at all sources, which does the same at the last
    destination.
    """
    if "result" in core.layouts:

        def result(index: Tensor, batch: int) -> Tensor:
            return result_rows(index, core.layouts["result"], core.sizes, batch)

        return _result_site(core), _zero_at(result, lambda rows, row: rows[row, head, place, coordinate])

    def values(index: Tensor, batch: int) -> Tensor:
        return heads_first(index, core.layouts["value"], core.sizes, batch)

    return _value_site(core), _zero_at(values, lambda rows, row: rows[row, head, :, coordinate])


def _value_site(core: AttentionCore) -> Site:
    site = core.site
    return Site(site.path, site.call, "arguments", core.slots["value"], site.function, site.ordinal)


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
    return Probe(address, writes, _value_site(core), edit, expected, bound, part)


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


def _run_probes(
    model: torch.nn.Module, before: Moment, alone: Captured, input_ids: Tensor, probes: list[Probe], **forward
) -> list[tuple[Unit, float, float]]:
    """One batch: row 0 as it is, then a row for each probe; (unit, relative error, bound) for each.

    Where a row of a batch gets something else than it gets alone, each probe has a run of its own.
    """
    if not probes:
        return []
    anatomy, batch = before.anatomy, 1 + len(probes)
    ids = input_ids.expand(batch, -1).contiguous()
    last = torch.full((batch, 1), input_ids.shape[1] - 1, device=input_ids.device)
    edits: list[tuple[Site, Tap]] = [
        (probe.site, _edit_tap(probe, row, batch)) for row, probe in enumerate(probes, start=1)
    ]
    run: Captured = capture(model, anatomy, ids, last, edits=edits, **forward)
    out = []
    for row, probe in enumerate(probes, start=1):
        if _alike(alone, run, row, min(probe.writes)):
            new = [run.writes[i][row, -1] for i in probe.writes]
            old = [run.writes[i][0, -1] for i in probe.writes]
        else:
            edit: list[tuple[Site, Tap]] = [(probe.site, _edit_tap(probe, 0, 1))]
            single = capture(model, anatomy, input_ids, last[:1], edits=edit, **forward)
            new = [single.writes[i][0, -1] for i in probe.writes]
            old = [before.writes[i][0] for i in probe.writes]
        seen = torch.zeros_like(probe.expected)
        for a, b in zip(new, old, strict=True):
            seen = seen + a.double() - b.double()
        size = float(probe.expected.norm())
        error, bound = float((seen - probe.expected).norm()), SAFETY * probe.bound
        out.append((probe.unit, error / max(size, bound, 1e-300), bound / max(size, bound, 1e-300)))
    return out


def _alike(alone: Captured, run: Captured, row: int, until: int) -> bool:
    """Whether a row of the batch got before its edit, at all positions, what it gets alone.

    A few models route tokens across rows. To rounding: a row that is held to be unlike, though it is like, only costs
    a run of its own.
    """
    for single, write in zip(alone.writes[:until], run.writes, strict=False):
        expected = single[0].double()
        slack = ROUNDINGS * torch.finfo(write.dtype).eps * float(expected.norm())
        for place in (row, 0):
            if not float((write[place].double() - expected).norm()) <= slack:
                return False
    return True


def _edit_tap(probe: Probe, row: int, batch: int) -> Tap:
    def tap(leaves):
        new = list(leaves)
        new[probe.site.slot] = probe.edit(leaves[probe.site.slot], row, batch)
        return new

    return tap


def _expert_results(
    model: torch.nn.Module, before: Moment, input_ids: Tensor, count: int, generator: torch.Generator, **forward
) -> list[tuple[Unit, float, float]]:
    """Experts' neurons zeroed in the recorded operations, and experts' numbers against their matrices' places."""
    routed = [write for write in before.anatomy.writes if write.experts is not None]
    out: list[tuple[Unit, float, float]] = []
    for write in {write.experts: write for write in _choose(routed, count, generator)}.values():
        site = write.experts
        assert site is not None

        def done(recording, frame, site=site, write=write) -> None:
            change = zeroed_change(find_sum(recording, frame, site), input_ids.shape[1] - 1, generator)
            if change is not None:
                seen, expected, size = change
                bound = SAFETY * 16 * torch.finfo(write.dtype).eps * float(size.norm())
                norm = max(float(expected.norm()), bound)
                out.append((write.unit, float((seen - expected).norm()) / norm, bound / norm))

        with recorded_call(model, site.path, site.call, done):
            model(input_ids=input_ids, **forward)
        for rows in before.experts[f"{site.path}#{site.call}"].rows[:count]:
            place = expert_of(model, rows.of(0))
            wrong = place is not None and place != int(rows.expert[0])
            out.append((write.unit, 1.0 if wrong else 0.0, 0.5))
    return out
