"""Statistics of the stream in one pass: equal to naive ones, whatever the batches; their nulls; what they find."""

import math

import pytest
import torch
from handmade import ALL
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from zoo import build

import mainstem
from mainstem.analysis.kurtosis import neuron_kurtosis, random_expectation, token_kurtosis
from mainstem.analysis.moments import Moments
from mainstem.analysis.peaks import MassiveCriterion, Peaks, Tokens, medians_and_largest
from mainstem.analysis.rotations import random_rotation
from mainstem.basis.measuring import Watched, forward_of, kurtosis_section, measure_stream, rotate_stream
from mainstem.basis.reference import Reference
from mainstem.causal import stream_watch
from mainstem.causal.stream_points import stream_points
from mainstem.causal.stream_statistics import PointMoments, RotatedKurtosis, ThinnedKurtosis
from mainstem.causal.stream_watch import Rows, Seen, watch
from mainstem.errors import NotFiniteError, RunError
from mainstem.lab.texts import Text
from mainstem.run.windows import windows

D_MODEL = 24


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on(model, count, length, stride=None, seed=0):
    """Random tokens as a reference text."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.input_vocabulary, (count,), generator=generator).tolist()
    return Reference(Text("random", "random", ""), ids, windows(ids, length, stride))


def naive_kurtosis(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred.pow(4).mean(-1) / centred.pow(2).mean(-1).square()


# --- formulas ---------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 30), st.integers(2, 40), st.floats(-3, 3), st.floats(0.1, 100))
def test_kurtosis_is_the_definition_and_does_not_see_scale_or_shift(seed, tokens, d_model, shift, scale):
    x = gaussian(tokens, d_model, seed=seed)
    assert_close(token_kurtosis(x), naive_kurtosis(x))
    assert_close(token_kurtosis(x * scale + shift), naive_kurtosis(x), rtol=1e-6, atol=1e-9)


def test_mean_kurtosis_in_float32_agrees_to_a_millionth_also_with_an_outlier():
    x = gaussian(200, 576).float()
    x[:, 7] += 300.0
    assert_close(token_kurtosis(x), naive_kurtosis(x.double()), rtol=3e-6, atol=0)
    assert_close(token_kurtosis(x).mean(), naive_kurtosis(x.double()).mean(), rtol=1e-6, atol=0)
    one_hot = torch.eye(64)[:3]
    assert_close(token_kurtosis(one_hot), naive_kurtosis(one_hot.double()), rtol=1e-6, atol=0)
    assert float(token_kurtosis(one_hot)[0]) == pytest.approx(64 - 2 + 1 / 63, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-16, 1e-11, 1e9, 1e16])
def test_kurtosis_in_float32_holds_over_the_range_that_is_stated(scale):
    x = gaussian(50, 576)
    x[:, 7] += 300.0
    x = (x * (scale / x.std(1, keepdim=True))).float()
    assert_close(token_kurtosis(x), naive_kurtosis(x.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -7.0, 3e4])
def test_coordinates_that_are_all_equal_have_no_kurtosis_and_two_halves_have_one(value, dtype):
    equal = torch.full((3, 576), value, dtype=dtype)
    assert token_kurtosis(equal).isnan().all()
    equal[1, ::2] += 1
    equal[1, 1::2] -= 1
    assert token_kurtosis(equal).isnan().tolist() == [True, bool((equal[1] == equal[1, 0]).all()), True]
    assert float(token_kurtosis(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))) == 1


@pytest.mark.parametrize("d_model", [16, 64, 576])
def test_gaussian_data_have_the_finite_size_expectation(d_model):
    kurtosis = token_kurtosis(gaussian(4000, d_model, seed=d_model))
    error = float(kurtosis.std()) / math.sqrt(len(kurtosis))
    assert abs(float(kurtosis.mean()) - random_expectation(d_model)) < 3 * error
    assert abs(float(kurtosis.mean()) - 3) > 3 * error or d_model == 576  # the correction matters where d is small


@pytest.mark.parametrize("d_model", [2, 17, 576])
def test_rotations_are_orthogonal_and_differ(d_model):
    one, two = random_rotation(d_model, 0), random_rotation(d_model, 1)
    assert_close(one @ one.T, torch.eye(d_model, dtype=torch.float64), atol=1e-10, rtol=0)
    assert not torch.allclose(one, two)


def test_a_rotation_of_any_vector_has_the_expectation_on_average():
    x = torch.eye(D_MODEL, dtype=torch.float64)[:1]
    rotated = torch.cat([token_kurtosis(x @ random_rotation(D_MODEL, seed)) for seed in range(2000)])
    error = float(rotated.std()) / math.sqrt(len(rotated))
    assert abs(float(rotated.mean()) - random_expectation(D_MODEL)) < 3 * error


def test_kurtosis_of_neurons_is_one_if_all_are_equal_and_d_if_one_is_all():
    assert neuron_kurtosis(torch.full((9,), 3.0)) == pytest.approx(1)
    assert neuron_kurtosis(torch.eye(9)[2]) == pytest.approx(9)


# --- sums -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(0, 25), min_size=1, max_size=5), st.integers(0, 100))
def test_moments_of_parts_add_up_to_those_of_the_whole(sizes, seed):
    x = gaussian(sum(sizes) + 1, D_MODEL, seed=seed).float()
    x[:, 3] += 50.0  # a mean that dwarfs the deviation
    parts = [Moments.of(part) for part in x.split([*sizes, 1])]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    wide = x.double()
    assert total.tokens == len(x)
    assert total.kurtosis == pytest.approx(float(naive_kurtosis(wide).mean()), rel=1e-6)
    assert_close(total.mean, wide.mean(0), rtol=1e-6, atol=1e-7)
    assert_close(total.variance, wide.var(0, correction=0), rtol=1e-6, atol=1e-9)
    assert_close(total.rms, wide.square().mean(0).sqrt(), rtol=1e-6, atol=1e-7)
    assert_close(total.magnitude, wide.abs().amax(0))
    assert total.neuron_kurtosis == pytest.approx(neuron_kurtosis(wide.square().mean(0).sqrt()), rel=1e-6)


def test_a_vector_without_differences_has_no_kurtosis_and_spoils_none():
    x = gaussian(3, D_MODEL)
    x[1] = 0
    assert Moments.of(x).kurtosis == pytest.approx(float(naive_kurtosis(x[[0, 2]]).mean()))
    assert math.isnan(Moments.of(x[1:2]).kurtosis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("made", [lambda point: ThinnedKurtosis([2]), lambda point: RotatedKurtosis([point], 24, 4, 0)])
def test_vectors_without_differences_are_left_out_of_nulls_too(made, dtype):
    point = stream_points(mainstem.open(ALL["in_place"]()).anatomy, "stream")[0]
    x = gaussian(6, D_MODEL).to(dtype)
    x[3] = 0

    def seen(x):
        watcher, index = made(point), torch.arange(len(x))
        watcher.see([0], Seen(x[None], Rows((1, len(x)), index, 1, index, index)))
        return watcher

    whole, without = seen(x), seen(x[[0, 1, 2, 4, 5]])
    assert int(whole.tokens[0]) == int(without.tokens[0]) == 4
    assert_close(whole.kurtosis(), without.kurtosis())
    assert whole.kurtosis().isfinite().all() and seen(x[[0, 3]]).kurtosis().isnan().all()


# --- in a run ---------------------------------------------------------------------------------------------


def naive(model, points, cut):
    """Every counted vector at every point, kept."""
    kept = [[] for _ in points]

    class Keep:
        def see(self, numbers, seen):
            for number, x in zip(numbers, seen.x, strict=True):
                kept[number].append(x.double())

    watch(model.module, forward_of(model), points, cut, [Keep()])
    return [torch.cat(parts) for parts in kept]


@pytest.mark.parametrize("family, count", [("llama", 7), ("gpt_neox", 4), ("gemma3_text", 7), ("gpt2", 8)])
def test_statistics_equal_naive_ones_and_do_not_depend_on_batches(family, count):
    """Also where blocks are parallel, norms follow sublayers, or positions are embedded."""
    model = mainstem.open(build(family))
    text = on(model, 67, 12)
    points = stream_points(model.anatomy)
    assert sum(point.kind == "stream" for point in points) == count
    everything = naive(model, points, text.windows)
    sums = {batch: PointMoments(points) for batch in (1, 3)}
    for batch, moments in sums.items():
        watch(model.module, forward_of(model), points, text.windows, [moments], batch=batch)
    for number, x in enumerate(everything):
        assert len(x) == 67
        for moments in sums.values():
            whole = moments.whole(number)
            assert whole.tokens == 67 and moments.without_first(number).tokens == 67 - 6 + 1
            assert whole.kurtosis == pytest.approx(float(naive_kurtosis(x).mean()), rel=1e-6)
            assert_close(whole.rms, x.square().mean(0).sqrt(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stride", [12, 5])
def test_each_token_is_counted_once_however_windows_overlap(stride):
    model = mainstem.open(ALL["in_place"]())
    text = on(model, 50, 12, stride)
    moments = PointMoments(stream_points(model.anatomy, "stream"))
    watch(model.module, forward_of(model), moments.points, text.windows, [moments], batch=2)
    assert moments.whole(0).tokens == 50


def test_what_is_read_is_seen_after_its_norm_and_once_for_all_matrices():
    model = mainstem.open(build("llama"))
    points = stream_points(model.anatomy, "input")
    assert [point.name for point in points] == [
        f"L{layer}.{kind}.input" for layer in range(model.anatomy.sizes.n_layers) for kind in ("attn", "mlp")
    ]
    text = on(model, 24, 12)
    norm = model.module.model.layers[1].post_attention_layernorm
    seen = []
    with torch.no_grad():
        handle = norm.register_forward_hook(lambda module, args, output: seen.append(output))
        forward_of(model)(text.windows.ids)
        handle.remove()
    assert_close(naive(model, points, text.windows)[3], seen[0].flatten(0, 1).double(), atol=1e-6, rtol=1e-5)


def test_the_run_is_left_as_it_was():
    model = mainstem.open(build("llama"))
    text = on(model, 24, 12)
    forward = forward_of(model)
    before = forward(text.windows.ids)
    measure_stream(model, text)
    assert torch.equal(before, forward(text.windows.ids))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.module.modules())


@pytest.mark.parametrize("together", [1, 1 << 20])
def test_a_value_that_is_no_number_is_refused_by_its_first_place(together, monkeypatch):
    """Also where points of one kind are shown before earlier ones of another."""
    monkeypatch.setattr(stream_watch, "TOGETHER", together)
    module = build("llama")
    model = mainstem.open(module)
    text, points = on(model, 24, 12), stream_points(model.anatomy)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    with pytest.raises(NotFiniteError, match=r"L1\.mlp\b(?!\.)"):
        measure_stream(model, text)
    backwards = Watched(points[::-1])
    with pytest.raises(NotFiniteError, match=r"L1\.mlp\b(?!\.)"):
        watch(module, forward_of(model), backwards.points, text.windows, backwards.watchers)


def test_a_run_is_over_when_its_last_point_has_gone_by():
    model = mainstem.open(build("llama"))
    text, called, _ = on(model, 24, 12), [], model.anatomy
    handle = model.module.lm_head.register_forward_hook(lambda *_: called.append(1))
    measured = measure_stream(model, text)
    handle.remove()
    assert not called and int(measured.moments.whole(0).tokens) == 24


@pytest.mark.parametrize("together", [1, 1500, 1 << 20])
def test_statistics_do_not_depend_on_how_many_points_are_shown_together(together, monkeypatch):
    model = mainstem.open(build("gpt2"))
    text = on(model, 40, 12)
    one = measure_stream(model, text, magnitude=1.0)
    monkeypatch.setattr(stream_watch, "TOGETHER", together)
    other = measure_stream(model, text, magnitude=1.0)
    for number in range(len(one.points)):
        for part in ("mean", "deviation", "magnitude", "kurtosis_sum", "tokens", "varied"):
            mine, others = (getattr(each.moments.whole(number), part) for each in (one, other))
            assert_close(mine, others, rtol=1e-6, atol=1e-9)
        assert str(one.peaks.ratio(number)) == str(other.peaks.ratio(number))  # NaN where no window has a sample
    for kind in ("inputs", "heads", "stream"):
        mine, others = (getattr(each, kind).counts for each in (one, other))
        assert torch.equal(mine.hits, others.hits) and torch.equal(mine.classes, others.classes)


def test_the_null_is_three_and_one_large_dimension_is_not():
    module = build("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[:, 5] += 30.0
    model = mainstem.open(module)
    text = on(model, 120, 12)
    section = kurtosis_section(measure_stream(model, text), rotate_stream(model, text, rotations=40, tokens=120))
    first = section.points[0]
    d_model = model.anatomy.sizes.d_model
    assert first.name == "embed" and section.tokens == {"all": 120, "first": 10}
    assert first.kurtosis > 0.8 * (d_model - 2) and first.neuron_kurtosis > 0.8 * d_model
    assert first.rotated == pytest.approx(section.expectation, abs=0.3)
    assert first.rotated_least < first.rotated < first.rotated_largest < first.without_first
    assert section.rotations == {"draws": 40, "tokens": 110}


def test_moments_that_were_asked_for_do_not_change_with_what_is_seen_later():
    model = mainstem.open(build("llama"))
    text, moments = on(model, 24, 12), PointMoments(stream_points(model.anatomy, "stream"))
    watch(model.module, forward_of(model), moments.points, text.windows, [moments])
    before = moments.without_first(1)
    mean = before.mean.clone()
    watch(model.module, forward_of(model), moments.points, text.windows, [moments])
    assert torch.equal(before.mean, mean) and int(moments.without_first(1).tokens) == 2 * int(before.tokens)


def test_a_place_that_was_not_reached_is_named():
    points = stream_points(mainstem.open(build("llama")).anatomy, "stream")
    with pytest.raises(RunError, match="L0.attn"):
        PointMoments(points).without_first(1)


# --- massive activations ----------------------------------------------------------------------------------


def tokens(index, length):
    return Tokens(index, index, index // length, index % length)


def add_to(peaks, x, index, length):
    where = tokens(index, length)
    peaks.add(x, where, *medians_and_largest(x[where.sampled]), x.abs().amax(0))


def test_massive_activations_are_found_with_their_tokens():
    x = gaussian(32, D_MODEL, seed=3).float() * 0.1
    x[0, 4], x[16, 4], x[9, 4] = 500.0, -700.0, 90.0  # the last one is not above 100
    peaks = Peaks(MassiveCriterion())
    add_to(peaks, x, torch.arange(32), 16)
    assert list(peaks.massive) == [4]
    found = peaks.massive[4]
    assert (found.count, found.firsts, found.value, found.token, found.place) == (2, 2, -700.0, 16, 16)
    assert found.tokens == {0: 1, 16: 1}
    assert found.times == pytest.approx(700 / float(x[16:].abs()[4::8].flatten().median()), rel=0.05)


def test_a_large_value_in_a_large_vector_is_not_massive():
    x = gaussian(32, D_MODEL, seed=3).float() * 10
    x[3, 4] = 500.0
    peaks = Peaks(MassiveCriterion())
    add_to(peaks, x, torch.arange(32), 16)
    assert not peaks.massive
    sampled = x.abs()[[4, 12, 20, 28]]
    assert peaks.max_over_median == pytest.approx(float((sampled.amax(1) / sampled.median(1).values).mean()), rel=1e-5)


def test_a_window_too_short_for_a_sample_has_the_median_of_all_its_tokens():
    x = gaussian(3, D_MODEL, seed=3).float() * 0.01
    x[1, 4] = 500.0
    peaks = Peaks(MassiveCriterion())
    add_to(peaks, x, torch.arange(3), 3)
    assert peaks.massive[4].count == 1 and math.isnan(peaks.max_over_median)
    assert peaks.massive[4].times == pytest.approx(500 / float(x.abs().median(1).values.median()), rel=1e-5)


def test_what_is_massive_lies_above_the_threshold_whatever_else_is_in_the_batch():
    x = gaussian(32, D_MODEL, seed=3).float() * 0.01
    x[0, 4], x[16, 5] = 100.0, 500.0
    peaks = Peaks(MassiveCriterion())
    add_to(peaks, x, torch.arange(32), 16)
    assert list(peaks.massive) == [5]


def test_massive_activations_do_not_depend_on_batches():
    x = gaussian(64, D_MODEL, seed=3).float() * 0.1
    x[::16, 4] = 500.0
    whole, parts = Peaks(MassiveCriterion()), Peaks(MassiveCriterion())
    add_to(whole, x, torch.arange(64), 16)
    for part in torch.arange(64).split(16):
        add_to(parts, x[part], part, 16)
    assert whole.massive == parts.massive
    assert whole.max_over_median == pytest.approx(parts.max_over_median)


def test_memory_does_not_grow_with_the_text():
    model = mainstem.open(build("llama"))

    def held(count):
        watched = Watched(stream_points(model.anatomy, "stream"))
        text = on(model, count, 4)
        watch(model.module, forward_of(model), watched.points, text.windows, watched.watchers, batch=16)
        moments = watched.moments
        kept = [*(one for one in moments.first if one), *(table.moments for table in moments.rest.values())]
        sums = sum(part.numel() for one in kept for part in vars(one).values())
        return sums + sum(len(part) for parts in moments.held for part in parts)

    assert held(4 * 80) == held(4 * 144)
