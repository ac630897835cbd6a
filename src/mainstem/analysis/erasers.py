"""Memory management by the weights: units that write against what they read.

A neuron whose direction of reading r and of writing w have a very negative cosine takes out of the stream what it finds
there (Elhage et al. 2021, "Memory management"). In a gated MLP the sign of the write is that of activation(gate) times
up: with the gate's row r_g a large gate value gives up . w, so the up row says what is erased, and the gate's row what
turns it on; both are tested apart. The null is the same layer's rows and columns paired wrongly: every r_i with every
w_j, j other than i. It keeps norms, spectra and directions that all neurons share. p is the part of those pairs with so
small a cosine, and the false discovery rate is over all neurons of the model, by role (Benjamini and Hochberg
1995). Wrong pairs are so many that a cosine of -0.1 is significant: how negative it is says more than its q.

Cost: for each layer and role one product of [neuron, d_model] and one sort of its entries.

A head copies with sign: the eigenvalues l of W_OV say whether what it reads comes back as it was (positive) or negated.
`sign` is sum Re(l) / sum |l|, from -1 to 1. The null turns the reading side of W_OV at random and keeps its spectrum:
then the trace, which is sum l, has mean 0 and variance ||W_OV||^2 / d_model, and is nearly normal. A head erases if it
negates and attends to the present token.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.false_discovery import p_values


@dataclass(frozen=True, eq=False)
class Cosines:
    """Of one layer's neurons in one role.

    Attributes:
        cosine: of reading and writing; NaN where one of them is zero.
        p: the part of wrongly paired neurons with a cosine so small, the measured pair among them; 1 where undefined.
        null_mean, null_spread: over wrong pairs.
    """

    cosine: Float[Tensor, " neuron"]
    p: Float[Tensor, " neuron"]
    null_mean: float
    null_spread: float


def cosines(reading: Float[Tensor, "neuron d_model"], writing: Float[Tensor, "neuron d_model"]) -> Cosines:
    """Cosines of each neuron's reading with its writing, beside those of wrong pairs of neurons that have both."""
    norms = [side.float().norm(dim=1, keepdim=True) for side in (reading, writing)]
    defined = ((norms[0] > 0) & (norms[1] > 0)).flatten().cpu()
    count = int(defined.sum())
    own = torch.full((len(defined),), torch.nan, dtype=torch.float64)
    p = torch.ones(len(defined), dtype=torch.float64)
    if count < 2:
        return Cosines(own, p, 0.0, 0.0)
    sides = [(side.float() / norm)[defined] for side, norm in zip((reading, writing), norms, strict=True)]
    table = (sides[0] @ sides[1].T).cpu()
    own[defined] = table.diagonal().double()
    wrong = table.flatten()[1:].view(count - 1, count + 1)[:, :-1].flatten()  # all but the diagonal
    mean, square = float(wrong.mean()), float(torch.linalg.vector_norm(wrong)) ** 2 / len(wrong)
    p[defined] = p_values(-table.diagonal(), wrong.neg_()).double()
    return Cosines(own, p, mean, max(square - mean**2, 0.0) ** 0.5)


@dataclass(frozen=True)
class Sign:
    """Whether a head's W_OV gives back what it reads or its opposite.

    Attributes:
        sign: sum Re(l) / sum |l| over its eigenvalues.
        z: the trace over its standard deviation under random rotations.
        p: of a trace so small.
    """

    sign: float
    z: float
    p: float


def eigenvalue_sign(ov: Factored) -> Sign:
    """The sign of one W_OV, beside matrices of the same spectrum with the reading side turned at random."""
    norm = float(ov.norm())
    if not norm > 0:
        return Sign(0.0, 0.0, 1.0)
    values = ov.eigenvalues()
    total = float(values.abs().sum())
    z = float(ov.trace()) * ov.shape[-1] ** 0.5 / norm
    return Sign(float(values.real.sum()) / total if total > 0 else 0.0, z, 0.5 * math.erfc(-z / 2**0.5))
