"""Whether scores are larger than chance, for many units at once: p-values against drawn nulls, and their correction.

The null is whatever scores of the same kind that mean nothing are at hand, pooled over units, so that its spread is
that of the model itself and not of an ideal distribution. Of units that pass at a false discovery rate of 0.05, one in
twenty is expected to be there by chance.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

RATE = 0.05
"""The false discovery rate at which a unit counts as found."""


def p_values(scores: Float[Tensor, " unit"], null: Float[Tensor, " draw"]) -> Float[Tensor, " unit"]:
    """How often the null is at least as large, the score itself counted once, so that no p-value is 0."""
    wide = torch.promote_types(scores.dtype, null.dtype)
    ordered = torch.from_numpy(np.sort(null.to("cpu", wide).numpy()))  # torch takes fifteen times as long to sort
    reached = len(ordered) - torch.searchsorted(ordered, scores.to("cpu", wide).contiguous())
    return (1 + reached) / (1 + len(ordered))


def q_values(p: Float[Tensor, " unit"]) -> Float[Tensor, " unit"]:
    """The smallest false discovery rate at which each unit passes (Benjamini and Hochberg, 1995)."""
    order = p.argsort()
    ranks = torch.arange(1, len(p) + 1, dtype=p.dtype)
    stepped = (p[order] * len(p) / ranks).flip(0).cummin(0).values.flip(0).clamp_max(1)
    return torch.empty_like(p).index_copy(0, order, stepped)
