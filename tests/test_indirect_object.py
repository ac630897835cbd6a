"""The indirect-object case: every claim can fail, and on the default model it runs to its end."""

from dataclasses import replace

import pytest
import torch

import mainstem
from mainstem.analysis.intervals import Interval
from mainstem.causal.head_controls import same_layer_heads
from mainstem.errors import UsageError
from mainstem.experiments import indirect_object
from mainstem.experiments import indirect_object_claims as case
from mainstem.report import as_html, as_json, as_text
from tests import report_samples as samples
from tests import zoo


def stream(start: list[float], end: list[float], elsewhere: float = 0.02):
    """A sweep of the residual stream over three positions, of which the first differs."""
    effects = [[a, elsewhere, b] for a, b in zip(start, end, strict=True)]
    rows = [f"L{i}" for i in range(len(start))]
    return replace(
        samples.patched(),
        prompt={"text": None, "tokens": ["a", "b", "c"], "ids": [1, 2, 3]},
        corrupted={"text": None, "tokens": ["x", "b", "c"], "ids": [9, 2, 3]},
        position=2,
        rows=rows,
        columns=["0 a/x", "1 b", "2 c"],
        effects=effects,
        values=effects,
    )


def head(name: str, mean: float, width: float = 0.05) -> case.Head:
    return name, Interval(mean, mean - width, mean + width)


def test_a_name_that_passes_another_position_is_not_moved_directly():
    made = case.moved(stream([1.0, 0.9, 0.1, 0.0], [0.0, 0.1, 0.9, 1.0]))
    assert made.finding == "reproduced" and made.values["layer"] == "L2"
    assert (made.values["from"], made.values["to"]) == (0, 2)
    assert case.moved(stream([1.0, 0.9, 0.1, 0.0], [0.0, 0.1, 0.9, 1.0], elsewhere=0.7)).finding == "not reproduced"
    assert case.moved(stream([0.1, 0.1, 0.1], [0.9, 0.9, 1.0])).finding == "not reproduced"


def test_many_heads_are_not_a_few():
    found = [head("L1H1", 0.6), head("L1H2", 0.2), *(head(f"L0H{i}", 0.01) for i in range(18))]
    assert case.few(found[:2], found).finding == "reproduced"
    assert case.few([], found).finding == "not reproduced"
    assert case.few(found[:12], found).finding == "not reproduced"


def test_heads_against_the_answer_need_an_interval_below_nothing():
    assert case.opposed([head("L1H1", -0.3)]).finding == "reproduced"
    assert case.opposed([head("L1H1", -0.3, 0.5)]).finding == "in part"
    assert case.opposed([]).finding == "not reproduced"


@pytest.mark.parametrize(
    ("lost", "published", "expected"),
    [([0.8, 0.9, 0.7], 0.6, "reproduced"), ([0.9, 0.1, 0.9], 0.6, "in part"), ([0.1, 0.2, 0.1], 0.2, "not reproduced")],
)
def test_what_is_lost_decides(lost, published, expected):
    ablated = case.Ablated(lost, published, {"random": [0.0]})
    assert case.taken_out([head("L1H1", 0.5)], ablated, 0).finding == expected


@pytest.mark.parametrize(
    ("draws", "expected"),
    [([0.1, 0.2], "reproduced"), ([0.1, 0.6], "in part"), ([0.9, 0.8], "not reproduced"), ([], "not reproduced")],
)
def test_random_heads_that_do_as_much_are_a_null_that_fails(draws, expected):
    made = case.nulls(case.Ablated([0.8], 0.8, {"random": draws, "same layers": []}))
    assert made.finding == expected
    assert case.nulls(case.Ablated([0.05], 0.8, {"random": [0.1, 0.2]})).finding == "not reproduced"


def test_estimates_that_name_other_heads_are_no_match():
    found = [head("L1H1", 0.6), head("L1H2", 0.2), *(head(f"L0H{i}", 0.001 * i) for i in range(18))]
    right = {name: effect.mean / 2 for name, effect in found}
    assert case.estimated(found[:2], found, right, 0).finding == "reproduced"
    wrong = {name: -effect.mean for name, effect in found}
    made = case.estimated(found[:2], found, wrong, 0)
    assert made.finding == "not reproduced" and made.values["correlation"] == -1
    assert case.estimated(found[:2], found, right | {"L1H2": 0.0}, 0).finding == "not reproduced"


def test_heads_are_ranked_by_their_means():
    reading = samples.patched(pairs=3, heads=True)
    ranked = case.heads_by_effect(reading)
    assert len(ranked) == 80 * 20 - 1 and ranked[0][0] == "L79H18"
    assert all(a[1].mean >= b[1].mean for a, b in zip(ranked, ranked[1:], strict=False))
    assert ranked[0][1].low < ranked[0][1].mean < ranked[0][1].high


def test_controls_of_the_same_layers_are_others_and_different():
    others = [f"L{layer}H{i}" for layer in range(3) for i in range(4) if (layer, i) not in ((0, 0), (0, 1))]
    drawn = same_layer_heads(["L0H0", "L0H1"], others, torch.Generator().manual_seed(0))
    assert sorted(drawn) == ["L0H2", "L0H3"]


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(UsageError, match="tokenizer"):
        indirect_object.run(mainstem.open(zoo.build("llama")))


@pytest.mark.slow
def test_the_case_on_the_default_model(demo_model):
    made = indirect_object.run(demo_model, quick=True)
    assert made.claims[0].finding == "reproduced"
    for shown in (as_text(made), as_html(made), as_json(made)):
        assert "L23H3" in shown
