"""Attribution patching: what patching each unit from one run into another would do, estimated for all at once.

Patching sets a unit of one prompt's run (the base) to what it is in another's (the donor), and asks how the metric
changes. To first order that is (donor's activation - base's) . d metric / d activation in the base run (Nanda 2023,
"Attribution patching"), for every unit and position from two forward passes and one backward pass. Beside it:

    gradient        as above
    grad-drop       mean over layers l of |the same with the gradient through what layer l writes set to 0|: effects
                    that cancel through one layer show (AtP*, Kramar et al. 2024, section 3.1.2). A unit of layer l has
                    no gradient left when l is dropped, so the mean is over the other layers. Not negative.
    integrated      the gradient's mean along the straight line from the base's embeddings to the donor's, by
                    Gauss-Legendre quadrature (Hanna et al. 2024, "Have Faith in Faithfulness", section 3)

and, for queries and keys, with any gradient: `query_key="exact"` recomputes attention's pattern with the patched query
or key and takes the linear effect of the pattern's change (AtP*, section 3.1.1), which does not vanish where the
softmax is saturated (see `mainstem.causal.query_key`).

Cost, in passes over one prompt: 2 forwards and 1 backward; grad-drop 2 forwards and a backward for each layer;
integrated 1 forward and, for each step, a forward and a backward. Memory: the activations of one run (of some steps as
a batch), and nothing of positions x positions but one layer's patterns.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.attribution import quadrature
from mainstem.causal.patch_places import Place, patch_places, without_places
from mainstem.causal.query_key import (
    Effects,
    attention_call,
    attention_sites,
    key_effects,
    pattern_gradient,
    query_effects,
)
from mainstem.causal.tracked import (
    Cost,
    LogitMetric,
    Made,
    Prompt,
    Replace,
    Tracked,
    between,
    embedding_sites,
    require_same_length,
    seen,
    tracked,
)
from mainstem.errors import ChoiceError, LevelRefusedError, NotFiniteError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site
from mainstem.units import Unit

Gradient = Literal["gradient", "grad-drop", "integrated"]
GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)
QueryKeyEffect = Literal["linear", "exact"]
QUERY_KEY_EFFECTS: tuple[QueryKeyEffect, ...] = get_args(QueryKeyEffect)

KINDS = ("embedding", "sublayer", "head", "attention_neuron", "ffn_neuron")
"""The kinds that are scored by default."""
STEPS = 5


@dataclass(frozen=True, eq=False)
class PatchEffects:
    """Estimated effects of units of one kind in one sublayer: the metric after patching minus the base's.

    `scores` are for each position alone, and add up to the estimate for patching all positions, except under
    grad-drop, where `total` has absolute values of sums.
    """

    kind: str
    units: Sequence[Unit]
    scores: Float[Tensor, "pos unit"]
    total: Float[Tensor, " unit"]


@dataclass(frozen=True, eq=False)
class AttributionPatching:
    """Estimates for every unit, and what they cost.

    Attributes:
        effects: one entry for each kind of each sublayer.
        gradient, query_key, steps: how they were made.
        base, donor: the metric of the two runs, as they are.
        cost: passes that were run.
        missing: the sublayers whose units of a kind that was asked for could not be scored, and why.
    """

    effects: list[PatchEffects]
    gradient: Gradient
    query_key: QueryKeyEffect
    steps: int
    base: float
    donor: float
    cost: Cost
    missing: dict[Unit, str]

    def of_kind(self, *kinds: str) -> dict[tuple[str, Unit], float]:
        """The estimates of the kinds' units for patching all positions, by kind and address."""
        found: dict[tuple[str, Unit], float] = {}
        for group in self.effects:
            if group.kind in kinds:
                found |= {(group.kind, u): s for u, s in zip(group.units, group.total.tolist(), strict=True)}
        return found


class AttributionPatcher:
    """Estimates for one pair of prompts.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        base: the run that is patched.
        donor: the run that activations are taken from, of as many tokens.
        metric: of the logits at the base's destination.
        kinds: of the units; see `mainstem.causal.patch_places.PLACE_KINDS`.

    Raises:
        UsageError: if the prompts have not the same number of tokens, or there is no kind.
        ChoiceError: if there is no such kind.
        LevelRefusedError: if no unit of the kinds can be patched, with the reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        anatomy: Anatomy,
        base: Prompt,
        donor: Prompt,
        metric: LogitMetric,
        kinds: Iterable[str] = KINDS,
    ) -> None:
        require_same_length(base, donor)
        self.model, self.anatomy, self.base, self.donor, self.metric = model, anatomy, base, donor, metric
        wanted = list(kinds)
        if not wanted:
            raise UsageError("No kind of unit to patch", None, f"Name one or more of {', '.join(KINDS)}.")
        self.places, self.missing = patch_places(anatomy, wanted), without_places(anatomy, wanted)
        if not self.places:
            reason = next(iter(self.missing.values()), "the model has none")
            raise LevelRefusedError(f"Nothing of {', '.join(wanted)} can be patched", None, reason)

    def estimate(
        self, gradient: Gradient = "gradient", query_key: QueryKeyEffect = "linear", steps: int = STEPS
    ) -> AttributionPatching:
        """The estimated effect of every unit.

        Args:
            gradient: which gradient, as the module's docstring lists them.
            query_key: whether queries and keys act through the softmax's gradient or through the softmax.
            steps: of `integrated`.

        Raises:
            ChoiceError: if there is no such gradient or effect.
            UsageError: if there is no step.
            RunError: if the model cannot be differentiated.
            NotFiniteError: if an estimate is NaN; names the unit.
        """
        if gradient not in GRADIENTS:
            raise ChoiceError("gradient", gradient, GRADIENTS)
        if query_key not in QUERY_KEY_EFFECTS:
            raise ChoiceError("effect of queries and keys", query_key, QUERY_KEY_EFFECTS)
        if steps < 1:
            raise UsageError("Integrated gradients need at least one step", f"steps={steps}", "5 is the default.")
        pair = _Pair(self, query_key == "exact")
        base, results, cost = {
            "gradient": pair.plain,
            "grad-drop": pair.dropped,
            "integrated": lambda: pair.integrated(steps),
        }[gradient]()
        effects = [
            PatchEffects(place.kind, place.units, scores, total)
            for place, (scores, total) in zip(self.places, results, strict=True)
        ]
        _require_finite(effects, gradient)
        taken = steps if gradient == "integrated" else 0
        donor = float(pair.donor.metric)
        cost += Cost(forwards=1)
        return AttributionPatching(effects, gradient, query_key, taken, base, donor, cost, self.missing)


class _Pair:
    """The two runs of one estimate: the donor's, made at once, and the base's, made with gradients."""

    def __init__(self, of: AttributionPatcher, exact: bool) -> None:
        self.of, self.places, self.metric = of, of.places, of.metric
        self.exact = {i for i, place in enumerate(of.places) if exact and place.kind in ("query", "key")}
        cores = dict.fromkeys(place.core for i, place in enumerate(of.places) if i in self.exact and place.core)
        attention = [site for core in cores for site in attention_sites(core)]
        self.sites = list(dict.fromkeys([*(site for place in of.places for site in place.sites), *attention]))
        self.asked = list(dict.fromkeys(s for i, p in enumerate(of.places) if i not in self.exact for s in p.sites))
        self.asked += [core.result_site for core in cores]
        begin = embedding_sites(of.anatomy)
        self.donor = seen(of.model, [*begin, *self.sites], of.donor, of.metric, {})

    def plain(self) -> tuple[float, list[Effects], Cost]:
        """One backward pass."""

        def then(run: Tracked) -> tuple[float, list[Effects]]:
            return float(run.metric.detach()), self._effects(run, run.gradients(self.asked))

        return *self._tracked({}, then), Cost(1, 1)

    def dropped(self) -> tuple[float, list[Effects], Cost]:
        """A backward pass for each layer, with nothing coming back through what it writes."""
        writes = {w.site: w.unit.layer for w in self.of.anatomy.writes if w.unit.layer is not None}
        layers = sorted(set(writes.values()))
        if len(layers) < 2:
            raise UsageError("Gradients cannot be dropped in a model of one layer", None, "Take the gradient as it is.")
        now = _Dropping()
        gates: dict[Site, Replace] = {site: now.gate(layer) for site, layer in writes.items()}

        def then(run: Tracked) -> tuple[float, list[Effects]]:
            sums = [(torch.zeros(()), torch.zeros(())) for _ in self.places]
            for now.layer in layers:
                made = self._effects(run, run.gradients(self.asked, keep=now.layer != layers[-1]))
                for i, (place, own) in enumerate(zip(self.places, made, strict=True)):
                    others = len(layers) - (place.units[0].layer in layers)
                    if place.units[0].layer != now.layer:
                        sums[i] = sums[i][0] + own[0].abs() / others, sums[i][1] + own[1].abs() / others
            return float(run.metric.detach()), sums

        return *self._tracked(gates, then), Cost(1, len(layers))

    def integrated(self, steps: int) -> tuple[float, list[Effects], Cost]:
        """A forward and a backward pass for each step."""
        begin = embedding_sites(self.of.anatomy)
        base = seen(self.of.model, [*begin, *self.sites], self.of.base, self.metric, {})
        mean: dict[Site, Tensor] = {}
        for point, weight in zip(*quadrature(steps), strict=True):
            embeddings = between(self.of.anatomy, base, self.donor, point)
            for site, slope in self._tracked(embeddings, lambda run: run.gradients(self.asked)).items():
                mean[site] = weight * slope + mean.get(site, 0.0)
        return float(base.metric), self._effects(base, mean), Cost(1 + steps, steps)

    def _tracked(self, changes: dict[Site, Replace], then: Callable[[Tracked], Made]) -> Made:
        of = self.of
        return tracked(of.model, of.anatomy, self.sites, of.base, self.metric, changes, then)

    @torch.no_grad()
    def _effects(self, base: Tracked, slopes: dict[Site, Tensor]) -> list[Effects]:
        return [self._effect(i, place, base, slopes) for i, place in enumerate(self.places)]

    def _effect(self, index: int, place: Place, base: Tracked, slopes: dict[Site, Tensor]) -> Effects:
        if index in self.exact and place.core is not None:
            positions = len(self.of.base)
            own, other = (attention_call(run, place.core, positions) for run in (base, self.donor))
            slope = pattern_gradient(own, slopes[place.core.result_site], place.core)
            if place.kind == "query":
                return query_effects(own, other, slope)
            return key_effects(own, other, slope, place.heads)
        scores = torch.zeros(())
        for site in place.sites:
            product = (slopes[site] * (self.donor.values[site] - base.values[site])).double()
            scores = scores + place.rows(product, site, 1, len(self.of.base))[0].sum(-1)
        return scores, scores.sum(0)


class _Dropping:
    """Which layer's writes nothing comes back through, in the backward pass that runs now."""

    layer: int | None = None

    def gate(self, layer: int) -> Replace:
        """Passes a write on, and its gradient unless the layer is dropped."""

        class Gate(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, *gradient: Tensor) -> Tensor:
                return gradient[0] * 0 if self.layer == layer else gradient[0]

        return lambda value: Gate.apply(value)


def _require_finite(effects: list[PatchEffects], gradient: str) -> None:
    for group in effects:
        bad = torch.nonzero(~torch.isfinite(group.total)).flatten()
        if len(bad):
            raise NotFiniteError(f"The estimate ({gradient}) is NaN or infinite", str(group.units[int(bad[0])]))
