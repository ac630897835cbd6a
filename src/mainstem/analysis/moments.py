"""What is kept of a stream of vectors: sums that can be added, so that memory does not grow with the text.

The moments of two batches added are those of both together (Chan, Golub, LeVeque 1983: means and sums of squared
deviations merge without cancellation), so that it does not matter how a text is cut into batches. Elementwise work is
in float32 at least, what is added up in float64. All is done for several places at once, because on the few numbers
that a batch leaves of each, an operation costs as much as its call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.kurtosis import neuron_kurtosis, token_kurtosis

ABOUT = 64
"""Deviations are summed about the mean of so many vectors of a batch, so near the mean of all that little cancels."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over some tokens of vectors with d_model coordinates, at one place or at several.

    Attributes:
        tokens: how many.
        varied: how many of them do not have all coordinates equal: those that have a kurtosis.
        kurtosis_sum: the sum of these tokens' kurtosis over coordinates.
        mean: each coordinate's mean.
        deviation: the sum of its squared deviations from the mean.
        magnitude: its largest magnitude.
    """

    tokens: Int[Tensor, "*point"]
    varied: Int[Tensor, "*point"]
    kurtosis_sum: Float[Tensor, "*point"]
    mean: Float[Tensor, "*point d_model"]
    deviation: Float[Tensor, "*point d_model"]
    magnitude: Float[Tensor, "*point d_model"]

    @classmethod
    def none(cls, *places: int, d_model: int) -> "Moments":
        """Of no tokens, at some places."""
        counts, sums = torch.zeros(2, *places, dtype=torch.int64), torch.zeros(3, *places, d_model, dtype=torch.float64)
        return cls(counts[0], counts[1], torch.zeros(places, dtype=torch.float64), sums[0], sums[1], sums[2])

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "*point token d_model"],
        magnitude: Float[Tensor, "*point d_model"] | None = None,
        scratch: Float[Tensor, "*point token d_model"] | None = None,
    ) -> "Moments":
        """Those of one batch.

        Args:
            x: vectors.
            magnitude: each coordinate's largest magnitude, where it is known.
            scratch: memory of the same size, in the dtype of the work, that is written over: fresh memory costs more
                than what is computed in it.
        """
        *places, tokens, d_model = x.shape
        if not tokens:
            return cls.none(*places, d_model=d_model)
        x = x if x.dtype == torch.float64 else x.float()
        magnitude = x.abs().amax(-2) if magnitude is None else magnitude
        kurtosis = token_kurtosis(x, scratch).cpu()
        about = x[..., :: -(-tokens // ABOUT), :].mean(-2, keepdim=True)
        centred = torch.sub(x, about, out=scratch)
        rest = centred.sum(-2).double().cpu() / tokens  # from there to the mean
        squares = centred.square_().sum(-2).double().cpu()
        return cls(
            torch.full(places, tokens),
            (~kurtosis.isnan()).sum(-1),
            kurtosis.nansum(-1),
            about.squeeze(-2).double().cpu() + rest,
            squares.sub(rest.square(), alpha=tokens).clamp_min(0),
            magnitude.double().cpu(),
        )

    def __getitem__(self, rows: int | None | Int[Tensor, " point"]) -> "Moments":
        """Those at some of the places, as a tensor is indexed."""
        return self.each(lambda part: part[rows])

    def __add__(self, other: "Moments") -> "Moments":
        tokens = self.tokens + other.tokens
        step = other.mean - self.mean
        share = (other.tokens.double() / tokens.clamp_min(1))[..., None]
        return Moments(
            tokens,
            self.varied + other.varied,
            self.kurtosis_sum + other.kurtosis_sum,
            self.mean + step * share,
            self.deviation + other.deviation + step.square() * (self.tokens[..., None] * share),
            torch.maximum(self.magnitude, other.magnitude),
        )

    def each(self, function: Callable[..., Tensor], *others: "Moments") -> "Moments":
        """The moments whose every part is made of those of this and of others."""
        every = ([getattr(moments, part.name) for part in fields(self)] for moments in (self, *others))
        return Moments(*(function(*parts) for parts in zip(*every, strict=True)))

    @property
    def kurtosis(self) -> float:
        """The mean over one place's tokens of their kurtosis (Elhage, Lasenby, Olah 2023); NaN where none has one."""
        return float(self.kurtosis_sum / self.varied)

    @property
    def variance(self) -> Float[Tensor, "*point d_model"]:
        """Each coordinate's variance over tokens (of all, not estimated from a sample)."""
        return self.deviation / self.tokens[..., None]

    @property
    def rms(self) -> Float[Tensor, "*point d_model"]:
        """Each coordinate's root mean square over tokens."""
        return (self.variance + self.mean.square()).sqrt()

    @property
    def neuron_kurtosis(self) -> float:
        """The kurtosis over one place's coordinates of their root mean squares (He et al. 2024)."""
        return neuron_kurtosis(self.rms)


class MomentTable:
    """The moments at many places of one width, to which batches of all of them are added at once."""

    def __init__(self, d_model: int) -> None:
        self.row_of: dict[int, int] = {}
        self.moments = Moments.none(0, d_model=d_model)

    def add(self, places: Sequence[int], more: Moments) -> None:
        """Adds the moments of a batch at some places, each of them named once."""
        new = [place for place in places if place not in self.row_of]
        if new:
            self.row_of |= {place: len(self.row_of) + row for row, place in enumerate(new)}
            none = Moments.none(len(new), d_model=more.mean.shape[1])
            self.moments = self.moments.each(lambda *parts: torch.cat(parts), none)
        rows = torch.tensor([self.row_of[place] for place in places])
        self.moments.each(lambda part, sums: part.index_copy_(0, rows, sums), self.moments[rows] + more)

    def of(self, place: int) -> Moments | None:
        """The moments at a place; None where none were added."""
        if place not in self.row_of:
            return None
        return self.moments[self.row_of[place]].each(torch.clone)  # what is added later changes the table in place
