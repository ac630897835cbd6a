"""Patching units one by one, and how well estimates agree with it.

Each unit is patched at all positions in a real run, and runs are rows of a batch. It is the check of
`mainstem.causal.attribution_patching`, on a sample: it costs a forward pass for each unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.ranks import RankCorrelation, rank_correlation
from mainstem.causal.attribution_patching import AttributionPatching
from mainstem.causal.patch_places import Place
from mainstem.causal.row_batches import BATCH_ENTRIES, mixes_rows
from mainstem.causal.tracked import LogitMetric, Prompt, seen
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.units import Unit

SAMPLE = 400
TOP = 20

Patch = tuple[Place, int]
"""One unit: its place and its number there."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """Estimated effects beside exact ones.

    Attributes:
        units: kind and address of each unit of the sample.
        exact, estimated: the effect of patching it at all positions.
        correlation: over the whole sample.
        top: over the units among the first `TOP` by either, in absolute value.
        absolute: whether absolute values were compared, because the estimates have no sign.
    """

    units: list[tuple[str, Unit]]
    exact: Float[Tensor, " unit"]
    estimated: Float[Tensor, " unit"]
    correlation: RankCorrelation
    top: RankCorrelation
    absolute: bool


def agreement(
    estimates: AttributionPatching, exact: dict[tuple[str, Unit], float], top: int = TOP, seed: int = 0
) -> Agreement:
    """How well estimates order units, against exact effects of a sample of them."""
    units = list(exact)
    found = estimates.of_kind(*dict.fromkeys(kind for kind, _ in units))
    a = torch.tensor([exact[unit] for unit in units], dtype=torch.float64)
    b = torch.tensor([found[unit] for unit in units], dtype=torch.float64)
    absolute = estimates.gradient == "grad-drop"
    x = a.abs() if absolute else a
    count = min(top, len(units))
    leading = torch.cat([a.abs().topk(count).indices, b.abs().topk(count).indices]).unique()
    both = rank_correlation(x, b, seed), rank_correlation(x[leading], b[leading], seed)
    return Agreement(units, a, b, *both, absolute)


def exact_effects(
    model: torch.nn.Module,
    places: Sequence[Place],
    base: Prompt,
    donor: Prompt,
    metric: LogitMetric,
    sample: int = SAMPLE,
    seed: int = 0,
) -> dict[tuple[str, Unit], float]:
    """The metric after patching each unit at all positions, minus the base's, by kind and address.

    Args:
        model: the module; it is left as it was.
        places: of the units.
        base: the run that is patched.
        donor: where activations come from.
        metric: of the logits at the base's destination.
        sample: at most how many units; more are drawn from at random.
        seed: of the draw.
    """
    patches = [(place, i) for place in places for i in range(len(place.units))]
    if len(patches) > sample:
        chosen = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))[:sample]
        patches = [patches[i] for i in sorted(chosen.tolist())]
    values = seen(model, dict.fromkeys(site for place, _ in patches for site in place.sites), donor, metric, {}).values
    logits = _logits(model, [], values, base, 1)
    mixing = mixes_rows(model, base.ids, base.position, logits[0], **base.forward)
    size = 1 if mixing else max(1, BATCH_ENTRIES // logits.shape[-1] // len(base))
    chunks = [patches[start : start + size] for start in range(0, len(patches), size)]
    found = [metric(_logits(model, chunk, values, base, len(chunk))) for chunk in chunks]
    effects = (torch.cat(found) - metric(logits)).tolist() if found else []
    return {(p.kind, p.units[i]): effect for (p, i), effect in zip(patches, effects, strict=True)}


@torch.no_grad()
def _logits(
    model: torch.nn.Module, patches: list[Patch], values: dict[Site, Tensor], base: Prompt, runs: int
) -> Float[Tensor, "run d_vocab"]:
    """The logits of each run at the destination, run i with patch i."""
    by_site: dict[Site, list[tuple[int, Place, int]]] = {}
    for run, (place, unit) in enumerate(patches):
        for site in place.sites:
            by_site.setdefault(site, []).append((run, place, unit))
    taps = [(site, _tap(site, own, values[site], runs, len(base))) for site, own in by_site.items()]
    with tapped(model, taps):
        logits = logits_of(model(input_ids=base.ids.expand(runs, -1).contiguous(), **base.forward))
    return logits[:, base.position].clone()


def _tap(site: Site, patches: list[tuple[int, Place, int]], donor: Tensor, runs: int, positions: int) -> Tap:
    def tap(leaves: list[Any]) -> list[Any]:
        value = leaves[site.slot]
        if runs > 1 and value.numel() == donor.numel():  # computed once for all runs
            value = value.expand(runs, *donor.shape[value.dim() == donor.dim() :])
        out = value.clone(memory_format=torch.contiguous_format)
        places = torch.arange(out.numel(), device=out.device).reshape(out.shape)
        for run, place, unit in patches:
            where = place.rows(places, site, runs, positions)[run, :, unit]
            out.view(-1)[where] = place.rows(donor, site, 1, positions)[0, :, unit].to(out)
        new = list(leaves)
        new[site.slot] = out
        return new

    return tap
