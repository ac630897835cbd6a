"""What is kept of a stream of vectors: sums that can be added, so that memory does not grow with the text.

The moments of two batches added are those of both together (Chan, Golub, LeVeque 1983: means and sums of squared
deviations merge without cancellation), so that it does not matter how a text is cut into batches. Elementwise work is
in float32 at least, what is added up in float64.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.kurtosis import neuron_kurtosis, token_kurtosis

ABOUT = 64
"""Deviations are summed about the mean of so many vectors of a batch, so near the mean of all that little cancels."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over some tokens of vectors with d_model coordinates.

    Attributes:
        tokens: how many.
        varied: how many of them do not have all coordinates equal: those that have a kurtosis.
        kurtosis_sum: the sum of these tokens' kurtosis over coordinates.
        mean: each coordinate's mean.
        deviation: the sum of its squared deviations from the mean.
        magnitude: its largest magnitude.
    """

    tokens: int
    varied: int
    kurtosis_sum: float
    mean: Float[Tensor, " d_model"]
    deviation: Float[Tensor, " d_model"]
    magnitude: Float[Tensor, " d_model"]

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "token d_model"],
        magnitude: Float[Tensor, " d_model"] | None = None,
        scratch: Float[Tensor, "token d_model"] | None = None,
    ) -> "Moments":
        """Those of one batch; of none at all where it is empty.

        Args:
            x: vectors.
            magnitude: each coordinate's largest magnitude, where it is known.
            scratch: memory of the same size, in the dtype of the work, that is written over: fresh memory costs more
                than what is computed in it.
        """
        if not len(x):
            empty = torch.zeros(x.shape[1], dtype=torch.float64)
            return cls(0, 0, 0.0, empty, empty, empty)
        x = x if x.dtype == torch.float64 else x.float()
        scratch = torch.empty_like(x) if scratch is None else scratch
        magnitude = torch.abs(x, out=scratch).amax(0) if magnitude is None else magnitude.to(x)
        kurtosis = token_kurtosis(x, scratch)
        varied = ~kurtosis.isnan()
        about = x[:: -(-len(x) // ABOUT)].mean(0)
        centred = torch.sub(x, about, out=scratch)
        rest, squares = centred.sum(0), centred.square_().sum(0)
        # one conversion for all, because on so few numbers each operation costs as much as its call
        magnitude, about, rest, squares = torch.stack([magnitude, about, rest, squares]).double().cpu()
        rest = rest / len(x)  # from there to the mean
        return cls(
            len(x),
            int(varied.sum()),
            float(kurtosis.nansum()),
            about + rest,
            squares.sub(rest.square(), alpha=len(x)).clamp_min(0),
            magnitude,
        )

    def __add__(self, other: "Moments") -> "Moments":
        if not self.tokens or not other.tokens:
            return other if not self.tokens else self
        tokens = self.tokens + other.tokens
        step = other.mean - self.mean
        return Moments(
            tokens,
            self.varied + other.varied,
            self.kurtosis_sum + other.kurtosis_sum,
            self.mean + step * (other.tokens / tokens),
            self.deviation + other.deviation + step.square() * (self.tokens * other.tokens / tokens),
            torch.maximum(self.magnitude, other.magnitude),
        )

    @property
    def kurtosis(self) -> float:
        """The mean over tokens of their kurtosis (Elhage, Lasenby, Olah 2023)."""
        return self.kurtosis_sum / self.varied if self.varied else float("nan")

    @property
    def variance(self) -> Float[Tensor, " d_model"]:
        """Each coordinate's variance over tokens (of all, not estimated from a sample)."""
        return self.deviation / self.tokens

    @property
    def rms(self) -> Float[Tensor, " d_model"]:
        """Each coordinate's root mean square over tokens."""
        return (self.variance + self.mean.square()).sqrt()

    @property
    def neuron_kurtosis(self) -> float:
        """The kurtosis over coordinates of their root mean squares (He et al. 2024)."""
        return neuron_kurtosis(self.rms)
