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


def token_kurtosis(
    x: Float[Tensor, "token d_model"], scratch: Float[Tensor, "token d_model"] | None = None
) -> Float[Tensor, " token"]:
    """Each token's kurtosis over its coordinates; NaN where all coordinates are equal.

    Elementwise in the dtype of `x`, at least float32, where a token's number is good to 1e-5 up to 4,096 coordinates of
    which the largest is 300 times the rest. A token's root mean square about its mean has to be between 1e-16 and 1e16
    there, and a mean more than 30 times as large costs digits, because it is rounded.

    Args:
        x: vectors.
        scratch: memory of the same size and dtype to work in, which saves more time than the arithmetic takes; without
            it gradients flow.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    d_model = x.shape[1]
    centred = torch.sub(wide, wide.mean(1, keepdim=True), out=scratch)
    second = torch.linalg.vector_norm(centred, dim=1).square() / d_model
    inverse = second.reciprocal()  # fourth powers of the vector itself leave the range of float32 much sooner
    squares = centred.square() * inverse[:, None] if scratch is None else centred.square_().mul_(inverse[:, None])
    fourth = torch.linalg.vector_norm(squares, dim=1).double().square() / d_model
    kurtosis = fourth / (second.double() * inverse.double()).square()
    least = (kurtosis < 1 + 1e-3).nonzero()[:, 0]  # what a rounded mean leaves of equal coordinates has a kurtosis of 1
    if len(least):
        kurtosis[least] = kurtosis[least].masked_fill((x[least] == x[least, :1]).all(1), torch.nan)
    return kurtosis


def neuron_kurtosis(rms: Float[Tensor, " d_model"]) -> float:
    """The kurtosis over coordinates of their root mean squares over tokens (He et al. 2024)."""
    squares = rms.double().square()
    return float(squares.square().mean() / squares.mean().square())


def random_expectation(d_model: int) -> float:
    """The mean kurtosis of a vector in a uniformly random direction: 3 (d - 1) / (d + 1)."""
    return 3 * (d_model - 1) / (d_model + 1)
