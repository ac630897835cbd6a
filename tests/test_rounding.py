"""What rounding takes: numbers, sums, and a real stream added up again."""

import json
import math

import handmade
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mainstem
from mainstem.analysis.rounding import DTYPES, added_up, addition, one_is_lost_from, spacing
from mainstem.basis.rounding_reading import stream_states
from mainstem.errors import TextError, UsageError
from mainstem.lab.texts import Text
from mainstem.report import as_html, as_json, as_text
from mainstem.session import Model

LENGTH = 24


def ids(n=LENGTH, seed=0):
    return torch.randint(handmade.VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- numbers ----------------------------------------------------------------------------------------------


def test_the_published_sum_in_float32():
    found = addition(1e8, 1e-2, torch.float32)
    assert found.total == 1e8 == float(np.float32(1e8) + np.float32(1e-2))
    assert found.lost and found.spacing == 8.0


def test_the_same_sum_in_narrower_dtypes():
    half, brain = addition(1e8, 1e-2, torch.float16), addition(1e8, 1e-2, torch.bfloat16)
    assert math.isinf(half.total) and math.isnan(half.spacing)
    assert brain.lost and brain.spacing == 2.0**19


@pytest.mark.parametrize("dtype, power", [(torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)])
def test_from_where_on_one_is_lost(dtype, power):
    first = one_is_lost_from(dtype)
    assert first == 2.0**power
    assert addition(first, 1.0, dtype).lost and not addition(first / 2, 1.0, dtype).lost


@given(st.floats(-60000, 60000, allow_nan=False))
def test_spacing_is_the_distance_to_the_next_number(x):
    for dtype, kind in ((np.float32, torch.float32), (np.float16, torch.float16)):
        assert spacing(x, kind) == abs(float(np.spacing(np.abs(dtype(x)))))


# --- sums -------------------------------------------------------------------------------------------------


def writes(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 16, generator=generator, dtype=torch.float64) for _ in range(n)]


def test_whole_numbers_are_added_without_loss_in_any_dtype():
    small = [write.mul(3).round() for write in writes()]
    for dtype in DTYPES:
        made = added_up(small, dtype)
        assert made.overflow is None and len(made.steps) == len(small) - 1
        assert all(not step.lost.any() and not step.error.any() and not step.vanished.any() for step in made.steps)


@given(st.integers(0, 50))
def test_what_is_lost_is_bounded_by_the_spacing_of_the_state(seed):
    """Each coordinate loses half a spacing of the sum, and half of the write's own, at most."""
    given_writes = writes(seed=seed)
    for dtype in DTYPES:
        eps, exact = torch.finfo(dtype).eps, torch.stack(given_writes).cumsum(0)
        for number, step in enumerate(added_up(given_writes, dtype).steps, start=1):
            size = exact[number].abs() + exact[number - 1].abs() + 2 * given_writes[number].abs()
            bound = (eps * size).norm(dim=-1) / given_writes[number].norm(dim=-1)
            assert (step.lost <= 2 * bound).all()


def test_error_is_that_of_a_sum_in_numpy():
    given_writes = writes()
    state = given_writes[0].numpy().astype(np.float16)
    for write in given_writes[1:]:
        state = state + write.numpy().astype(np.float16)
    exact = sum(write.numpy() for write in given_writes)
    expected = np.linalg.norm(state.astype(np.float64) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    step = added_up(given_writes, torch.float16).steps[-1]
    np.testing.assert_allclose(step.error.numpy(), expected, rtol=1e-12)


def test_a_write_too_small_for_the_stream_vanishes_whole():
    large = torch.full((2, 4), 4096.0, dtype=torch.float64)
    tiny = torch.full((2, 4), 0.5, dtype=torch.float64)
    step = added_up([large, tiny], torch.float16).steps[0]
    assert (step.vanished == 1).all() and (step.lost == 1).all()
    assert (added_up([large, tiny], torch.float32).steps[0].lost == 0).all()


def test_a_write_of_zeros_loses_nothing():
    nothing = torch.zeros(2, 4, dtype=torch.float64)
    step = added_up([nothing + 1 / 3, nothing], torch.float16).steps[0]
    assert not step.lost.any() and not step.vanished.any() and (step.error > 0).all()


def test_overflow_ends_the_sum_and_names_the_write():
    big = torch.full((2, 4), 40000.0, dtype=torch.float64)
    made = added_up([big, -big, big, big, big], torch.float16)
    assert made.overflow == 3 and len(made.steps) == 2 and made.largest == 80000.0
    assert added_up([3 * big, big], torch.float16).overflow == 0
    assert added_up([big] * 5, torch.bfloat16).overflow is None


# --- a real stream ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def encoded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "encode", lambda self, p, chat=False: ids() if isinstance(p, str) else p)
        yield


TEXT = Text("noise", "made by hand", "unused")


@pytest.mark.parametrize("name", ["plain", "in_place", "parallel", "channel_gates", "post_norm", "mixed_back"])
def test_the_last_state_is_the_stream_of_the_model(name):
    model = mainstem.open(handmade.ALL[name]())
    states, units = stream_states(model, ids())
    assert len(states) == len(units) and units[0].startswith("embed")
    torch.testing.assert_close(states[-1].float(), model.trace(ids()).run.stream(handmade.LAYERS), atol=1e-5, rtol=1e-5)


def test_a_section_of_a_plain_model():
    model = mainstem.open(handmade.ALL["plain"]())
    section = model.basis.rounding(text=TEXT, tokens=LENGTH).rounding
    assert section.plain_sum and section.tokens == LENGTH
    by_dtype = {row.dtype: row for row in section.dtypes}
    assert by_dtype["float32"].error < by_dtype["float16"].error < by_dtype["bfloat16"].error
    assert by_dtype["float32"].lost < by_dtype["float16"].lost < by_dtype["bfloat16"].lost
    units = [row.unit for row in section.writes if row.dtype == "float16"]
    assert units[-6:] == ["L0.attn", "L0.mlp", "L1.attn", "L1.mlp", "L2.attn", "L2.mlp"]
    for row in section.writes:
        eps = torch.finfo(getattr(torch, row.dtype)).eps
        assert row.lost < 4 * eps * (1 + 1 / row.size)


def test_a_stream_that_is_no_plain_sum_is_said_to_be_none():
    section = mainstem.open(handmade.ALL["post_norm"]()).basis.rounding(text=TEXT, tokens=LENGTH).rounding
    assert not section.plain_sum


@torch.no_grad()
def test_overflow_in_half_precision_names_the_unit():
    module = handmade.ALL["plain"]()
    module.blocks[1].mlp.down.bias[3] = 1e5
    report = mainstem.open(module).basis.rounding(text=TEXT, tokens=LENGTH)
    half = next(row for row in report.rounding.dtypes if row.dtype == "float16")
    assert half.overflow == "L1.mlp" and half.lost is None
    assert [w["code"] for w in report.warnings] == ["overflow"]
    assert "L1.mlp" in report.warnings[0]["text"]
    assert {row.dtype for row in report.rounding.writes if row.unit == "L2.attn"} == {"float32", "bfloat16"}
    for shown in (as_text(report, 200), as_html(report)):
        assert "L1.mlp" in shown


def test_it_is_shown_in_every_format():
    report = mainstem.open(handmade.ALL["plain"]()).basis.rounding(text=TEXT, tokens=LENGTH)
    document = json.loads(as_json(report))
    assert document["command"] == "basis rounding"
    assert document["rounding"]["additions"][0]["spacing"] == 8.0
    assert document["rounding"]["additions"][2]["total"] is None  # float16 overflows
    text, page = as_text(report, 200), as_html(report)
    for words in ("100,000,000 + 0.01", "overflow", "Write by write"):
        assert words in text and words in page
    assert report.warnings == []
    assert {row["section"] for row in report.cells()} == {"rounding"}


@pytest.mark.parametrize("tokens", [1, 0, 2.5])
def test_a_prompt_that_is_too_short_is_refused(tokens):
    with pytest.raises(UsageError):
        mainstem.open(handmade.ALL["plain"]()).basis.rounding(text=TEXT, tokens=tokens)


def test_a_text_shorter_than_the_prompt_is_refused():
    with pytest.raises(TextError, match="24 tokens"):
        mainstem.open(handmade.ALL["plain"]()).basis.rounding(text=TEXT, tokens=100)
