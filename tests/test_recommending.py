"""What a basis report recommends: every rule can come out either way."""

import math
from dataclasses import replace

import pytest

from mainstem.basis.recommending import on_basis, on_dtype, on_four_bits, on_int8, on_outliers, on_rotation, recommend
from mainstem.results.basis_ablations import AblationRow, AblationSection
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow
from mainstem.results.basis_outliers import FeatureRow, OutlierSection, OutlierTable
from mainstem.results.basis_quantisers import AS_IT_IS, CloserRow, QuantiserRow, QuantiserSection
from mainstem.results.basis_rounding import DtypeRow, RoundingSection


def _kurtosis(value: float) -> KurtosisSection:
    row = PointRow("L0.mlp", "stream", 0, value, value, 3.0, 2.9, 3.1, 5.0, 5.0, 9.0, 30.0)
    return KurtosisSection({"all": 64, "first": 1}, 2.9, {"draws": 10, "tokens": 64}, [row])


def test_a_basis_is_privileged_above_every_rotation():
    assert "is privileged" in on_basis(_kurtosis(40.0)).text
    assert "hardly" in on_basis(_kurtosis(3.0)).text
    assert "hardly" in on_basis(_kurtosis(3.2)).text


def _outliers(*dimensions: int) -> OutlierSection:
    rows = [FeatureRow(d, True, 0.5, 0.4, 0.1, 90, 1.0, True, (7.0, 8.0, 9.0), [0.1]) for d in dimensions]
    return OutlierSection({}, {}, [OutlierTable("input", [], 1, 64, len(rows), 0, 0.5, 0.1, 90.0, rows)], [], [])


def test_outliers_are_named_if_there_are_any():
    assert "dimension 7 out" in on_outliers(_outliers(7), None).text
    assert "dimensions 7, 9 out" in on_outliers(_outliers(7, 9), None).text
    assert on_outliers(_outliers(), None).text.startswith("No dimension")


def _row(
    quantiser: str, change: float, basis: str = AS_IT_IS, kl: float | None = None, width: float = 0.004
) -> QuantiserRow:
    ends = (change - width, change + width)
    kl = abs(change) if kl is None else kl
    return QuantiserRow("drama", basis, quantiser, 64, 20.0, change, *ends, kl, kl - width, kl + width, 0.01)


def _quantised(plain: float, mixed: float, rotated: float = 0.0) -> QuantiserSection:
    rows = [_row("vector-wise", plain), _row("llm.int8", mixed), _row("vector-wise", rotated, "rotated")]
    rows += [_row("w4", plain), _row("w4a4", 5 * plain + 0.1)]
    pairs = (("llm.int8", "vector-wise", mixed - plain), ("vector-wise, rotated", "vector-wise", rotated - plain))
    closer = [CloserRow("drama", first, second, d, d - 0.004, d + 0.004) for first, second, d in pairs]
    return QuantiserSection([], [], rows, closer, [], 64, 1, 1, [])


@pytest.mark.parametrize(
    "plain, mixed, said",
    [
        (0.001, 0.0, "nothing more is needed"),
        (0.05, 0.001, "outliers in floating point"),
        (0.05, 0.03, "Prefer LLM.int8()"),
        (0.05, 0.05, "vector-wise and llm.int8 both do harm"),
        (0.05, 0.052, "vector-wise and llm.int8 both do harm"),
        (0.01, 0.009, "do not show whether int8 is harmless"),
    ],
)
def test_the_simplest_int8_that_does_no_harm_is_taken(plain, mixed, said):
    assert said in on_int8(_quantised(plain, mixed)).text


@pytest.mark.parametrize("rotated, said", [(0.0, "Rotate the stream"), (0.05, "no difference"), (0.2, "Do not rotate")])
def test_a_rotation_is_advised_only_where_it_is_better_beyond_the_interval(rotated, said):
    assert said in next(iter(on_rotation(_quantised(0.05, 0.05, rotated)))).text


def test_nothing_is_said_of_what_was_not_run():
    bare = replace(_quantised(0.05, 0.05), rows=[_row("absmax", 1.0)], closer=[])
    assert not list(on_rotation(bare)) and not list(on_four_bits(bare))
    assert recommend().advice == []


def test_four_bits_are_judged_by_the_same_bound():
    assert "do no harm: w4." in next(iter(on_four_bits(_quantised(0.001, 0.0)))).text
    assert "do harm" in next(iter(on_four_bits(_quantised(0.05, 0.0)))).text


def test_a_loss_that_stays_the_same_is_not_enough():
    """As of a model that predicts at random anyway: its loss may even fall while most predictions change."""
    section = replace(_quantised(0.05, 0.05), rows=[_row("w4", -0.3, kl=0.5), _row("vector-wise", -0.3, kl=0.5)])
    assert "do harm" in next(iter(on_four_bits(section))).text
    assert "nothing more is needed" not in on_int8(section).text


def test_a_wide_interval_decides_nothing():
    section = replace(_quantised(0.0, 0.0), rows=[_row(name, 0.0, width=0.1) for name in ("w4", "vector-wise")])
    assert "do not show 4 bits to be harmless" in next(iter(on_four_bits(section))).text
    assert "do not show whether int8 is harmless" in on_int8(section).text


def test_one_token_has_no_interval_and_decides_nothing():
    alone = replace(_row("vector-wise", 0.0), low=math.nan, high=math.nan, kl_low=math.nan, kl_high=math.nan)
    advice = on_int8(replace(_quantised(0.0, 0.0), rows=[alone]))
    assert "do not show" in advice.text and "nan" not in " ".join(advice.reasons)


def test_names_with_a_comma_are_told_apart():
    rows = [_row("w4", 0.0), _row("w4", 0.0, "rotated")]
    assert "w4; w4, rotated." in next(iter(on_four_bits(replace(_quantised(0.0, 0.0), rows=rows)))).text


@pytest.mark.parametrize("low, prune", [(0.5, True), (-0.3, False)])
def test_what_costs_nothing_may_be_pruned(low, prune):
    runs = [
        AblationRow("attention", what, 1, 64, low + 0.1, low, low + 0.2, 20.0, 1.1, 0.1, 0.1, 0.3)
        for what in ("zero", "mean_by_place")
    ]
    section = AblationSection(
        chosen_by="outliers", dimensions=[], tokens=64, control_tokens=64, pattern_tokens=64, runs=runs, patterns=[],
        layers=[], heads=[], moved_tokens=[], groups=[], verdicts=[], top=10,
    )  # fmt: skip
    assert ("do not prune" in on_outliers(_outliers(7), section).text) is prune


def test_small_shares_are_not_rounded_to_nothing():
    row = DtypeRow("float16", 4e-4, 0.1, 1e-3, 1e-3, 900.0, None)
    assert "float16 0.04 %" in on_dtype(RoundingSection(64, [], [row], [], True)).reasons[0]


def test_a_dtype_that_overflows_is_not_to_be_used():
    fits = DtypeRow("float16", 1e-3, 0.1, 1e-3, 1e-3, 900.0, None)
    section = RoundingSection(64, [], [fits, replace(fits, dtype="bfloat16")], [], True)
    assert "nothing overflows" in on_dtype(section).text
    over = replace(section, dtypes=[replace(fits, lost=None, overflow="L3.mlp")])
    assert "Do not keep the stream in float16" in on_dtype(over).text
    assert "overflows at L3.mlp" in on_dtype(over).reasons[-1]
