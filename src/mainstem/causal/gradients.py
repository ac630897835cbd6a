"""Gradients of the target's log-probability with respect to what units write, through the rest of the real model.

A zero is added to each write where it is made, at the destination alone, and the log-probability is differentiated
with respect to it: everything after the write, norms between it and the stream included, is the model's own, as it is.
Where what a layer writes is normed before it is added, its size does not matter: the gradient of the whole layer is 0,
and integrated gradients, which see no jump at 0, do not add up. `Integrated.gaps` says by how much.

    gradient              v . d log p / d v: how log p changes per relative change of the unit (gradient x activation)
    integrated gradients  m_i x the integral over a in [0, 1] of d log p(a) / d m_i, where log p(a) is that of the model
                          with ALL units of one layer scaled by a: their sum is log p(1) - log p(0), the layer as it is
                          against the layer turned off. One layer at a time, as Dai et al. 2022 (Knowledge Neurons,
                          eq. 2) do with FFN activations; there 20 steps of a Riemann sum of p, here `steps` points of
                          Gauss-Legendre quadrature of log p. Biases of the layer stay.

Parts of attention are scaled after the softmax: patterns are what they are. Cost: one forward and one backward pass
for the gradient; for the other a batch of `steps` + 2 rows for each sublayer. Where rows of a batch do not get what
they get alone (experts with a capacity), each step is a run of its own. Nothing is left in the model: no hook, no
gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.attribution import quadrature
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.increase import log_probability
from mainstem.analysis.parts import Group, summed
from mainstem.analysis.scores import chosen_groups, require_finite
from mainstem.causal.tracked import in_spite_of_changes
from mainstem.errors import UsageError
from mainstem.model.anatomy import Write
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.targets import Target
from mainstem.units import Unit

STEPS = 16
BATCH_TOKENS = 2048
ALIKE = 1e-3


@dataclass(frozen=True, eq=False)
class Integrated:
    """Integrated gradients: `scores`, one tensor for each group, and for each layer its own account.

    `changes[unit]` is log p with the layer as it is minus log p with its units turned off, and `gaps[unit]` that minus
    the sum of the layer's scores: the error of the quadrature, in nats.
    """

    scores: list[Float[Tensor, " part"]]
    changes: dict[Unit, float]
    gaps: dict[Unit, float]


class Differentiator:
    """Runs one prompt again with gradients.

    Args:
        model: the module; it is left as it was.
        decomposition: of the destination, of a run of `ids` alone.
        target: whose log-probability (or, with rivals, difference of logits) is differentiated.
        ids: [pos] the prompt, without padding.
        kinds: of the units; all by default.
        forward: further arguments of the forward call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decomposition: Decomposition,
        target: Target,
        ids: Int[Tensor, " pos"],
        kinds: Iterable[str] | None = None,
        **forward: Any,
    ) -> None:
        self.model, self.decomposition, self.target, self.ids, self.forward = model, decomposition, target, ids, forward
        self.groups = chosen_groups(decomposition, kinds)
        self.places = [_writes_of(decomposition, group) for group in self.groups]

    def gradient(self) -> list[Float[Tensor, " part"]]:
        """gradient x activation of every unit, in nats per relative change; one tensor for each group, float64.

        Raises:
            RunError: if the model cannot be differentiated.
            NotFiniteError: if a score is NaN; names the unit.
        """
        indices = sorted({i for places in self.places for i in places})
        if not indices:
            return []
        _, slopes = self.run(torch.ones(1, dtype=torch.float64), dict.fromkeys(indices))
        scores = [
            self._scores(group, {i: slopes[i][0] for i in p}) for group, p in zip(self.groups, self.places, strict=True)
        ]
        require_finite(self.groups, scores, "gradient")
        return scores

    def integrated(self, steps: int = STEPS) -> Integrated:
        """Integrated gradients of every unit, in nats, its layer turned on with `steps` points.

        Raises:
            UsageError: if there is no step.
            RunError, NotFiniteError: as `gradient`.
        """
        if steps < 1:
            raise UsageError("Integrated gradients need at least one step", f"steps={steps}", "16 is the default.")
        points, weights = (torch.tensor(row, dtype=torch.float64) for row in quadrature(steps))
        scales = torch.cat([torch.zeros(1).double(), points, torch.ones(1).double()])
        scores: list[Tensor] = [torch.empty(0)] * len(self.groups)
        changes, gaps = {}, {}
        for layer, members in self._layers().items():
            totals = self._totals(members)
            log_p, slopes = self.run(scales, totals)
            mean = {i: torch.einsum("a,ad->d", weights.to(g.device), g[1:-1].double()) for i, g in slopes.items()}
            for n in members:
                scores[n] = self._scores(self.groups[n], {i: mean[i] for i in self.places[n]})
            changes[layer] = float(log_p[-1] - log_p[0])
            gaps[layer] = changes[layer] - float(sum(scores[n].sum() for n in members))
        require_finite(self.groups, scores, "integrated-gradients")
        return Integrated(scores, changes, gaps)

    def _layers(self) -> dict[Unit, list[int]]:
        """The groups of each sublayer; a whole sublayer is a layer by itself."""
        layers: dict[Unit, list[int]] = {}
        for n, group in enumerate(self.groups):
            layers.setdefault(group.sublayer or group.units[0], []).append(n)
        return layers

    def _totals(self, members: list[int]) -> dict[int, Tensor | None]:
        """What the units of one layer write together, by write, before the tail."""
        totals: dict[int, Tensor | None] = {}
        for n in members:
            for piece, i in zip(self.groups[n].pieces, self.places[n], strict=True):
                known = totals.get(i)
                totals[i] = piece.written if known is None else known + piece.written
        return totals

    def _scores(self, group: Group, slopes: dict[int, Float[Tensor, " d_model"]]) -> Float[Tensor, " part"]:
        """Inner products of a group's parts, as they are written, with slopes at its writes."""
        pairs = zip(group.pieces, _writes_of(self.decomposition, group), strict=True)
        return summed([piece.raw_dot(slopes[i].double()) for piece, i in pairs])

    # --- runs -----------------------------------------------------------------------------------------------

    def run(
        self, scales: Float[Tensor, " step"], totals: dict[int, Tensor | None]
    ) -> tuple[Float[Tensor, " step"], dict[int, Float[Tensor, "step d_model"]]]:
        """log p for each scale, and its slope with respect to the writes that `totals` names.

        Args:
            scales: what to scale the totals by, one row of a batch for each; the last is 1.
            totals: for some writes, by number, the part of it that is scaled; None: nothing.
        """
        rows = max(1, BATCH_TOKENS // len(self.ids))
        pieces = [self._rows(piece, totals) for piece in scales.split(rows)]
        if rows > 1 and len(scales) > 1 and not self._alike(pieces[-1][0][-1]):
            pieces = [self._rows(piece, totals) for piece in scales.split(1)]
        log_p = torch.cat([piece[0] for piece in pieces])
        return log_p, {i: torch.cat([piece[1][i] for piece in pieces]) for i in totals}

    def _alike(self, log_p: Tensor) -> bool:
        """Whether the row that nothing was changed in got what the prompt gets alone."""
        own = log_probability(self.decomposition.moment.logits[None].double(), self.target)[0]
        eps = torch.finfo(self.decomposition.moment.logits.dtype).eps
        return abs(float(log_p.to(own) - own)) <= max(ALIKE, 64 * eps * abs(float(own)))

    def _rows(self, scales: Tensor, totals: dict[int, Tensor | None]) -> tuple[Tensor, dict[int, Tensor]]:
        """One batch."""
        anatomy, place, batch = self.decomposition.moment.anatomy, self.decomposition.position, len(scales)
        added: dict[int, Tensor] = {}
        taps: list[tuple[Site, Tap]] = []
        for i, total in totals.items():
            write = anatomy.writes[i]
            like = self.decomposition.moment.writes[i][0]
            change = torch.zeros(batch, len(like), dtype=torch.float64, device=like.device)
            if total is not None:
                change = (scales.to(like.device)[:, None] - 1) * total
            added[i] = change.to(write.dtype).requires_grad_()
            taps.append((write.site, adding(write, added[i], place, len(self.ids))))
        ids = self.ids.expand(batch, -1).contiguous()

        def differentiate() -> tuple[Tensor, tuple[Tensor | None, ...]]:
            with torch.enable_grad(), tapped(self.model, taps):
                logits = logits_of(self.model(input_ids=ids, **self.forward))
                log_p = log_probability(logits[:, place].double(), self.target)
                return log_p.detach(), torch.autograd.grad(log_p.sum(), list(added.values()), allow_unused=True)

        log_p, slopes = in_spite_of_changes(differentiate)
        made = {i: torch.zeros_like(a) if g is None else g for (i, a), g in zip(added.items(), slopes, strict=True)}
        return log_p, made


def adding(write: Write, change: Float[Tensor, "batch d_model"], place: int, positions: int) -> Tap:
    """A tap that adds to a write, at one position, a row for each row of the batch."""
    site, batch = write.site, len(change)

    def tap(leaves: list[Any]) -> list[Any]:
        leaf = leaves[site.slot]
        full = torch.nn.functional.pad(change[:, None], (0, 0, place, positions - place - 1))
        if site.positions_first and leaf.shape[:2] == (positions, batch):
            full = full.transpose(0, 1)
        new = list(leaves)
        new[site.slot] = leaf + full.to(leaf.device).reshape(leaf.shape)
        return new

    return tap


def _writes_of(decomposition: Decomposition, group: Group) -> list[int]:
    """The write that each of a group's pieces is added to."""
    anatomy = decomposition.moment.anatomy
    indices = {anatomy.write_nodes[i]: i for i in anatomy.writes_of(group.sublayer or group.units[0])}
    return [indices[piece.node] for piece in group.pieces]
