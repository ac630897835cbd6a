"""Quantisers of a matrix product, as real integer arithmetic: what X W^T is when both are rounded to a few bits.

A matrix is rounded by a `Scheme`: how many steps its codes have, and which of its entries share a scale. With one
scale for each row of X and each output of W the product of the codes is an integer, and scales and zero points come
after it (Dettmers et al. 2022, LLM.int8(), sections 2 and 3):

    absmax       code = round(x 127 / max|x|)                              x ~ code max|x| / 127
    zeropoint    code = round(x n) - zero, n = 254 / (max - min)           x ~ (code + zero) / n
                 zero = round(n min) + 127

The paper prints its zero point as round(X min), evidently by mistake. It is a whole number, so that zero is a code
exactly: with one that is not, where one entry is far larger than all others, these are all off by the same part of a
step, and the sum over inputs does not average that away. absmax and zeropoint have one scale for each
tensor, row-wise one for each row of X, vector-wise also one for each output of W. Mixed-precision decomposition takes
the input dimensions in which some |x| reaches a threshold out of both codes, and multiplies them in the float dtype;
LLM.int8() is vector-wise with it. Beside these are what is shipped today: weights alone in 4 bits with a scale and a
zero point for each 128 inputs (AWQ, GPTQ and tinygemm store them so), 4 bits for both, FP8 (e4m3), and SmoothQuant,
which divides input j by s_j = max|x_j|^a / max|w_j|^(1-a) and multiplies the matrix by it.

Integer products are exact: codes are multiplied as float32 in blocks of 1,024 inputs, where no sum exceeds 2^24, so
that every partial sum is an integer that float32 holds, and blocks are added in int32. That costs what a float32
product costs on any processor; `torch._int_mm` gives the same integers, 25 times slower on a CPU without int8
instructions. What a kernel would do to a float is done in float32, or in the float dtype where that is wider.

Limits: rounding to nearest only; weights are not adapted to the rounding (no GPTQ, no AWQ search).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float8e4m3fn, Int8, Int32
from torch import Tensor

EXACT = 1024
"""So many products of two int8 codes add up to 2^24 at most: every integer up to there is a float32."""
THRESHOLD = 6.0
GROUP = 128
LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Scheme:
    """How a matrix is rounded.

    Attributes:
        shared: what has one scale: the whole "tensor", a "row", or a "group" of 128 neighbours in a row.
        steps: from the lowest code to the highest; 0 for the floating-point codes of FP8 (e4m3).
        zero_point: whether codes span from the least to the greatest entry, instead of evenly around zero.
    """

    shared: Literal["tensor", "row", "group"]
    steps: int = 254
    zero_point: bool = False


@dataclass(frozen=True, eq=False)
class Codes:
    """A rounded matrix: entry = (code + zero) * unit.

    Attributes:
        codes: [row, d_in] of one byte each.
        unit: [#row, group] what a step is worth; groups are 128 neighbours each, or all of a row.
        zero: [#row, group] the zero point, whole numbers; None for 0.
    """

    codes: Int8[Tensor, "row d_in"] | Float8e4m3fn[Tensor, "row d_in"]
    unit: Float[Tensor, "#row group"]
    zero: Float[Tensor, "#row group"] | None

    def values(self) -> Float[Tensor, "row d_in"]:
        """What the codes stand for."""
        codes = self.codes.to(self.unit.dtype)
        return (codes if self.zero is None else codes + self._by_entry(self.zero)) * self._by_entry(self.unit)

    def _by_entry(self, by_group: Float[Tensor, "#row group"]) -> Float[Tensor, "#row _"]:
        if by_group.shape[1] == 1:
            return by_group
        return by_group.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]]


def rounded(matrix: Float[Tensor, "row d_in"], scheme: Scheme) -> Codes:
    """The codes of a matrix of float32 or float64; one that is all zero, or constant, is kept exactly."""
    groups = matrix.split(GROUP, 1) if scheme.shared == "group" else (matrix,)
    parts = [_rounded_alike(group, scheme) for group in groups]
    codes, unit, zero = zip(*parts, strict=True)
    zeros = None if zero[0] is None else torch.cat(zero, 1)
    return Codes(codes[0] if len(codes) == 1 else torch.cat(codes, 1), torch.cat(unit, 1), zeros)


def _rounded_alike(matrix: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, unit and zero point where each row, or all of them, has one scale."""
    axes = (0, 1) if scheme.shared == "tensor" else (1,)
    if scheme.zero_point:
        low, high = matrix.amin(axes, keepdim=True), matrix.amax(axes, keepdim=True)
        steps, half = float(scheme.steps), scheme.steps // 2
        span = torch.where(high == low, _nonzero(low.abs()) * steps, high - low)  # a constant is one step from zero
        scale = _by(steps, span)
        zero = (low * scale).round_() + half
        codes = ((matrix * scale).round_() - zero).clamp_(-half, scheme.steps - half)
        return codes.to(torch.int8), span / steps, zero
    largest = LARGEST_E4M3 if scheme.steps == 0 else scheme.steps / 2
    span = _nonzero(matrix.abs().amax(axes, keepdim=True))
    scaled = matrix * _by(largest, span)
    codes = scaled.to(torch.float8_e4m3fn) if scheme.steps == 0 else scaled.round_().to(torch.int8)
    return codes, span / largest, None


def _nonzero(span: Tensor) -> Tensor:
    return torch.where(span == 0, 1.0, span)


def _by(steps: float, span: Tensor) -> Tensor:
    """steps / span, rounded once; of a number and a tensor torch multiplies with the reciprocal."""
    return span.new_tensor(steps) / span


def integer_product(x: Int8[Tensor, "row d_in"], weight: Int8[Tensor, "d_out d_in"]) -> Int32[Tensor, "row d_out"]:
    """x weight^T, exactly, as int8 codes accumulated in int32 give it."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for a, b in zip(x.split(EXACT, 1), weight.split(EXACT, 1), strict=True):
        total += (a.float() @ b.float().T).int()
    return total


def coded_product(x: Codes, weight: Codes, used: Bool[Tensor, " d_in"] | None = None) -> Float[Tensor, "row d_out"]:
    """X W^T of the values that codes of one scale for each row, or tensor, stand for.

    Args:
        x: the rounded X.
        weight: the rounded W.
        used: the input dimensions to sum over, all by default; on others the codes of X are 0.
    """
    a, b = x.codes, weight.codes
    if a.dtype == torch.int8:
        product = _with_zeros(integer_product(a, b), x, weight, used).to(x.unit.dtype)
    else:
        product = a.to(x.unit.dtype) @ b.to(x.unit.dtype).T
    return product.mul_(x.unit).mul_(weight.unit.T)


def _with_zeros(
    product: Int32[Tensor, "row d_out"], x: Codes, weight: Codes, used: Bool[Tensor, " d_in"] | None
) -> Tensor:
    """The product of codes that have their zero points added; in float64, which holds such integers."""
    if x.zero is None and weight.zero is None:
        return product
    total = product.double()
    if weight.zero is not None:
        total += x.codes.sum(1, keepdim=True, dtype=torch.int32) * weight.zero.T.double()
    if x.zero is not None:
        ones = torch.ones_like(x.codes[:1]) if used is None else used.to(torch.int8)[None]
        sums = integer_product(ones, weight.codes).double()
        total += x.zero.double() * (sums if weight.zero is None else sums + int(ones.sum()) * weight.zero.T.double())
    return total


@dataclass(frozen=True)
class Quantiser:
    """How a product is quantised.

    Attributes:
        weights: how W is rounded.
        inputs: how X is rounded; None for weights alone.
        threshold: from which |x| on an input dimension is kept in the float dtype; None for no decomposition.
        smoothing: the exponent a of SmoothQuant; None for none. What is divided is known in a run, see `smoothing`.
    """

    weights: Scheme
    inputs: Scheme | None = None
    threshold: float | None = None
    smoothing: float | None = None

    def prepared(self, weight: Float[Tensor, "d_out d_in"], codes: Codes | None = None) -> "QuantisedMatrix":
        """A matrix ready to be multiplied with; `codes`, if it has been rounded by this scheme already."""
        kept = weight if self.threshold is not None else None
        return QuantisedMatrix(self, codes or rounded(at_least_float32(weight), self.weights), kept)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In the dtype that scales are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def smoothing(
    inputs: Float[Tensor, " d_in"], weights: Float[Tensor, " d_in"], exponent: float
) -> Float[Tensor, " d_in"]:
    """SmoothQuant's divisor of each input (Xiao et al. 2023, equation 4); 1 where an input or its weights are zero.

    Args:
        inputs: the greatest |x| of each input dimension.
        weights: the greatest |w| of each.
        exponent: how much of the difficulty goes to the weights; 0.5 as published.
    """
    scales = inputs**exponent / weights ** (1 - exponent)
    return torch.where((inputs > 0) & (weights > 0), scales, 1.0)


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A rounded matrix W, and how X is multiplied with it.

    Attributes:
        quantiser: how.
        codes: of W, [d_out, d_in].
        kept: W itself, for the input dimensions that are not rounded; None where all are.
    """

    quantiser: Quantiser
    codes: Codes
    kept: Float[Tensor, "d_out d_in"] | None

    def __call__(self, x: Float[Tensor, "row d_in"]) -> Float[Tensor, "row d_out"]:
        """X W^T as quantised, in X's dtype."""
        if self.quantiser.inputs is None:
            return x @ self.codes.values().to(x.dtype).T
        wide = at_least_float32(x)
        outliers = self.outliers(x)
        if self.kept is None or not outliers.any():
            return coded_product(rounded(wide, self.quantiser.inputs), self.codes).to(x.dtype)
        taken_out, regular = torch.nonzero(outliers)[:, 0], torch.nonzero(~outliers)[:, 0]
        product = at_least_float32(x[:, taken_out] @ self.kept[:, taken_out].T.to(x.dtype))
        if len(regular):
            wide = wide.index_copy(1, taken_out, wide[:, regular[:1]].expand(-1, len(taken_out)))  # in no row's range
            codes = rounded(wide, self.quantiser.inputs)
            codes.codes[:, taken_out] = 0
            product += coded_product(codes, self.codes, ~outliers)
        return product.to(x.dtype)

    def outliers(self, x: Float[Tensor, "row d_in"]) -> Bool[Tensor, " d_in"]:
        """Which input dimensions are kept in the float dtype."""
        if self.quantiser.threshold is None:
            return torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
        return x.abs().amax(0) >= self.quantiser.threshold


def _int8(inputs: Literal["tensor", "row"], weights: Literal["tensor", "row"], zero_point: bool = False) -> Quantiser:
    return Quantiser(Scheme(weights, zero_point=zero_point), Scheme(inputs, zero_point=zero_point))


def _published() -> dict[str, Quantiser]:
    plain = {
        "absmax": _int8("tensor", "tensor"),
        "zeropoint": _int8("tensor", "tensor", True),
        "row-wise": _int8("row", "tensor"),
        "vector-wise": _int8("row", "row"),
        "zeropoint-vector-wise": _int8("row", "row", True),
    }
    names = {name: f"{name}+mixed" for name in plain} | {"vector-wise": "llm.int8"}
    return plain | {names[name]: replace(plain[name], threshold=THRESHOLD) for name in plain}


PUBLISHED: Mapping[str, Quantiser] = MappingProxyType(_published())
"""The int8 quantisers of LLM.int8(), Table 1, each without decomposition and with it."""

SHIPPED: Mapping[str, Quantiser] = MappingProxyType(
    {
        "smoothquant": replace(PUBLISHED["vector-wise"], smoothing=0.5),
        "fp8": Quantiser(Scheme("row", 0), Scheme("row", 0)),
        "w4": Quantiser(Scheme("group", 15, zero_point=True)),
        "w4a4": Quantiser(Scheme("row", 14), Scheme("row", 14)),
        "w4a4-smoothquant": Quantiser(Scheme("row", 14), Scheme("row", 14), smoothing=0.5),
    }
)
"""What is shipped today: W8A8 and W4A4 with and without SmoothQuant's scaling, FP8, and weights alone in 4 bits."""

QUANTISERS: Mapping[str, Quantiser] = MappingProxyType({**PUBLISHED, **SHIPPED})
"""Every quantiser by its name."""
