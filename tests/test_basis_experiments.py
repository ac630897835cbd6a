"""The cases of outliers and of the privileged basis: every finding can come out either way."""

from dataclasses import replace

import pytest
import torch

from mainstem.analysis.kurtosis import token_kurtosis
from mainstem.causal.stream_statistics import ThinnedKurtosis
from mainstem.causal.stream_watch import Rows, Seen
from mainstem.experiments import outliers_claims as outliers
from mainstem.experiments import privileged_basis_claims as privileged
from mainstem.results.basis_ablations import AblationRow, AblationSection, ControlVerdict, DimensionRow, PatternRow
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow
from mainstem.results.basis_outliers import FeatureRow, OutlierSection, OutlierTable
from mainstem.results.basis_quantisers import AS_IT_IS, FULL, CloserRow, QuantiserRow, QuantiserSection
from mainstem.results.basis_rotations import PrecisionRow, RotationSection

CONTROLS = ("random", "nearest", "same_norm")


def _outliers(features: int, one_sided: int = 1) -> OutlierSection:
    row = FeatureRow(7, features > 0, 0.4, 0.3, 0.08, 900, 0.0, one_sided > 0, (-9.0, -8.0, -7.0), [0.08])
    table = OutlierTable("input", ["L0.attn"], 1, 512, features, min(one_sided, features), 0.4, 0.08, 900.0, [row])
    return OutlierSection({}, {}, [table], [], [])


def test_a_few_features_are_reproduced_if_the_rotated_copy_has_none():
    assert outliers.few(_outliers(1), 0, 64).finding == "reproduced"
    assert outliers.few(_outliers(3), 1, 64).finding == "in part"
    assert outliers.few(_outliers(1), 1, 64).finding == "not reproduced"
    assert outliers.few(_outliers(0), 0, 64).finding == "not reproduced"


def test_signs_are_counted():
    assert outliers.one_sided(_outliers(2, 2)).finding == "reproduced"
    assert outliers.one_sided(_outliers(3, 2)).finding == "in part"
    assert outliers.one_sided(_outliers(3, 0)).finding == "not reproduced"
    assert outliers.one_sided(_outliers(0)).finding == "not reproduced"


def _ablated(change: float = 3.0, mean: float = 0.01, top: float = 0.2, times: float | None = 500.0, beats=True):
    def run(what: str, value: float, draws: int = 1) -> AblationRow:
        ratio = float(torch.tensor(value).exp())
        return AblationRow("attention", what, draws, 512, value, value - 0.01, value + 0.01, 20 * ratio, ratio, 0, 0, 0)

    runs = [run("none", 0.0), run("zero", change), run("mean", mean), run("mean_by_place", mean)]
    runs += [run(name, 0.001, 10) for name in CONTROLS] + [replace(run("zero", change), where="everywhere")]
    patterns = [
        PatternRow(what, draws, value, value - 0.01, value + 0.01, 0.5, 0.1)
        for what, draws, value in (("none", 1, 0.4), ("zero", 1, top), ("random", 10, 0.4))
    ]
    verdicts = [ControlVerdict("attention", name, times, beats) for name in CONTROLS]
    dimension = [DimensionRow(7, 0.3, change)]
    return AblationSection("outliers", dimension, 512, 512, 511, runs, patterns, [], [], [], [], verdicts, 10)


def test_what_zeroing_does_is_held_against_every_control():
    assert outliers.needed("features", _ablated()).finding == "reproduced"
    assert outliers.needed("features", _ablated(times=None)).finding == "reproduced"
    assert outliers.needed("features", _ablated(times=40.0)).finding == "in part"
    assert outliers.needed("features", _ablated(beats=False)).finding == "not reproduced"
    assert outliers.needed("features", _ablated(change=0.1)).finding == "in part"
    assert outliers.needed("features", _ablated(change=0.0)).finding == "not reproduced"


def test_a_constant_must_do_nearly_all():
    assert outliers.constant(_ablated()).finding == "reproduced"
    assert outliers.constant(_ablated(mean=1.0)).finding == "in part"
    assert outliers.constant(_ablated(mean=2.9)).finding == "not reproduced"
    assert outliers.constant(_ablated(change=-0.5, mean=-1.0)).finding == "not reproduced"


def test_attention_must_lose_more_than_with_random_dimensions():
    assert outliers.less_certain(_ablated()).finding == "reproduced"
    assert outliers.less_certain(_ablated(top=0.35)).finding == "in part"
    assert outliers.less_certain(_ablated(top=0.41)).finding == "not reproduced"
    assert outliers.less_certain(replace(_ablated(), patterns=[])).finding == "not reproduced"


def _quantised(perplexities=(50.0, 30.0, 28.5, 28.1), differences=(-0.2, -0.1), rotated=(-0.1, -0.05)):
    named = dict(zip(outliers.ORDER, perplexities, strict=True)) | {FULL: 28.0}
    rows = [QuantiserRow("drama", AS_IT_IS, name, 512, p, 0, 0, 0, 0.1, 0.1, 0.1, 0) for name, p in named.items()]
    closer = [
        *(CloserRow("drama", "llm.int8", f"other{i}", d, d - 0.01, d + 0.01) for i, d in enumerate(differences)),
        *(CloserRow("drama", f"other{i}, rotated", f"other{i}", d, d - 0.01, d + 0.01) for i, d in enumerate(rotated)),
    ]
    return QuantiserSection([], [], rows, closer, [], 512, 1, 1, [])


def test_quantisers_are_compared_in_pairs():
    assert outliers.ordered(_quantised()).finding == "reproduced"
    assert outliers.ordered(_quantised((50.0, 28.5, 30.0, 28.1))).finding == "in part"
    assert outliers.ordered(_quantised((28.0, 28.5, 30.0, 28.1))).finding == "not reproduced"
    assert outliers.decomposed(_quantised()).finding == "reproduced"
    assert outliers.decomposed(_quantised(differences=(-0.2, -0.005))).finding == "in part"
    assert outliers.decomposed(_quantised(differences=(0.2, 0.0))).finding == "not reproduced"
    assert outliers.cured(_quantised()).finding == "reproduced"
    assert outliers.cured(_quantised(rotated=(-0.1, 0.1))).finding == "in part"
    assert outliers.cured(_quantised(rotated=(0.0, 0.1))).finding == "not reproduced"


def _kurtosis(value: float = 80.0, rest: float = 60.0, null: float = 3.0, thinned: float = 10.0) -> privileged.Found:
    rows = [
        PointRow(f"L{i}.mlp", "stream", i, value, rest, null, null - 0.05, null + 0.05, 20.0, 20.0, 50.0, 100.0)
        for i in range(8)
    ]
    section = KurtosisSection({"all": 512, "first": 1}, 2.99, {"draws": 10, "tokens": 512}, rows)
    return privileged.Found(section, [7] * 8, [thinned] * 8, _losses())


def _losses(wide: float = 1e-9, single: float | None = 1e-6) -> RotationSection:
    rows = [
        PrecisionRow("float64", True, 3.0, 3.0 + wide, wide, 0.0, 0.0, 1e-15),
        PrecisionRow("float64", False, 3.0, 3.0, 1e-8, 0.0, 0.0, 1e-9),
        PrecisionRow("float32", False, 3.0, 3.0, single, 0.0, 0.0, 1e-6, None if single is not None else "L3.mlp"),
    ]
    return RotationSection("random", None, 0, 64, 1e-15, False, 9, 3, [], [], {"logits": 1e-14}, 2.9, rows, [])


def test_kurtosis_is_held_against_rotations():
    assert privileged.heavy(_kurtosis()).finding == "reproduced"
    assert privileged.heavy(_kurtosis(rest=9.0)).finding == "in part"
    assert privileged.heavy(_kurtosis(rest=3.0)).finding == "not reproduced"
    assert privileged.rotated(_kurtosis()).finding == "reproduced"
    assert privileged.rotated(_kurtosis(null=4.0)).finding == "in part"
    assert privileged.rotated(_kurtosis(null=20.0)).finding == "not reproduced"
    assert privileged.not_first(_kurtosis(rest=3.0)).finding == "not reproduced"
    assert privileged.not_one(_kurtosis()).finding == "reproduced"
    assert privileged.not_one(_kurtosis(thinned=3.0)).finding == "not reproduced"


def test_a_rotation_must_not_change_the_loss_in_either_precision():
    assert privileged.needless(_losses()).finding == "reproduced"
    assert privileged.needless(_losses(single=1e-3)).finding == "in part"
    assert privileged.needless(_losses(wide=1e-3, single=None)).finding == "not reproduced"


@pytest.mark.parametrize("left", [0, 3, 7])
def test_kurtosis_without_one_dimension_is_that_of_the_others(left):
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(left))
    rows = Rows((1, 9), torch.arange(9), 1, torch.arange(9), torch.arange(9))
    thinned = ThinnedKurtosis([left])
    thinned.see([0], Seen(x[None], rows))
    others = [i for i in range(8) if i != left]
    torch.testing.assert_close(thinned.kurtosis()[0], token_kurtosis(x[1:, others]).mean())
