"""How much of what one unit writes another reads: composition from the weights, against an honest null.

For a reader R and a writer W the composition is ||R W|| / (||R|| ||W||), Frobenius norms (Elhage et al. 2021,
"Composition"). R is W_QK^T for Q-, W_QK for K- and W_OV for V-composition of a head, an MLP's input matrices or one
row of them; W is W_OV, an MLP's output matrix or one column. R and W come as few rows that have their Gram matrix,
so that ||R W||^2 = <R^T R, W W^T>. All pairs at once are one product of matrices whose rows are Gram matrices, taken a
block of d_model x d_model at a time: d_model^2 for a pair in place of d_model rank^2, and no such matrix is ever whole.
(Their cyclic shift, ||K O V Q^T|| for ||Q^T K O V||, is another number: an erratum of the paper.)

Nulls. If the writer were turned by a random rotation, its spectrum as it is, then exactly (Schur's lemma)
    E c^2 = 1 / d,   Var c^2 = 2 (r - 1/d) (w - 1/d) / ((d - 1) (d + 2)),
r and w the sums of fourth powers of singular values over the square of the sum of squares. `z` counts c^2 in these
standard deviations: pairs of different spectra can be compared by it. But weights of one model share directions, so
that |z| > 3 for pairs that cannot compose, too. So the null of a verdict is empirical: the acausal pairs of the same
model, whose writer comes after the reader, as many layers apart as the pair (near layers are alike in both directions
of time). p is the rank of z among them, and the false discovery rate that of Benjamini and Hochberg (1995), over the
pairs of one band of distances.

Cost: n^2 d_model^2 for n units. Limits: weights only, so no pattern and no scale of a norm is in it; acausal pairs are
no draws of independent pairs; p cannot be less than one over their number; each band is a family of its own, and heads
that share keys or values make pairs that stand or fall together (20 of 194,560 pairs of a random model passed at 0.05).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mainstem.analysis.false_discovery import RATE, p_values, q_values
from mainstem.errors import UsageError
from mainstem.units import Unit

BLOCK = 96
"""Dimensions of the stream in one block of Gram matrices."""

EDGE = 3.0
"""Shared directions have this many times the largest weight that independent random subspaces would give one."""


@dataclass(frozen=True, eq=False)
class Spectra:
    """What the nulls need to know of readers or writers.

    Attributes:
        units: whose they are.
        d_model: of the stream.
        norms: of the matrices as they are.
        fourth: the sum of fourth powers of singular values, of norm 1.
    """

    units: tuple[Unit, ...]
    d_model: int
    norms: Float[Tensor, " unit"]
    fourth: Float[Tensor, " unit"]

    @property
    def defined(self) -> Bool[Tensor, " unit"]:
        """Which have a norm other than 0."""
        return self.norms > 0


@dataclass(frozen=True, eq=False)
class Stack(Spectra):
    """Readers or writers, each as `rows` with its Gram matrix, of Frobenius norm 1.

    Attributes:
        rows: rows that are all zero fill up units of lower rank; a unit of norm 0 has no others.
    """

    rows: Float[Tensor, "unit row d_model"]

    def without(self, directions: Float[Tensor, "d_model direction"]) -> Spectra:
        """With orthonormal directions of the stream taken out; what nothing is left of has norm 0."""
        along = self.rows @ directions.to(self.rows)
        return Spectra(self.units, self.d_model, *_spectrum(self.rows @ self.rows.mT - along @ along.mT, NOTHING**2))


NOTHING = 1e-4
"""What is left of a matrix of norm 1 and counts as nothing."""


def stack(units: Sequence[Unit], rows: Float[Tensor, "unit row d_model"]) -> Stack:
    """Readers or writers from rows with their Gram matrices."""
    norms, fourth = _spectrum(rows @ rows.mT, 0.0)
    scale = torch.where(norms > 0, 1 / norms.clamp_min(torch.finfo(norms.dtype).tiny), 0.0)
    return Stack(tuple(units), rows.shape[-1], norms, fourth, rows * scale[:, None, None])


def _spectrum(grams: Float[Tensor, "unit row row"], least: float) -> tuple[Tensor, Tensor]:
    """The Frobenius norm of matrices M, and the sum of fourth powers of their singular values over its own.

    `grams` are M M^T; squared norms up to `least` count as 0.
    """
    squares = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
    squares = torch.where(squares > least, squares, 0.0)
    safe = torch.where(squares > 0, squares, 1.0)
    return squares.sqrt(), torch.where(squares > 0, (grams / safe[:, None, None]).pow(2).sum((-2, -1)), 0.0)


def squared(readers: Stack, writers: Stack) -> Float[Tensor, "reader writer"]:
    """The squared compositions of all pairs."""
    d_model = readers.rows.shape[-1]
    if readers.rows.shape[1] * writers.rows.shape[1] <= d_model:
        return _squared_directly(readers.rows, writers.rows)
    sides = readers.rows, writers.rows
    total = sides[0].new_zeros(len(sides[0]), len(sides[1]), dtype=torch.float64)
    for i in range(0, d_model, BLOCK):
        for j in range(i, d_model, BLOCK):
            grams = [(one[..., i : i + BLOCK].mT @ one[..., j : j + BLOCK]).flatten(1) for one in sides]
            total += (1 if i == j else 2) * (grams[0] @ grams[1].T)  # Gram matrices are symmetric
    return total.clamp_(0.0, 1.0)


def _squared_directly(
    readers: Float[Tensor, "reader _ d_model"], writers: Float[Tensor, "writer _ d_model"]
) -> Float[Tensor, "reader writer"]:
    """The same by multiplying each pair of few rows out: neurons have one or two."""
    few, many = (readers, writers) if len(readers) <= len(writers) else (writers, readers)
    total = torch.stack([(many @ one.mT).pow(2).sum((1, 2)) for one in few]).double().clamp_(0.0, 1.0)
    return total if few is readers else total.T


def squared_without(
    found: Float[Tensor, "reader writer"],
    readers: Stack,
    writers: Stack,
    directions: Float[Tensor, "d_model direction"],
) -> Float[Tensor, "reader writer"]:
    """The squared compositions without some orthonormal directions U of the stream, from those with them.

    ||R (1 - U U^T) W||^2 = ||R W||^2 - 2 <G_R U, G_W U> + <U^T G_R U, U^T G_W U> with Gram matrices G, over the squared
    norms of what is left of R and of W.
    """
    read, written = (side.rows @ directions.to(side.rows) for side in (readers, writers))
    ends = [(side.rows.mT @ one).flatten(1) for side, one in ((readers, read), (writers, written))]
    cores = [(one.mT @ one).flatten(1) for one in (read, written)]
    left = [(1 - one.double().pow(2).sum((1, 2))).clamp_min(1e-12) for one in (read, written)]
    total = found - 2 * (ends[0] @ ends[1].T) + cores[0] @ cores[1].T
    return (total / (left[0][:, None] * left[1][None])).clamp(0.0, 1.0)


def rotation_deviation(readers: Spectra, writers: Spectra) -> Float[Tensor, "reader writer"]:
    """The standard deviation of squared compositions under a random rotation; their mean is 1 / d_model."""
    d = readers.d_model
    r, w = ((side.fourth.double() - 1 / d).clamp_min(0) for side in (readers, writers))
    return (2 * r[:, None] * w[None] / ((d - 1) * (d + 2))).sqrt()


def shared_directions(stacks: Iterable[Stack]) -> Float[Tensor, "d_model direction"]:
    """Directions that many units read or write alike: outliers among the eigenvectors of the mean Gram matrix.

    An eigenvalue counts as an outlier above `EDGE` times (1 + sqrt(d_model / sum of ranks))^2 / d_model, the largest
    that as many independent random subspaces give (Marchenko and Pastur 1967). Orthonormal columns, strongest first.
    The stacks are asked for one after the other.
    """
    gram, ranks = torch.zeros(()), 0
    for side in stacks:
        flat = side.rows.flatten(0, 1)
        gram, ranks = gram + flat.T @ flat, ranks + int(flat.ne(0).any(-1).sum())
        del side, flat  # before the next is made
    gram = gram.double()
    values, vectors = torch.linalg.eigh(gram / gram.trace().clamp_min(1e-30))
    edge = EDGE * (1 + (len(gram) / max(ranks, 1)) ** 0.5) ** 2 / len(gram)
    return vectors[:, values > edge].flip(1)


@dataclass(frozen=True, eq=False)
class Compositions:
    """Compositions of one kind.

    Attributes:
        kind: "q", "k", "v" or "mlp".
        readers, writers: the units.
        order: 1 where the writer comes before the reader, -1 where after, 0 where neither.
        distance: layers apart.
        defined: where both norms are other than 0; elsewhere numbers are 0 and p and q are 1.
        strength: the composition.
        z: its square in standard deviations of a random rotation, above the mean.
    """

    kind: str
    readers: tuple[Unit, ...]
    writers: tuple[Unit, ...]
    order: Int[Tensor, "reader writer"]
    distance: Int[Tensor, "reader writer"]
    defined: Bool[Tensor, "reader writer"]
    strength: Float[Tensor, "reader writer"]
    z: Float[Tensor, "reader writer"]
    d_model: int

    @cached_property
    def p(self) -> Float[Tensor, "reader writer"]:
        """For being above the acausal pairs."""
        return self._judged(self.z)[0]

    @cached_property
    def q(self) -> Float[Tensor, "reader writer"]:
        """The smallest false discovery rate at which a pair is above the acausal pairs."""
        return self._judged(self.z)[1]

    @cached_property
    def q_below(self) -> Float[Tensor, "reader writer"]:
        """The same for being below them."""
        return self._judged(-self.z)[1]

    @property
    def causal(self) -> Bool[Tensor, "reader writer"]:
        """Pairs that can compose."""
        return (self.order > 0) & self.defined

    @property
    def acausal(self) -> Bool[Tensor, "reader writer"]:
        """Pairs whose writer comes after the reader."""
        return (self.order < 0) & self.defined

    @property
    def null(self) -> float:
        """The mean squared composition under a random rotation, as a composition: 1 / sqrt(d_model)."""
        return self.d_model**-0.5

    def place(self, reader: Unit, writer: Unit) -> tuple[int, int]:
        """Where a pair is in the tables.

        Raises:
            UsageError: if there is no such pair, or the norm of one of them is 0.
        """
        if reader not in self.readers or writer not in self.writers:
            raise UsageError(f"There is no pair of {reader} and {writer}", None, "Name a reader and a writer.")
        found = self.readers.index(reader), self.writers.index(writer)
        if not bool(self.defined[found]):
            zero = "the norm of one of the two is 0"
            raise UsageError(f"The composition of {reader} with {writer} is not defined", zero, "Name another pair.")
        return found

    def top(self, count: int) -> list[tuple[int, int]]:
        """The causal pairs above the null, then the others, each by z; as places in the tables."""
        spread = self.z.max() - self.z.min() + 1 if self.z.numel() else 0
        scores = torch.where(self.causal, self.z, torch.full_like(self.z, -torch.inf))
        scores = torch.where(self.causal & (self.q <= RATE), scores + spread, scores).flatten()
        best = scores.topk(min(count, int(self.causal.sum()))).indices.tolist()
        return [divmod(place, len(self.writers)) for place in best]

    def _judged(self, z: Tensor) -> tuple[Tensor, Tensor]:
        p, q = torch.ones_like(z), torch.ones_like(z)
        bands = self.distance.clamp_min(1).double().log2().floor()
        for band in bands.unique().tolist():
            causal, acausal = (side & (bands == band) for side in (self.causal, self.acausal))
            if bool(causal.any()) and bool(acausal.any()):
                p[causal] = p_values(z[causal], z[acausal]).double()
                q[causal] = q_values(p[causal])
        return p, q


def compositions(
    kind: str,
    readers: Spectra,
    writers: Spectra,
    order: Int[Tensor, "reader writer"],
    distance: Int[Tensor, "reader writer"],
    found: Float[Tensor, "reader writer"],
) -> Compositions:
    """All compositions of readers with writers, given their squares."""
    d_model, deviation = readers.d_model, rotation_deviation(readers, writers)
    defined = readers.defined[:, None] & writers.defined[None]
    z = torch.where(defined & (deviation > 0), (found - 1 / d_model) / deviation.clamp_min(1e-300), 0.0)
    strength = torch.where(defined, found.sqrt(), 0.0)
    return Compositions(kind, readers.units, writers.units, order, distance, defined, strength, z, d_model)
