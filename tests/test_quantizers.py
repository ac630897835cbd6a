"""Quantisers of a matrix product: integers equal NumPy's, codes keep what they promise, decomposition does its work."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.analysis.quantizers import (
    PUBLISHED,
    QUANTISERS,
    Quantiser,
    Scheme,
    integer_product,
    rounded,
    smoothing,
)
from mainstem.cli import options

DECOMPOSED = [name for name, quantiser in PUBLISHED.items() if quantiser.threshold is not None]
SCHEMES = {
    repr(scheme): scheme for q in QUANTISERS.values() for scheme in (q.weights, q.inputs) if scheme and scheme.steps
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


# --- integers -----------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3000), st.integers(0, 99))
def test_products_of_codes_are_those_of_integers(rows, d_out, d_in, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(-128, 128, (n, d_in), generator=generator, dtype=torch.int8) for n in (rows, d_out))
    expected = x.numpy().astype(np.int32) @ w.numpy().astype(np.int32).T
    assert np.array_equal(integer_product(x, w).numpy(), expected)


def test_products_of_codes_are_those_of_torchs_kernel():
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-127, 128, (32, 1536), generator=generator, dtype=torch.int8) for _ in range(2))
    assert torch.equal(integer_product(x, w), torch._int_mm(x, w.T))


@pytest.mark.parametrize("code", [-128, 127])
def test_no_sum_of_codes_is_too_large_for_the_carrier(code):
    x = torch.full((1, 5000), code, dtype=torch.int8)
    assert integer_product(x, x).item() == 5000 * code * code


def numpy_codes(matrix: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, unit and zero point, written down once more."""
    axis = None if scheme.shared == "tensor" else 1
    low, high = (np.reshape(f(matrix, axis=axis, keepdims=True), (-1, 1)) for f in (np.min, np.max))
    if scheme.zero_point:
        scale = np.float32(254) / (high - low)
        zero = np.rint(low * scale) + np.float32(127)
        return np.rint(matrix * scale) - zero, (high - low) / np.float32(254), zero
    largest = np.maximum(high, -low)
    return np.rint(matrix * (np.float32(127) / largest)), largest / np.float32(127), np.zeros_like(largest)


def numpy_product(x: np.ndarray, w: np.ndarray, quantiser: Quantiser) -> np.ndarray:
    """X W^T of integers; inputs at the threshold are multiplied in float32 and taken out of the codes."""
    out = np.zeros(x.shape[1], dtype=bool)
    if quantiser.threshold is not None:
        out = np.abs(x).max(0) >= quantiser.threshold
    assert quantiser.inputs is not None
    b, v, q = numpy_codes(w, quantiser.weights)
    a, u, p = numpy_codes(x[:, ~out], quantiser.inputs)
    whole = (a + p).astype(np.int64) @ (b + q).astype(np.int64)[:, ~out].T
    product = whole.astype(np.float32) * u * v.T
    if not out.any():
        return product
    columns = np.flatnonzero(out)
    return (torch.from_numpy(x[:, columns]) @ torch.from_numpy(w[:, columns]).T).numpy() + product


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("outlier", [1.0, 20.0])
def test_int8_results_are_those_of_numpys_integers_to_the_bit(name, outlier):
    quantiser, x, w = PUBLISHED[name], normal(31, 1100), normal(7, 1100, seed=1) + 0.3
    x[:, [3, 700]] *= outlier
    for matrix, scheme in ((x, quantiser.inputs), (w, quantiser.weights)):
        codes, (expected, unit, zero) = rounded(matrix, scheme), numpy_codes(matrix.numpy(), scheme)
        assert np.array_equal(codes.codes.numpy(), expected) and np.array_equal(codes.unit.numpy(), unit)
        assert np.array_equal(np.zeros_like(zero) if codes.zero is None else codes.zero.numpy(), zero)
    assert np.array_equal(quantiser.prepared(w)(x).numpy(), numpy_product(x.numpy(), w.numpy(), quantiser))


# --- codes --------------------------------------------------------------------------------------------------


@given(st.sampled_from(list(SCHEMES)), st.integers(1, 4), st.integers(1, 300), st.integers(0, 99))
def test_no_entry_is_off_by_more_than_half_a_step(name, rows, d_in, seed):
    scheme, matrix = SCHEMES[name], normal(rows, d_in, seed=seed).double() * 3 + 1
    codes = rounded(matrix, scheme)
    assert codes.codes.dtype == torch.int8 and codes.codes.shape == matrix.shape
    unit = codes._by_entry(codes.unit).expand(matrix.shape) if scheme.shared != "tensor" else codes.unit
    assert bool(((codes.values() - matrix).abs() <= unit * 0.5 * (1 + 1e-9)).all())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("value", [0.0, 2.5])
def test_a_constant_matrix_is_kept(name, value):
    matrix = torch.full((2, 200), value, dtype=torch.float64)
    torch.testing.assert_close(rounded(matrix, SCHEMES[name]).values(), matrix)


def test_zero_points_span_from_the_least_to_the_greatest():
    matrix = normal(3, 50) + 5
    codes = rounded(matrix, Scheme("row", zero_point=True))
    assert codes.codes.amin(1).tolist() == [-127] * 3 and codes.codes.amax(1).tolist() == [127] * 3
    assert codes.zero is not None and torch.equal(codes.zero, codes.zero.round())


@pytest.mark.parametrize("name", SCHEMES)
def test_zero_is_a_code_so_that_one_large_entry_does_not_shift_all_others(name):
    matrix = normal(2, 256) * 1e-3
    matrix[:, 7], matrix[:, 200] = 300.0, -211.3
    assert not rounded(matrix, SCHEMES[name]).values()[:, 8:100].any()


def test_groups_have_scales_of_their_own_and_the_last_may_be_short():
    matrix = normal(2, 300)
    matrix[:, 128:256] *= 100
    codes = rounded(matrix, Scheme("group", 15, zero_point=True))
    assert codes.unit.shape == (2, 3)
    assert float((codes.values() - matrix)[:, 256:].abs().max()) <= float(codes.unit[:, 2].max()) / 2 * 1.001


def test_fp8_codes_have_four_significant_bits():
    matrix = normal(4, 200)
    codes = rounded(matrix, Scheme("row", 0))
    largest = matrix.abs().amax(1, keepdim=True)
    normal_range = matrix.abs() > largest / 448 * 2**-6
    off = ((codes.values() - matrix) / matrix).abs()
    assert 0.03 < float(off[normal_range].max()) <= 2**-4


# --- decomposition, smoothing -------------------------------------------------------------------------------


def test_decomposition_takes_out_a_column_twenty_times_larger():
    x, w = normal(128, 256), normal(64, 256, seed=1)
    x[:, 17] *= 20
    off = {name: relative(PUBLISHED[name].prepared(w)(x), x @ w.T) for name in PUBLISHED}
    assert off["llm.int8"] <= off["vector-wise"] / 5
    assert off["absmax+mixed"] <= off["absmax"] / 3
    assert PUBLISHED["llm.int8"].prepared(w).outliers(x).nonzero().tolist() == [[17]]


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposition_of_nothing_is_none_and_of_everything_is_the_float_product(name):
    x, w = normal(9, 40), normal(5, 40, seed=1)
    plain = PUBLISHED[name.removesuffix("+mixed").replace("llm.int8", "vector-wise")]
    assert torch.equal(PUBLISHED[name].prepared(w)(x), plain.prepared(w)(x))
    everything = Quantiser(plain.weights, plain.inputs, threshold=1e-9)
    torch.testing.assert_close(everything.prepared(w)(x), x @ w.T)


def test_smoothing_keeps_the_product_and_shares_the_range():
    x, w = normal(50, 30).double(), normal(8, 30, seed=1).double()
    x[:, 4] *= 50
    w[:, 5] = 0
    scales = smoothing(x.abs().amax(0), w.abs().amax(0), 0.5)
    torch.testing.assert_close((x / scales) @ (w * scales).T, x @ w.T)
    used = torch.arange(30) != 5
    torch.testing.assert_close((x / scales).abs().amax(0)[used], (w * scales).abs().amax(0)[used])
    assert scales[5] == 1
    quantiser = PUBLISHED["vector-wise"]
    smooth = relative(quantiser.prepared(w * scales)(x / scales), x @ w.T)
    assert smooth < relative(quantiser.prepared(w)(x), x @ w.T) / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", QUANTISERS)
def test_products_have_the_dtype_of_what_is_multiplied(name, dtype):
    x, w = normal(6, 150).to(dtype), normal(3, 150, seed=1).to(dtype)
    got = QUANTISERS[name].prepared(w)(x)
    assert got.dtype == dtype and relative(got.double(), x.double() @ w.double().T) < 0.4


def test_more_bits_are_closer():
    x, w = normal(64, 256), normal(32, 256, seed=1)
    off = {name: relative(quantiser.prepared(w)(x), x @ w.T) for name, quantiser in QUANTISERS.items()}
    assert off["vector-wise"] < off["row-wise"] < off["absmax"] < off["fp8"] < off["w4"] < off["w4a4"] < 0.3


# --- other libraries, where they are installed --------------------------------------------------------------


def test_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    x = normal(64, 320).half()
    codes, largest, _ = functional.int8_vectorwise_quant(x)
    own = rounded(x.float(), Scheme("row"))
    torch.testing.assert_close(own.unit[:, 0] * 127, largest.float())
    assert int((own.codes.int() - codes.int()).abs().max()) <= 1
    assert float((own.codes != codes).double().mean()) < 1e-3  # ties that half precision rounds the other way


def test_weights_of_four_bits_are_as_close_as_torchaos():
    quantization = pytest.importorskip("torchao.quantization")
    w = normal(64, 512)
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    layer = torch.nn.Sequential(torch.nn.Linear(512, 64, bias=False))
    layer[0].weight.data = w.clone()
    config = quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(128), mapping_type=MappingType.ASYMMETRIC
    )
    quantization.quantize_(layer, config)
    theirs = layer(torch.eye(512)).T
    own = QUANTISERS["w4"].prepared(w).codes.values()
    assert relative(own, w) == pytest.approx(relative(theirs, w), rel=0.02)
    assert relative(own, theirs) < relative(own, w) * 2


def test_the_command_line_knows_every_quantiser():
    assert tuple(QUANTISERS) == options.QUANTISERS
