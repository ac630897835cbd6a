"""Direct attribution under a recomputed norm: z_t(x + v) - z_t(x), every vector normed at its own scale.

x is the stream that the part's sublayer read, v the part as it enters the stream (see `bases`). These differences do
not add up; what is missing from the target's logit is reported as the remainder. On models with tied embeddings early
parts score absurdly high, because early streams are short: it is the definition, not a fault (see the docs).

Cost: each part's vector is formed once, in chunks; no product with the vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.attribution import direct_weights
from mainstem.analysis.bases import entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.readout import normed, require_linear
from mainstem.targets import Target

CHUNK = 8192


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Scores by group, aligned with the decomposition's groups, and the part of the logit that they leave out."""

    scores: list[Float[Tensor, " _"]]
    remainder: float


def direct_recomputed(decomposition: Decomposition, target: Target) -> Recomputed:
    """z_t(x + v) - z_t(x) for every part that belongs to a sublayer; biases and roundings score 0."""
    readout = decomposition.moment.anatomy.readout
    require_linear(readout)
    weights, constant, total = direct_weights(decomposition, target)
    weights = weights * readout.scale
    places = entries(decomposition)

    def read(states: Tensor) -> Tensor:
        return normed(readout, states, None) @ weights

    scores = []
    for group in decomposition.groups:
        unit = group.sublayer or group.units[0]
        if unit not in places or group.kind in ("bias", "rounding"):
            scores.append(torch.zeros(len(group), dtype=torch.float64, device=weights.device))
            continue
        entry = places[unit]
        before = read(entry.base[None])[0] if entry.base.any() else torch.zeros_like(weights[0])
        found = []
        for start in range(0, len(group), CHUNK):
            index = torch.arange(start, min(start + CHUNK, len(group)), device=weights.device)
            found.append(read(entry.base + entry.vectors(group, index)) - before)
        scores.append(torch.cat(found))
    explained = float(sum(score.sum() for score in scores)) + constant
    return Recomputed(scores, total - explained)
