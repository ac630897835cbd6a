"""How a neuron's activation comes from the rows that read the stream, told from what the model computed.

The calls between the reads of an MLP and the neurons (what its output matrix reads) are kept as a program. What it
does is seen by running it: which entry of which read reaches which neuron (from gradients, whose ratio to each other
is the neuron's number), and whether a neuron is act(gate) x up (twice one of the two entries, whatever its sign,
gives twice the neuron) or act(input) alone. No name of an activation is looked up.

Cost: a few runs of the elementwise calls, when a neuron is first asked about. Limits: neurons that share an entry (a
factor for the whole token), that mix entries, or whose two entries are no product are refused with the reason.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.model.norms import PROBE
from mainstem.model.program import Program, extract
from mainstem.model.recording import Value
from mainstem.model.stream import is_weight_product

PIECES = 256
"""How many pieces of the ray are tried; an activation that rounds on the way never becomes exact."""

NOT_AGAIN = "the calls between the reads and the neurons cannot be run again"
FAILURES = (RuntimeError, TypeError, ValueError, IndexError)


@dataclass(frozen=True, eq=False)
class Entries:
    """For each neuron its one or two entries: `read` says of which of the activation's reads, `column` which entry."""

    read: Int[Tensor, "d_mlp entry"]
    column: Int[Tensor, "d_mlp entry"]


@dataclass(frozen=True, eq=False)
class Activation:
    """The calls from reads of the stream to neurons.

    Attributes:
        reads: indices of the reads in the anatomy, in the order of the program's inputs.
        program: takes the reads' results in `shapes`, and gives the neurons of as many `rows` as were recorded.
        refusal: why there is no program, None if there is one.
    """

    reads: tuple[int, ...] = ()
    program: Program | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    rows: int = 0
    device: torch.device = torch.device("cpu")
    refusal: str | None = None

    def run(self, results: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row d_mlp"]:
        """The neurons for results of the reads (float64), as many rows as were recorded."""
        assert self.program is not None
        shaped = [result.reshape(shape) for result, shape in zip(results, self.shapes, strict=True)]
        return self.program.in_float64(*shaped).reshape(self.rows, -1)

    @cached_property
    def entries(self) -> Entries:
        """Which entries each neuron reads, gate and up in the order of the reads.

        Raises:
            LevelRefusedError: if a neuron is not act(input), or act(gate) x up.
        """
        if self.program is None:
            raise _refused(self.refusal or "no calls between the reads and the neurons were seen")
        try:
            if not self._same_in_all_rows():
                raise _refused("tokens have biases or factors of their own between the reads and the neurons")
            found = self._by_gradient()
            if found.read.shape[1] == 2 and not any(self._homogeneous(found, which) for which in (0, 1)):
                raise _refused("a neuron of two rows is not an activation of one times the other")
        except FAILURES as error:
            raise _refused(f"{NOT_AGAIN} ({error})") from error
        return found

    def _widths(self) -> list[int]:
        return [int(torch.tensor(shape).prod()) // self.rows for shape in self.shapes]

    def _probe(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.rows, width) for width in self._widths()]
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(self.device) for s in shapes]

    def _same_in_all_rows(self) -> bool:
        out = self.run([one[:1].expand(self.rows, -1) for one in self._probe(3)])
        return bool((out - out[:1]).norm() <= PROBE * out.norm())

    def _gradients(self, probe: list[Tensor], weights: Tensor) -> list[Tensor]:
        """Of the weighted sum of all neurons, at the probe and at its negative: some are zero on one side."""
        found = []
        for sign in (1.0, -1.0):
            with torch.enable_grad():
                inputs = [(sign * one).requires_grad_() for one in probe]
                made = torch.autograd.grad((self.run(inputs) * weights).sum(), inputs, allow_unused=True)
            found.append([torch.zeros_like(p) if g is None else g for p, g in zip(probe, made, strict=True)])
        return [torch.cat(both) for both in zip(*found, strict=True)]

    def _by_gradient(self) -> Entries:
        probe = self._probe(0)
        count = self.run(probe).shape[1]
        ones = torch.ones(count, dtype=torch.float64, device=self.device)
        mixed = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(self.device) + 0.5
        plain, numbered, weighted = (self._gradients(probe, weights) for weights in (ones, ones.cumsum(0), mixed))
        places: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for number, (one, by_number, by_weight) in enumerate(zip(plain, numbered, weighted, strict=True)):
            row = one.abs().argmax(0, keepdim=True)
            slope, told, checked = (g.gather(0, row)[0] for g in (one, by_number, by_weight))
            if not bool((slope != 0).all()):
                raise _refused("an entry of a read reaches no neuron")
            owner = (told / slope).round().long() - 1
            if bool(((owner < 0) | (owner >= count)).any()) or not torch.allclose(
                checked, slope * mixed[owner.clamp(0, count - 1)], rtol=1e3 * PROBE, atol=0.0
            ):
                raise _refused("an entry of a read reaches several neurons")
            for column, neuron in enumerate(owner.tolist()):
                places[neuron].append((number, column))
        counts = {len(place) for place in places}
        if len(counts) != 1 or not counts <= {1, 2}:
            raise _refused(f"a neuron reads {' or '.join(map(str, sorted(counts)))} entries, not one or two")
        table = torch.tensor(places, device=self.device)
        return Entries(table[..., 0], table[..., 1])

    def _homogeneous(self, entries: Entries, which: int) -> bool:
        """Whether a neuron is proportional to one of its two entries."""
        probe = self._probe(2)
        before, scales = self.run(probe), (2.0, -3.0)
        for scale in scales:
            changed = [one.clone() for one in probe]
            for number, one in enumerate(changed):
                one[:, entries.column[entries.read[:, which] == number, which]] *= scale
            if not bool((self.run(changed) - scale * before).norm() <= 1e2 * PROBE * before.norm()):
                return False
        return True

    def of(self, neuron: int, points: Float[Tensor, "point entry"]) -> Float[Tensor, " point"]:
        """What a neuron is for chosen values of its entries; differentiable."""
        read, column = self.entries.read[neuron].tolist(), self.entries.column[neuron].tolist()
        out = []
        for chunk in points.split(self.rows):
            inputs = [chunk.new_zeros(self.rows, width) for width in self._widths()]
            for slot, (number, place) in enumerate(zip(read, column, strict=True)):
                padded = torch.cat([chunk[:, slot], chunk.new_zeros(self.rows - len(chunk))])
                others = torch.arange(inputs[number].shape[1], device=points.device) == place
                inputs[number] = torch.where(others, padded[:, None], inputs[number])
            out.append(self.run(inputs)[: len(chunk), neuron])
        return torch.cat(out)


def _refused(reason: str) -> LevelRefusedError:
    return LevelRefusedError(
        "No key for these neurons", None, reason, "Ask about the sublayers, heads and subvalues instead."
    )


def find_activation(source: Value, products: dict[int, int], positions: int) -> Activation:
    """The activation behind neurons.

    Args:
        source: the neurons as the output matrix reads them.
        products: for the id of each read's result the read's index.
        positions: of the recording.
    """
    found = first_products(source)
    if found is None:
        return Activation(refusal="they read values that no matrix reads from the stream")
    unknown = [value for value in found if value.id not in products]
    if unknown or not found:
        return Activation(refusal="what they read does not come from the stream by one matrix")
    rows = source.tensor.numel() // source.shape[-1] if source.tensor.numel() else 0
    if rows != positions:
        return Activation(refusal=NOT_AGAIN)
    return activation_of(source, found, tuple(products[value.id] for value in found), rows)


def activation_of(source: Value, products: list[Value], reads: tuple[int, ...], rows: int) -> Activation:
    """The activation from `products`, numbered by `reads`, to the neurons of as many rows."""
    program = extract(source, products)
    if program is None or any(value.tensor.numel() % rows for value in products):
        return Activation(refusal=NOT_AGAIN)
    return Activation(reads, program, tuple(value.shape for value in products), rows, source.tensor.device)


def first_products(value: Value) -> list[Value] | None:
    """The latest products with a weight behind `value`; None where it also depends on the tokens past them."""
    found: dict[int, Value] = {}
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current.id in seen:
            continue
        seen.add(current.id)
        if current.call is None:
            return None
        if is_weight_product(current.call):
            found[current.id] = current
        else:
            pending.extend(current.call.active_operands())
    return [found[i] for i in sorted(found)]


def ray_gradient(function, point: Float[Tensor, " entry"], nodes: int = 16) -> tuple[Float[Tensor, " entry"], float]:
    """The gradient of a function along the ray from zero to `point`, integrated, and by how much its account is off.

    K = integral over s in [0, 1] of grad f(s z) ds, for which K . z = f(z) - f(0). For f = act(g) u it is
    K = (u integral s act'(s g) ds, integral act(s g) ds), and K . (g, u) = act(g) u whatever act(0) is, by
    integration by parts. Gauss-Legendre on pieces that are halved where a piece's own account is not exact, so bends
    of `act` are found. `function` maps [point, count] to [point], differentiably.
    """
    import numpy as np

    where, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(nodes))
    where, weight = ((where + 1) / 2).to(point.device), (weight / 2).to(point.device)
    total, off = torch.zeros_like(point), 0.0
    ends = function(torch.stack([0 * point, point])).detach()
    size = float(ends.abs().max()) or 1.0
    pieces, budget = [(0.0, 0.5), (0.5, 1.0)], PIECES
    while pieces:
        start, end = pieces.pop()
        budget -= 1
        spots = start + (end - start) * where
        with torch.enable_grad():
            rows = (spots[:, None] * point).requires_grad_()
            (slopes,) = torch.autograd.grad(function(rows).sum(), rows)
        part = (end - start) * (weight @ slopes)
        low, high = function(torch.stack([start * point, end * point])).detach()
        error = float(part @ point - (high - low))
        if abs(error) > 1e-14 * size and budget > len(pieces) and end - start > 1e-12:
            middle = (start + end) / 2
            pieces += [(start, middle), (middle, end)]
            continue
        total, off = total + part, off + abs(error)
    return total, off
