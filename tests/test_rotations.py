"""Rotations are orthogonal, keep the ones where they must, and spread what they are given."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.analysis.rotations import KINDS, OBJECTIVES, fixing_ones, hadamard, learned, orthogonality, rotation
from mainstem.cli import options
from mainstem.errors import ChoiceError, UsageError

EXACT = 1e-10


@given(st.sampled_from(["random", "hadamard"]), st.integers(1, 90), st.integers(0, 5), st.booleans())
@settings(max_examples=80)
def test_every_rotation_is_orthogonal_and_keeps_the_ones_if_asked(kind, d_model, seed, fix_ones):
    made = rotation(kind, d_model, seed, fix_ones)
    assert made.shape == (d_model, d_model) and made.dtype == torch.float64
    assert orthogonality(made) <= EXACT
    if fix_ones:
        torch.testing.assert_close(made.sum(1), torch.ones(d_model, dtype=torch.float64), rtol=0, atol=EXACT)
    assert torch.equal(made, rotation(kind, d_model, seed, fix_ones))


@pytest.mark.parametrize("d_model", [512, 576, 768, 900, 960])
def test_sizes_of_real_models_are_orthogonal(d_model):
    for fix_ones in (False, True):
        assert orthogonality(rotation("hadamard", d_model, 0, fix_ones)) <= EXACT


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 60, 64, 576, 768])
def test_hadamard_matrices_have_equal_entries_and_ones_in_the_first_column(order):
    made = hadamard(order)
    assert made is not None
    assert torch.equal(made.abs(), torch.ones_like(made)) and torch.equal(made[:, 0], torch.ones(order).double())
    assert torch.equal(made @ made.T, order * torch.eye(order, dtype=torch.float64))


def test_orders_without_a_hadamard_matrix_are_completed():
    assert hadamard(6) is None and hadamard(7) is None
    entries = rotation("hadamard", 576).abs()
    torch.testing.assert_close(entries, torch.full_like(entries, 576**-0.5))
    kept = rotation("hadamard", 576, fix_ones=True)
    assert kept.abs().max() < 0.35  # the diagonal is the mean of the signs, the rest about 1 / sqrt(d)


@given(st.integers(2, 24), st.integers(0, 3))
def test_the_complement_of_the_ones_is_turned_as_given(d_model, seed):
    small = rotation("random", d_model - 1, seed)
    whole = fixing_ones(small)
    assert orthogonality(whole) <= EXACT
    torch.testing.assert_close(whole.trace(), small.trace() + 1)
    torch.testing.assert_close(torch.linalg.det(whole), torch.linalg.det(small))


def test_random_rotations_are_uniform_enough_to_have_mean_zero_and_to_depend_on_the_seed():
    mean = torch.stack([rotation("random", 8, seed) for seed in range(200)]).mean(0)
    assert mean.abs().max() < 5 * (8 * 200) ** -0.5
    assert not torch.equal(rotation("random", 8, 0), rotation("random", 8, 1))


def _outliers(d_model: int = 24, rows: int = 64) -> torch.Tensor:
    sample = torch.randn(rows, d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sample[:, 5] *= 20
    return sample


@pytest.mark.parametrize("objective", ["kurtosis", "rounding"])
@pytest.mark.parametrize("fix_ones", [False, True])
def test_a_learned_rotation_is_orthogonal_and_better_than_its_start(objective, fix_ones):
    sample = _outliers()
    start = rotation("random", 24, 0, fix_ones)
    found = learned(sample, start, objective, fix_ones, steps=40)
    assert orthogonality(found) <= EXACT
    if fix_ones:
        torch.testing.assert_close(found.sum(1), torch.ones(24, dtype=torch.float64), rtol=0, atol=EXACT)

    def peak(rows):
        return (rows.abs().amax(-1).pow(2) / rows.pow(2).mean(-1)).mean()

    def kurtosis(rows):
        centred = rows - rows.mean(-1, keepdim=True)
        return (centred.pow(4).mean(-1) / centred.pow(2).mean(-1).pow(2)).mean()

    measure = kurtosis if objective == "kurtosis" else peak
    assert measure(sample @ found.T) < measure(sample @ start.T) < measure(sample)


def test_words_and_sizes_that_are_none_are_refused():
    with pytest.raises(ChoiceError, match="sample"):
        rotation("learned", 8)
    with pytest.raises(ChoiceError, match="rounding"):
        learned(_outliers(), rotation("random", 24), "peak")
    with pytest.raises(UsageError):
        rotation("random", 0)


def test_the_command_offers_these_words():
    assert options.ROTATIONS == KINDS and options.OBJECTIVES == OBJECTIVES
