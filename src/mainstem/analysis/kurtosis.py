"""How heavy-tailed the coordinates of a vector are, and what chance gives: the measures of a privileged basis.

Kurtosis of a token (Elhage, Lasenby, Olah 2023): over the d coordinates of its vector, E[(x - m)^4] / E[(x - m)^2]^2,
then averaged over tokens. 3 for coordinates that are Gaussian; a vector of any shape whose direction is uniformly
random has 3 (d - 1) / (d + 1) on average, and so has any vector after a random rotation. A rotation that stays fixed
does not average out where all tokens share one large direction, which is why a null takes ten rotations or more.

Kurtosis of neurons (He et al. 2024) is another number: over the d coordinates' root mean squares s_j over tokens,
mean(s^4) / mean(s^2)^2, without a mean taken off: 1 if all are equally large, d if one is all.
"""

import torch
from jaxtyping import Float
from torch import Tensor

EQUAL = 16
"""Coordinates count as equal if their root mean square about their mean is at most so many of its roundings."""


def token_kurtosis(
    x: Float[Tensor, "*point token d_model"], scratch: Float[Tensor, "*point token d_model"] | None = None
) -> Float[Tensor, "*point token"]:
    """Each token's kurtosis over its coordinates; NaN where all coordinates are equal.

    Elementwise in the dtype of `x`, at least float32, where a token's number is good to 1e-5 up to 4,096 coordinates of
    which the largest is 300 times the rest. A token's root mean square about its mean has to be between 1e-16 and 1e16
    there, and a mean more than 30 times as large costs digits, because it is rounded.

    Args:
        x: vectors.
        scratch: memory of the same size to work in, in the dtype of the work, which saves more time than the arithmetic
            takes; without it gradients flow.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    d_model = x.shape[-1]
    mean = wide.mean(-1, keepdim=True)
    centred = torch.sub(wide, mean, out=scratch)
    norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    inverse = norm.reciprocal()  # fourth powers of the vector itself leave the range of float32 much sooner
    squares = (centred * inverse).square() if scratch is None else centred.mul_(inverse).square_()
    fourth = torch.linalg.vector_norm(squares, dim=-1).double().square()
    unit = (norm.double() * inverse.double())[..., 0]  # the reciprocal was rounded
    equal = norm <= EQUAL * torch.finfo(norm.dtype).eps * d_model**0.5 * mean.abs()
    return (d_model * fourth / unit.pow(4)).masked_fill(equal[..., 0], torch.nan)


def neuron_kurtosis(rms: Float[Tensor, " d_model"]) -> float:
    """The kurtosis over coordinates of their root mean squares over tokens (He et al. 2024)."""
    squares = rms.double().square()
    return float(squares.square().mean() / squares.mean().square())


def random_expectation(d_model: int) -> float:
    """The mean kurtosis of a vector in a uniformly random direction: 3 (d - 1) / (d + 1)."""
    return 3 * (d_model - 1) / (d_model + 1)
