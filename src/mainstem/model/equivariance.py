"""Whether a piece of a model turns with the stream, is blind to turns of it, or neither: asked by reflecting its input.

The reflection is H = I - 2 u u^T: applied in O(d), and no elementwise function other than a factor commutes with one
for a random u. Probes are random, with a part along u as large as all the rest, so that H changes them by their own
size. A piece that fails for a generic u is asked again with u orthogonal to the ones, which means over the stream
commute with.

Limits: what is the identity on the probes but not elsewhere (a clamp at a large bound) passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mainstem.model.norms import PROBE
from mainstem.model.program import Program, normal, probe_dtype

EXACT = 1e-9
ROWS = 997
"""How many different rows a probe has: prime, so that no two positions of a matrix product see the same ones."""

BLIND: Literal["blind"] = "blind"
Answer = int | Literal["blind"] | None
"""The axis along which the result turns, BLIND, or None for neither."""

FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass(eq=False)
class Reflections:
    """The reflections of a stream of `width` dimensions; `centred` once something turned only with H 1 = 1."""

    width: int
    centred: bool = False
    _held: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    _plain: Tensor = field(init=False)
    _keeping_ones: Tensor = field(init=False)

    def __post_init__(self) -> None:
        direction = normal((self.width,), 71).double()
        self._plain = direction / direction.norm()
        centred = direction - direction.mean()
        self._keeping_ones = centred / centred.norm()

    def axes(self, shape: Sequence[int]) -> list[int]:
        """The axes that may be the stream's, counted from the last, which comes first."""
        return [-1 - i for i, size in enumerate(reversed(shape)) if size == self.width]

    def turns(self, program: Program | None, inputs: Sequence[tuple[Tensor, int]]) -> Answer:
        """What becomes of the result of `program` when its inputs, given with their stream axes, are reflected."""
        if program is None:
            return None
        for direction in (self._plain, self._keeping_ones):
            for wide in (True, False):
                try:
                    answer = self._asked(program, inputs, direction, wide)
                except FAILURES:
                    continue
                if answer is not None and direction is self._keeping_ones:
                    self.centred = True
                if answer is not None:
                    return answer
                break
        return None

    def scales(self, program: Program, inputs: Sequence[tuple[Tensor, int]], axis: int) -> bool:
        """Whether factors for each dimension of all inputs come out as the same factors of the result."""
        factor = normal((self.width,), 5).double().abs() + 0.5
        for wide in (True, False):
            try:
                probes = [self.probe(tensor, at, i, wide) for i, (tensor, at) in enumerate(inputs)]
                run = program.in_float64 if wide else program
                plain = run(*probes).double()
                scaled = [along(factor, p, at).to(p.dtype) * p for p, (_, at) in zip(probes, inputs, strict=True)]
                return _close(run(*scaled).double(), along(factor, plain, axis) * plain, _tolerance(wide))
            except FAILURES:
                continue
        return False

    def ignores(self, program: Program, inputs: Sequence[tuple[Tensor, int]]) -> bool:
        """Whether the result does not change at all with the inputs, as a shape or a mask does not."""
        for wide in (True, False):
            try:
                run = program.in_float64 if wide else program
                plain, other = (
                    run(*[self.probe(t, axis, i + shift, wide) for i, (t, axis) in enumerate(inputs)])
                    for shift in (0, 17)
                )
                return torch.equal(plain, other)
            except FAILURES:
                continue
        return False

    def turns_with_ones(self, program: Program, inputs: Sequence[tuple[Tensor, int]]) -> int | None:
        """The axis along which the result turns with a stream value, and a bias, if the factor is one everywhere.

        `inputs` are the stream value, the factor and perhaps the bias.
        """
        (source, axis), (factor, _), *bias = inputs
        answer = self.turns(_WithOnes(program, factor), [(source, axis), *bias])  # type: ignore[arg-type]
        return answer if isinstance(answer, int) else None

    def is_factor(self, program: Program, inputs: Sequence[tuple[Tensor, int]], axis: int) -> bool:
        """Whether f(x, g, g b) = g f(x, 1, b); inputs as for `turns_with_ones`."""
        (source, at), (like, _), *bias = inputs
        for wide in (True, False):
            try:
                run = program.in_float64 if wide else program
                x = self.probe(source, at, 0, wide)
                factor = self.probe(like, -1, 1, wide)
                b = [self.probe(tensor, own, 2, wide) for tensor, own in bias]
                plain = run(x, torch.ones_like(factor), *b).double()
                seen = run(x, factor, *[factor * one for one in b]).double()
                return _close(seen, along(factor.double().reshape(-1), plain, axis) * plain, _tolerance(wide))
            except FAILURES:
                continue
        return False

    def probe(self, like: Tensor, axis: int, seed: int, wide: bool) -> Tensor:
        """Random numbers in place of `like`, half of their size along the reflections' direction."""
        dtype = torch.float64 if wide else probe_dtype(like.dtype)
        rows = self._rows(seed, dtype)
        which = torch.arange(like.numel() // self.width) % len(rows)
        return rows[which].reshape(like.movedim(axis, -1).shape).movedim(-1, axis).to(like.device)

    def _rows(self, seed: int, dtype: torch.dtype) -> Tensor:
        """[row, d_model]: the rows that probes repeat."""
        if (seed, dtype) not in self._held:
            generator = torch.Generator().manual_seed(40 + seed)
            rows = torch.randn(ROWS, self.width, generator=generator, dtype=dtype)
            lengths = torch.randn(ROWS, 1, generator=generator, dtype=dtype) * self.width**0.5
            self._held[seed, dtype] = rows + lengths * ((self._plain + self._keeping_ones) / 2).to(dtype)
        return self._held[seed, dtype]

    def _asked(self, program: Program, inputs: Sequence[tuple[Tensor, int]], direction: Tensor, wide: bool) -> Answer:
        run = program.in_float64 if wide else program
        probes = [self.probe(tensor, axis, i, wide) for i, (tensor, axis) in enumerate(inputs)]
        plain = run(*probes)
        seen = run(*[_reflected(probe, axis, direction) for probe, (_, axis) in zip(probes, inputs, strict=True)])
        if not plain.is_floating_point():
            return BLIND if torch.equal(plain, seen) else None
        plain, seen = plain.double(), seen.double()
        if not bool(plain.isfinite().all() & seen.isfinite().all()):
            return None
        if _close(seen, plain, _tolerance(wide)):
            return BLIND
        for axis in self.axes(plain.shape):
            if _close(seen, _reflected(plain, axis, direction), _tolerance(wide)):
                return axis
        return None


@dataclass(frozen=True, eq=False)
class _WithOnes:
    """A program of a stream value, a factor and perhaps a bias, with the factor one everywhere."""

    program: Program
    like: Tensor

    def __call__(self, source: Tensor, *bias: Tensor) -> Tensor:
        return self.program(source, torch.ones_like(self.like, dtype=source.dtype), *bias)

    @property
    def in_float64(self) -> "_WithOnes":
        return _WithOnes(self.program.in_float64, self.like)


def along(vector: Tensor, like: Tensor, axis: int) -> Tensor:
    """A vector [d_model] as a factor of `like` along an axis counted from the last."""
    return vector.to(like.device).reshape(-1, *[1] * (-1 - axis))


def _reflected(tensor: Tensor, axis: int, direction: Tensor) -> Tensor:
    rows = tensor.movedim(axis, -1)
    u = direction.to(rows)
    return (rows - 2 * (rows @ u)[..., None] * u).movedim(-1, axis).contiguous()


def _tolerance(wide: bool) -> float:
    return EXACT if wide else 300 * PROBE


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm())
