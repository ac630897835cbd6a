"""What an operation is, told from what it does: affine in its operands, or a map of indices.

No list of operations is kept. An operation is affine, position by position and dimension by dimension, if probes say
that f(a, b, ...) = f(0) + k_a * a + k_b * b + ...; it is an index map if each element of its result is one element of
its operand. Both are verified on values that were not used to find them.

Limits: an operation that is the identity on the probes but not elsewhere (a clamp at a large bound) passes; the
certificates of each later run would fail where it acts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.norms import PROBE
from mainstem.model.program import Program, near, normal, probe_dtype


@dataclass(frozen=True, eq=False)
class Affine:
    """result = constant + sum of factors[i] * operand[i], all as [positions, d_model] float64."""

    factors: tuple[Tensor, ...]
    constant: Tensor


def affine(program: Program | None, operands: list[Tensor], width: int) -> Affine | None:
    """The affine form of `program` in `operands`, or None. Operands and result have the same number of elements."""
    if program is None or not all(operand.is_floating_point() for operand in operands):
        return None
    tolerance = 100 * PROBE

    def run(values: list[Tensor]) -> Tensor:
        return program(*values).double().reshape(-1, width)

    zeros = [torch.zeros_like(o, dtype=probe_dtype(o.dtype)) for o in operands]
    try:
        constant = run(list(zeros))
        factors = []
        for i in range(len(operands)):
            values = list(zeros)
            values[i] = torch.ones_like(zeros[i])
            factors.append(run(values) - constant)
        for size in (1.0, 40.0):
            probes = [(normal(tuple(z.shape), int(size) + k) * size).to(z) for k, z in enumerate(zeros)]
            expected = constant.clone()
            magnitude = constant.abs()
            for factor, probe in zip(factors, probes, strict=True):
                term = factor * probe.double().reshape(-1, width)
                expected, magnitude = expected + term, magnitude + term.abs()
            if not bool(((run(probes) - expected).norm() <= tolerance * magnitude.norm()) & expected.isfinite().all()):
                return None
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if all(not factor.any() for factor in factors):
        return None
    return Affine(tuple(factors), constant)


def index_map(program: Program | None, operand: Tensor) -> Tensor | None:
    """For each element of the result the flat index of the operand's element that it is, or None."""
    if program is None or not operand.is_floating_point():
        return None
    count = operand.numel()
    base = 128  # exact in every floating dtype, also where the operation casts
    flat = torch.arange(count, device=operand.device)
    index: Tensor | None = None
    weight = 1
    try:
        while weight < max(count, 2):
            digits = (flat // weight % base).to(operand.dtype).reshape(operand.shape)
            out = program(digits).double()
            rounded = out.round()
            if not bool((out == rounded).all()) or bool((rounded < 0).any()) or bool((rounded >= base).any()):
                return None
            index = rounded.long() * weight if index is None else index + rounded.long() * weight
            weight *= base
        if index is None or bool((index >= count).any()):
            return None
        probe = normal((count,), 2).to(dtype=operand.dtype, device=operand.device)
        out = program(probe.reshape(operand.shape))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    expected = probe[index.reshape(-1)].reshape(index.shape)
    same = near(out.double(), expected.double(), rtol=2 * torch.finfo(torch.bfloat16).eps)
    return index if same else None
