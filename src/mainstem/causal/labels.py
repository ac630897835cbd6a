"""The labels certificate: a unit is zeroed in a real run, and its write must change by minus its part.

A sum is blind to labels: permuted heads, a wrong head-to-group map or shifted sources still add up. So for some random
units of each level the model itself is run with the unit zeroed where it acts: a head or one coordinate of it in
attention's result, a source in attention's values, a neuron in what the output matrix reads. All edits go as rows of
one batch, beside a row without any; each row's change is compared at the edited sublayer, before it spreads. Experts'
neurons are zeroed inside the recorded operations of their module. Names are held against evidence in `names`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mainstem.analysis.certificate import SAFETY, Check, summary
from mainstem.analysis.decompose import Decomposition, decompose
from mainstem.causal.names import another_end, embedding_results, expert_of, name_results, part_by_address
from mainstem.causal.probes import Probe, choose, draw_probes
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy
from mainstem.model.experts import find_sum, zeroed_change
from mainstem.model.hooks import Site, Tap
from mainstem.model.recorder import recorded_call
from mainstem.run.capture import Captured, capture
from mainstem.run.moment import Moment, moment
from mainstem.units import Unit

ROUNDINGS = 64


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
    probes = draw_probes(before, per_level, generator)
    run = _probed(model, anatomy, input_ids, probes, **forward)
    zeroed = [_result(model, before, alone, run, input_ids, number, probes, **forward) for number in range(len(probes))]
    zeroed += _expert_results(model, before, input_ids, per_level, generator, **forward)
    named = _address_results(before, probes) + name_results(anatomy, alone)
    named += embedding_results(anatomy, run, 0, len(probes) + 1)
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


def _probed(model: torch.nn.Module, anatomy: Anatomy, input_ids: Tensor, probes: list[Probe], **forward) -> Captured:
    """One batch: row 0 as it is, then a row for each probe, then one whose last token is another."""
    batch = 2 + len(probes)
    ids = torch.cat([input_ids.expand(batch - 1, -1), another_end(input_ids)])
    last = torch.full((batch, 1), input_ids.shape[1] - 1, device=input_ids.device)
    edits = [(probe.site, _edit_tap(probe, row, batch)) for row, probe in enumerate(probes, start=1)]
    return capture(model, anatomy, ids, last, edits=edits, reads=False, **forward)


def _result(
    model: torch.nn.Module,
    before: Moment,
    alone: Captured,
    run: Captured,
    input_ids: Tensor,
    number: int,
    probes: list[Probe],
    **forward,
) -> tuple[Unit, float, float]:
    """(unit, relative error, bound) of one probe.

    Where a row of a batch gets something else than it gets alone, the probe has a run of its own.
    """
    probe, row = probes[number], number + 1
    if _alike(alone, run, row, min(probe.writes)):
        new = [run.writes[i][row, -1] for i in probe.writes]
        old = [run.writes[i][0, -1] for i in probe.writes]
    else:
        edit: list[tuple[Site, Tap]] = [(probe.site, _edit_tap(probe, 0, 1))]
        single = capture(model, before.anatomy, input_ids, alone.destinations, edits=edit, reads=False, **forward)
        new = [single.writes[i][0, -1] for i in probe.writes]
        old = [before.writes[i][0] for i in probe.writes]
    seen = torch.zeros_like(probe.expected)
    for a, b in zip(new, old, strict=True):
        seen = seen + a.double() - b.double()
    size = float(probe.expected.norm())
    error, bound = float((seen - probe.expected).norm()), SAFETY * probe.bound
    return probe.unit, error / max(size, bound, 1e-300), bound / max(size, bound, 1e-300)


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
    for write in {write.experts: write for write in choose(routed, count, generator)}.values():
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
