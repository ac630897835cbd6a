"""Metrics of a run: what they are by definition, stable, differentiable, and refused where they say nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.causal.metrics import METRICS, Metric, normalised
from mainstem.errors import ChoiceError, MetricError, TargetError, TokenError

VOCABULARY = 12
ANSWERS, WRONG = (1, 4), (2, 7, 9)


def logits(seed: int, runs: int = 5, scale: float = 4.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(runs, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)


def metric(name: str, clean: torch.Tensor | None = None) -> Metric:
    return Metric(name, ANSWERS, WRONG, logits(99, 1)[0] if clean is None else clean)


def by_definition(name: str, run: list[float], clean: list[float]) -> float:
    weights, clean_weights = [math.exp(z) for z in run], [math.exp(z) for z in clean]
    p, q = [w / sum(weights) for w in weights], [w / sum(clean_weights) for w in clean_weights]
    share = sum(p[token] for token in ANSWERS)
    return {
        "logit-difference": sum(run[t] for t in ANSWERS) / 2 - sum(run[t] for t in WRONG) / 3,
        "probability": share,
        "log-probability": math.log(share),
        "kl": sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
    }[name]


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 20))
def test_each_metric_is_its_definition_in_float64(name: str, seed: int, scale: float) -> None:
    runs = logits(seed, scale=scale)
    found = metric(name)(runs)
    clean = logits(99, 1)[0].tolist()
    assert found.dtype == torch.float64
    expected = [by_definition(name, run, clean) for run in runs.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), shift=st.floats(-500, 500))
def test_a_shift_common_to_all_logits_changes_nothing(name: str, seed: int, shift: float) -> None:
    runs = logits(seed, dtype=torch.float64)
    torch.testing.assert_close(metric(name)(runs + shift), metric(name)(runs), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", METRICS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    runs = logits(3, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(metric(name), (runs,))


@pytest.mark.parametrize("name", METRICS)
def test_extreme_and_excluded_logits_stay_finite(name: str) -> None:
    """Logits in the thousands, and tokens that both runs exclude altogether."""
    clean = 1000 * logits(1, 1, dtype=torch.float64)[0]
    clean[11] = -math.inf
    runs = torch.stack([clean, clean * 0.5]).requires_grad_()
    found = Metric(name, ANSWERS, WRONG, clean)(runs)
    assert found.isfinite().all()
    (gradient,) = torch.autograd.grad(found.sum(), runs)
    assert gradient.isfinite().all()


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 5))
def test_the_divergence_is_zero_for_the_clean_run_and_positive_for_others(seed: int, scale: float) -> None:
    runs = logits(seed, scale=scale, dtype=torch.float64)
    found = metric("kl", runs[0])(runs)
    assert abs(float(found[0])) < 1e-14
    assert bool((found[1:] > 1e-8).all())


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_recovery_is_one_for_clean_zero_for_corrupted_and_affine_in_the_metric(name: str, seed: int) -> None:
    runs = logits(seed, 4)
    own = metric(name, runs[0])
    found = normalised(own, runs[0], runs[1])(runs)
    torch.testing.assert_close(found[:2], torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-12)
    values = own(runs)
    back = values[1] + found * (values[0] - values[1])
    torch.testing.assert_close(back, values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_constant_metric_is_refused_and_a_real_change_is_not(name: str, dtype: torch.dtype) -> None:
    clean = logits(5, 1, dtype=dtype)[0]
    rounded = clean * (1 + torch.finfo(dtype).eps * (torch.arange(VOCABULARY) % 2)).to(dtype)
    own = metric(name, clean)
    for corrupted in (clean, rounded):
        with pytest.raises(MetricError, match=f"The metric {name} is .* rounding cannot tell them apart .* Change the"):
            normalised(own, clean, corrupted)
    changed = clean.clone()
    changed[list(ANSWERS)] += 8
    assert normalised(own, clean, changed).clean != normalised(own, clean, changed).corrupted


def test_a_tiny_probability_that_changes_is_no_rounding() -> None:
    clean, corrupted = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)
    clean[list(ANSWERS)], corrupted[list(ANSWERS)] = -18, -20
    assert float(normalised(metric("probability"), clean, corrupted)(clean[None])) == 1


@pytest.mark.parametrize("name", METRICS)
def test_a_run_of_nan_is_refused(name: str) -> None:
    with pytest.raises(MetricError, match="nan"):
        normalised(metric(name), logits(1, 1)[0], torch.full((VOCABULARY,), math.nan))


def test_refusals_name_what_is_missing() -> None:
    with pytest.raises(ChoiceError, match="Unknown metric 'logit_difference'. Did you mean 'logit-difference'"):
        Metric("logit_difference", (1,), (2,))
    with pytest.raises(MetricError, match="needs wrong answers. Name one at least, or take log-probability"):
        Metric("logit-difference", (1,))
    with pytest.raises(MetricError, match="The metric probability has no answer"):
        Metric("probability")
    with pytest.raises(MetricError, match="needs the clean run"):
        Metric("kl")
    with pytest.raises(TargetError, match=r"right and wrong at once \(id:2\)"):
        Metric("logit-difference", (1, 2), (2, 3))
    with pytest.raises(TargetError, match="id:3 is named twice"):
        Metric("logit-difference", (1,), (3, 3))
    with pytest.raises(TokenError, match="Token id 12 is outside the vocabulary"):
        Metric("probability", (12,))(logits(0))


def test_the_mean_over_answers_and_the_probability_of_a_set() -> None:
    runs = torch.tensor([[0.0, 2.0, 4.0, 1.0]])
    assert float(Metric("logit-difference", (1, 2), (0, 3))(runs)) == 2.5
    every = Metric("probability", (0, 1, 2, 3))(runs)
    assert abs(float(every) - 1) < 1e-15
