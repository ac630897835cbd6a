"""The parts of a decomposition, kept in the form in which they are cheap.

A part writes coefficient x direction into a sublayer's output, and a linear map carries that to the stream before the
final norm. Parts come in groups that share the map: plain vectors (sublayers, biases, roundings, heads), columns of a
matrix (neurons, attention neurons), and pattern x value (subvalues). A group answers four questions without ever
holding a vector for each of its units: the inner product of each with a direction of the stream, the squared length of
each behind a linear map, their sum, and the vectors of a chosen few.

Memory: weights, patterns and values are referred to, never copied whole; subvalues are taken one key/value head at a
time, columns a few hundred at a time.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.model.graph import LinearMap
from mainstem.units import Unit

Vector = Float[Tensor, " d_model"]
Directions = Float[Tensor, " d_model"] | Float[Tensor, "d_model top"]
Scores = Float[Tensor, " part"] | Float[Tensor, "part top"]
Rows = Callable[[Tensor], Tensor]
"""A linear map of rows [n, d_model] to rows of any width, in their dtype."""
CHUNK = 512


def carry(tail: LinearMap, vectors: Float[Tensor, "part d_model"]) -> Float[Tensor, "part d_model"]:
    """Vectors added at a write, as they are in the stream before the final norm."""
    return tail(vectors[None].double())[0]


def pull_back(tail: LinearMap, direction: Directions) -> Directions:
    """The direction (or directions) whose inner product with a write is that of `direction` with the carried write."""
    flat = direction if direction.dim() == 2 else direction[:, None]
    out = torch.zeros_like(flat)
    if tail.diag is not None:
        out = out + tail.diag[0].to(flat)[:, None] * flat
    if tail.left is not None and tail.right is not None:
        out = out + tail.right[0].to(flat) @ (tail.left[0].to(flat).T @ flat)
    return out if direction.dim() == 2 else out[:, 0]


def scalar_of(tail: LinearMap) -> float | None:
    """The number that a map multiplies by, if that is all it does."""
    if tail.diag is None or tail.left is not None:
        return None
    first = tail.diag[0, 0]
    return float(first) if bool((tail.diag == first).all()) else None


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor or several."""
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


@dataclass(frozen=True, eq=False)
class Group:
    """Parts with one tail. `sublayer` is the sublayer that they refine, None for whole writes, biases, roundings.

    Attributes:
        units: the address of each part.
        kind: what they are.
        coefficients: [part]; what multiplies the direction (activation, pattern weight, 1).
        node: where in the stream graph they are added.
        tail: the map from there to the stream.
        bound: makes [d_model], the error to expect of the group's sum against the model's own arithmetic, before
            the tail; computed when a certificate asks for it.
    """

    units: Sequence[Unit]
    kind: str
    coefficients: Float[Tensor, " part"]
    node: int
    tail: LinearMap
    sublayer: Unit | None
    bound: Callable[[], Tensor] | None

    @property
    def pieces(self) -> "tuple[Group, ...]":
        """The groups that this one is the sum of, part by part: itself, unless it is `Joined`."""
        return (self,)

    def places(self, unit: Unit) -> list[int]:
        """Which of the parts have this address."""
        if not isinstance(self.units, UnitGrid):
            return [i for i, own in enumerate(self.units) if own == unit]
        place = bisect_left(self.units, unit)  # a grid is in the order of its addresses
        return [place] if place < len(self.units) and self.units[place] == unit else []

    def raw(self, index: Int[Tensor, " top"]) -> Float[Tensor, "top d_model"]:
        """The chosen parts as they are written, before the tail."""
        raise NotImplementedError

    def directions(self, index: Int[Tensor, " top"]) -> Float[Tensor, "top d_model"]:
        """What the coefficients of the chosen parts multiply, before the tail: raw is coefficient x direction."""
        raise NotImplementedError

    def raw_dot(self, direction: Directions) -> Scores:
        """Inner products of the parts, before the tail, with a direction or several, in the direction's dtype."""
        raise NotImplementedError

    def raw_squares(self, rows: Rows | None, dtype: torch.dtype) -> Float[Tensor, " part"]:
        """Squared lengths of the parts, before the tail, behind a linear map (None: as they are), float64."""
        raise NotImplementedError

    def raw_total(self) -> Vector:
        """The sum of the parts before the tail."""
        raise NotImplementedError

    def vectors(self, index: Int[Tensor, " top"]) -> Float[Tensor, "top d_model"]:
        """The chosen parts in the stream before the final norm."""
        return carry(self.tail, self.raw(index))

    def dot(self, direction: Directions) -> Scores:
        """Inner products of the parts in the stream with a direction [d_model] or several [d_model, n]."""
        return self.raw_dot(pull_back(self.tail, direction))

    @cached_property
    def written(self) -> Vector:
        """The sum of the parts before the tail, computed once."""
        return self.raw_total()

    def total(self) -> Vector:
        """The sum of the parts in the stream."""
        return carry(self.tail, self.written[None])[0]

    def __len__(self) -> int:
        return len(self.units)


@dataclass(frozen=True, eq=False)
class Vectors(Group):
    """Parts given as vectors."""

    values: Float[Tensor, "part d_model"]

    def raw(self, index):
        """The chosen parts as they are written."""
        return self.values[index].double()

    def directions(self, index):
        """The vectors themselves: their coefficients are 1."""
        return self.raw(index)

    def raw_dot(self, direction):
        """Inner products before the tail."""
        return self.values.to(direction) @ direction

    def raw_squares(self, rows, dtype):
        """Squared lengths before the tail."""
        values = self.values.double()
        return (values if rows is None else rows(values)).pow(2).sum(-1)

    def raw_total(self):
        """The sum before the tail."""
        return self.values.double().sum(0)


@dataclass(frozen=True, eq=False)
class Columns(Group):
    """Parts that are coefficients times columns of a matrix [d_model, part]."""

    matrix: Float[Tensor, "d_model part"]

    def raw(self, index):
        """The chosen parts as they are written."""
        return (self.matrix[:, index].double() * self.coefficients[index].double()).T

    def directions(self, index):
        """Columns of the matrix."""
        return self.matrix[:, index].double().T

    def raw_dot(self, direction):
        """Inner products before the tail."""
        coefficients = self.coefficients.to(direction)
        if direction.dim() == 1:
            return coefficients * torch.cat([columns.to(direction).T @ direction for columns in self._chunks()])
        # rows first: many times faster than [part, d_model] @ [d_model, few]
        return (direction.T.contiguous() @ self.matrix.to(direction)).mul_(coefficients).T

    def raw_squares(self, rows, dtype):
        """Squared lengths before the tail."""
        sizes = []
        for columns in self._chunks():
            columns = columns.to(dtype)
            sizes.append((columns if rows is None else rows(columns.T).T).pow(2).sum(0))
        return torch.cat(sizes).double() * self.coefficients.double().pow(2)

    def raw_total(self):
        """The sum before the tail."""
        parts = zip(self._chunks(), self.coefficients.double().split(CHUNK), strict=True)
        return torch.stack([columns.double() @ own for columns, own in parts]).sum(0)

    def _chunks(self) -> Sequence[Float[Tensor, "d_model part"]]:
        """Some columns at a time: copies in another dtype that stay in the cache take a fifth of the time."""
        return self.matrix.split(CHUNK, dim=1)


@dataclass(frozen=True, eq=False)
class Subvalues(Group):
    """Heads x sources: pattern weight times the source's value through W_O; `coefficients` is the pattern, flat.

    `values` [n_key_value_heads, source, d_value]; `matrix` is W_O, whose input channels are scaled by `multiplier` on
    the way from attention's result, and `channels` says where a head's coordinates are among them; `group` [n_heads]
    says which values a head reads, each of them as many heads.
    """

    pattern: Float[Tensor, "n_heads source"]
    values: Float[Tensor, "n_key_value_heads source d_value"]
    matrix: Float[Tensor, "d_model d_in"]
    multiplier: Float[Tensor, " d_in"]
    channels: Int[Tensor, "n_heads d_value"]
    group: Int[Tensor, " n_heads"]

    def raw(self, index):
        """The chosen parts as they are written."""
        head, source = index // self.pattern.shape[1], index % self.pattern.shape[1]
        return self.directions(index) * self.pattern[head, source][:, None]

    def directions(self, index):
        """The sources' values through W_O."""
        head, source = index // self.pattern.shape[1], index % self.pattern.shape[1]
        weights = self.values[self.group[head], source].double()
        out = torch.empty(len(index), self.matrix.shape[0], dtype=weights.dtype, device=weights.device)
        for number in head.unique():
            own, channels = head == number, self.channels[number]
            out[own] = (weights[own] * self.multiplier[channels]) @ self.matrix.T[channels].double()
        return out

    def raw_dot(self, direction):
        """Inner products before the tail."""
        flat = direction if direction.dim() == 2 else direction[:, None]
        read = (flat.T.contiguous() @ self.matrix.to(flat)) * self.multiplier.to(flat)
        order = self.group.argsort(stable=True)  # heads that read the same values one after the other
        shared = read[:, self.channels[order]].unflatten(1, (len(self.values), -1))
        own = torch.einsum("ksj,nkgj->kgsn", self.values.to(flat), shared).flatten(0, 1)
        own *= self.pattern[order].to(flat)[:, :, None]
        out = torch.empty_like(own).index_copy_(0, order, own)
        return out.flatten(0, 1) if direction.dim() == 2 else out[:, :, 0].flatten()

    def raw_squares(self, rows, dtype):
        """Squared lengths before the tail, float64 throughout.

        Of the vectors where a head has fewer sources than dimensions; otherwise value . (Gram matrix of the head's
        output) . value, so that no more than W_O is ever held.
        """
        if self.values.shape[1] < self.values.shape[2]:
            values = self.values.double()[self.group] * self.multiplier[self.channels][:, None]
            written = (values @ self._by_head().double()).flatten(0, 1)
            sizes = (written if rows is None else rows(written)).pow(2).sum(-1)
            return sizes * self.pattern.flatten().pow(2)
        out = torch.empty(self.pattern.shape, dtype=torch.float64, device=self.pattern.device)
        for number, value in enumerate(self.values):
            heads, value = torch.nonzero(self.group == number).flatten(), value.double()
            channels = self.channels[heads]
            flat = channels.reshape(-1)
            written = self.matrix.T[flat].double() * self.multiplier[flat, None]
            written = (written if rows is None else rows(written)).unflatten(0, channels.shape)
            out[heads] = ((value @ (written @ written.mT)) * value).sum(-1).clamp_min(0)
        return (out * self.pattern.pow(2)).flatten()

    def _by_head(self) -> Float[Tensor, "n_heads d_value d_model"]:
        """W_O by heads; where their channels lie one after the other, as they mostly do, no copy."""
        rows = self.matrix.T
        if torch.equal(self.channels.flatten(), torch.arange(len(rows), device=self.channels.device)):
            return rows.unflatten(0, self.channels.shape)
        return rows[self.channels]

    def raw_total(self):
        """The sum before the tail."""
        entering = torch.zeros_like(self.multiplier)
        for number, value in enumerate(self.values):
            heads = torch.nonzero(self.group == number).flatten()
            entering[self.channels[heads].reshape(-1)] = (self.pattern[heads] @ value.double()).reshape(-1)
        return self.matrix.double() @ (entering * self.multiplier)


@dataclass(frozen=True, eq=False)
class Joined(Group):
    """Parts that are written in several places at once, such as by a matrix and by the adapter beside it.

    Each part is the sum of its pieces, and each piece has a tail of its own; `coefficients`, `node` and `tail` are
    those of the first, and bounds are asked of the pieces.
    """

    members: tuple[Group, ...]

    @property
    def pieces(self):
        """The groups of pieces, with the same units in the same order."""
        return self.members

    def raw(self, index):
        """The chosen parts as they are written: the sum over the pieces, each before its own tail."""
        return summed([piece.raw(index) for piece in self.members])

    def directions(self, index):
        """What the coefficients multiply: the sum over the pieces, each before its own tail."""
        return summed([piece.directions(index) for piece in self.members])

    def raw_dot(self, direction):
        """Inner products before the tails."""
        return summed([piece.raw_dot(direction) for piece in self.members])

    def raw_total(self):
        """The sum before the tails."""
        return summed([piece.written for piece in self.members])

    def vectors(self, index):
        """The chosen parts in the stream."""
        return summed([piece.vectors(index) for piece in self.members])

    def dot(self, direction):
        """Inner products of the parts in the stream."""
        return summed([piece.dot(direction) for piece in self.members])

    def total(self):
        """The sum of the parts in the stream."""
        return summed([piece.total() for piece in self.members])


def joined(groups: Sequence[Group]) -> Group:
    """One group for pieces of the same units."""
    first = groups[0]
    if len(groups) == 1:
        return first
    own = (first.units, first.kind, first.coefficients, first.node, first.tail, first.sublayer)
    return Joined(*own, None, tuple(groups))


class UnitGrid(Sequence[Unit]):
    """Addresses made when asked for, in ascending order: thousands of units need no objects until they are shown."""

    def __init__(self, size: int, make) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.make(int(index) % self.size)
