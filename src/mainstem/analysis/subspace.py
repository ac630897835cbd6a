"""Subspaces of the stream that units read and write, and how two of them overlap beside random ones.

A unit's rows (or columns) R = U S V^T span the directions V it reads (or writes); the first of them hold the energy
sum S^2. Two spans with orthonormal rows V1 [k1, d], V2 [k2, d] have the principal angles arccos of the singular values
of V1 V2^T (Bjorck and Golub 1973), and the overlap

    ||P1 P2||_F^2 = ||V1 V2^T||_F^2     between 0 (across) and min(k1, k2) (one inside the other).

For random subspaces of the same sizes (Haar) its mean is k1 k2 / d and its variance

    2 k1 (d - k1) k2 (d - k2) / (d^2 (d - 1) (d + 2)).

The spectrum-matched overlap weighs each pair of directions by the energies they have, sum s_i^2 t_j^2 (u_i . v_j)^2 /
(sum s_i^2 sum t_j^2): the squared composition of the two sides, 1 / d on average if one is turned at random.

p-values count draws of random subspaces, the measured pair among them, so that the smallest is 1 / (draws + 1):
`p_disjoint` of an overlap so small, `p_shared` of one so large. Few directions of many are nearly across by chance:
there only an overlap smaller than theirs is called disjoint. Limits: outlier dimensions that all units use make spans
share; `dimension` says how much one dimension of the stream alone contributes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.errors import UsageError

LEVEL = 0.01
"""At which p a pair is called disjoint or shared."""

DRAWS = 500
BATCH = 50

Verdict = Literal["disjoint", "shared", "as random", "no test"]


@dataclass(frozen=True, eq=False)
class Span:
    """A subspace, the directions of most energy first.

    Attributes:
        directions: orthonormal rows.
        sizes: singular values of the rows that were given along them.
        energy: the share of their squared norm that the subspace holds.
        rank: of all that was given.
    """

    directions: Float[Tensor, "direction d_model"]
    sizes: Float[Tensor, " direction"]
    energy: float
    rank: int

    def __len__(self) -> int:
        return len(self.directions)


@dataclass(frozen=True)
class Overlap:
    """Two subspaces beside random ones.

    Attributes:
        sizes: their dimensions.
        d_model: of the stream.
        overlap: ||P1 P2||_F^2.
        expected, spread: mean and standard deviation over random subspaces of the same sizes, in closed form.
        sampled, sampled_spread: the same over the draws.
        z: (overlap - expected) / spread; None where the sizes leave nothing to chance.
        p_disjoint, p_shared: of an overlap so small and so large.
        weighted: the spectrum-matched overlap; `weighted_expected` and `weighted_spread` over draws, and its p-values.
        angles: principal angles in degrees, the smallest first.
        dimension, dimension_share: the dimension of the stream that gives most of the overlap, and its part of it.
        draws: how many random pairs were drawn.
    """

    sizes: tuple[int, int]
    d_model: int
    overlap: float
    expected: float
    spread: float
    sampled: float
    sampled_spread: float
    z: float | None
    p_disjoint: float
    p_shared: float
    weighted: float
    weighted_expected: float
    weighted_spread: float
    weighted_p_disjoint: float
    weighted_p_shared: float
    angles: tuple[float, ...]
    dimension: int
    dimension_share: float
    draws: int

    @property
    def verdict(self) -> Verdict:
        """Of the overlap at `LEVEL`; `no test` where one subspace is the whole stream."""
        if self.z is None:
            return "no test"
        if self.p_disjoint <= LEVEL:
            return "disjoint"
        return "shared" if self.p_shared <= LEVEL else "as random"


def span(rows: Float[Tensor, "row d_model"], rank: int | None = None, energy: float | None = None) -> Span:
    """The subspace of the largest singular values of rows: so many of them, or as hold so much energy.

    Args:
        rows: what reads, or columns that write, as rows.
        rank: how many directions; all if neither is given.
        energy: the share of the squared norm to hold, above 0 and up to 1.

    Raises:
        UsageError: if the rows are zero or not finite, or rank or energy make no sense.
    """
    if rank is not None and energy is not None:
        raise UsageError("A subspace is cut by rank or by energy, not by both", None, "Leave out one of them.")
    if not bool(torch.isfinite(rows).all()) or not bool(rows.any()):
        raise UsageError("The rows are zero or not finite, and span no subspace", None, "Take another unit.")
    wide = rows.double()
    _, sizes, directions = torch.linalg.svd(wide, full_matrices=False)
    full = int((sizes > max(wide.shape) * torch.finfo(rows.dtype).eps * sizes[0]).sum())
    shares = sizes.square().cumsum(0) / sizes.square().sum()
    kept = full
    if rank is not None:
        if not 1 <= rank <= full:
            raise UsageError(f"A rank of {rank} is not to be had", f"they have {full}", f"Give 1 to {full}.")
        kept = rank
    if energy is not None:
        if not 0 < energy <= 1:
            raise UsageError(f"An energy of {energy} is no share", None, "Give a number above 0, up to 1.")
        kept = min(int((shares < energy * (1 - 1e-12)).sum()) + 1, full)
    return Span(directions[:kept], sizes[:kept], float(shares[kept - 1]), full)


def expected_overlap(first: int, second: int, d_model: int) -> tuple[float, float]:
    """Mean and standard deviation of the overlap of random subspaces of two sizes."""
    d = d_model
    if d < 2:
        return float(first * second), 0.0
    variance = 2 * first * (d - first) * second * (d - second) / (d * d * (d - 1) * (d + 2))
    return first * second / d, variance**0.5


def overlap(first: Span, second: Span, draws: int = DRAWS, seed: int = 0) -> Overlap:
    """How two subspaces lie to each other, beside random ones of the same sizes and spectra.

    Raises:
        UsageError: if they are of streams of different widths, or there are no draws.
    """
    d_model = first.directions.shape[1]
    if second.directions.shape[1] != d_model or draws < 1:
        widths = f"{d_model} and {second.directions.shape[1]} dimensions, {draws} draws"
        raise UsageError("Subspaces of one stream and at least one draw are compared", widths)
    cosines = first.directions @ second.directions.to(first.directions).T
    weights = _weights(first, second)
    random, random_weighted = _random(weights, d_model, draws, seed)
    own, own_weighted = float(cosines.square().sum()), float((weights * cosines.square()).sum())
    expected, spread = expected_overlap(len(first), len(second), d_model)
    fixed = d_model in (len(first), len(second))
    by_dimension = ((cosines @ second.directions.to(cosines)) * first.directions).sum(0)
    place = int(by_dimension.argmax())
    disjoint, shared = _tails(random, own)
    weighted_disjoint, weighted_shared = _tails(random_weighted, own_weighted)
    return Overlap(
        sizes=(len(first), len(second)),
        d_model=d_model,
        overlap=own,
        expected=expected,
        spread=spread,
        sampled=float(random.mean()),
        sampled_spread=float(random.std(correction=0)),
        z=None if fixed else (own - expected) / spread,
        p_disjoint=disjoint,
        p_shared=shared,
        weighted=own_weighted,
        weighted_expected=1 / d_model,
        weighted_spread=float(random_weighted.std(correction=0)),
        weighted_p_disjoint=weighted_disjoint,
        weighted_p_shared=weighted_shared,
        angles=tuple(torch.linalg.svdvals(cosines).clamp(0, 1).arccos().rad2deg().tolist()),
        dimension=place,
        dimension_share=float(by_dimension[place] / own) if own > 0 else 0.0,
        draws=draws,
    )


def _weights(first: Span, second: Span) -> Float[Tensor, "row column"]:
    energies = [one.sizes.square() / one.sizes.square().sum() for one in (first, second)]
    return energies[0][:, None] * energies[1].to(energies[0])[None]


def _random(weights: Float[Tensor, "row column"], d_model: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Overlaps, plain and weighted, of draws of a random subspace with fixed coordinates.

    With G [k1, d] Gaussian and G G^T = L L^T, L^-1 G has orthonormal rows of a Haar subspace.
    """
    if weights.shape[0] > weights.shape[1]:
        weights = weights.T
    rows, columns = weights.shape
    generator = torch.Generator().manual_seed(seed)
    found = []
    for part in torch.arange(draws).split(BATCH):
        made = torch.randn(len(part), rows, d_model, generator=generator, dtype=torch.float64)
        lower = torch.linalg.cholesky(made @ made.mT)
        squares = torch.linalg.solve_triangular(lower, made[..., :columns], upper=False).square()
        found.append(torch.stack([squares.sum((-2, -1)), (squares * weights.cpu()).sum((-2, -1))]))
    plain, weighted = torch.cat(found, 1)
    return plain, weighted


def _tails(random: Tensor, own: float) -> tuple[float, float]:
    """The p of a value so small and of one so large."""
    slack = 1e-9 * max(abs(own), 1e-30)
    draws = len(random) + 1
    return (1 + int((random <= own + slack).sum())) / draws, (1 + int((random >= own - slack).sum())) / draws
