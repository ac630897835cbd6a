"""The default model: what is known of "The capital of France is", in three precisions, alone and batched."""

import math

import pytest
import torch

import mainstem
from mainstem.analysis.decompose import LEVELS
from mainstem.results.explanation import Explanation
from mainstem.session import Model
from mainstem.targets import Target
from mainstem.tracing import Trace

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
PROMPTS = [PROMPT, "Once upon a time there was a little girl who lived in a", "Two and two make"]
PARIS = 7042


@pytest.fixture(scope="module")
def trace(demo_model: Model) -> Trace:
    return demo_model.trace(PROMPT)


@pytest.fixture(scope="module")
def explanation(trace: Trace) -> Explanation:
    return trace.explain(top=10)


@pytest.fixture(scope="module", params=["float64", "bfloat16"])
def other(request: pytest.FixtureRequest) -> Model:
    return mainstem.open("demo", dtype=request.param)


# --- what it answers ----------------------------------------------------------------------------------------


def test_it_predicts_paris(explanation: Explanation) -> None:
    target = explanation.target
    assert (target.token, target.id, target.rank) == (" Paris", PARIS, 1)
    assert target.probability == pytest.approx(0.7725, abs=5e-4)
    assert target.log_probability == pytest.approx(math.log(target.probability))
    assert explanation.prompt["tokens"] == ["The", " capital", " of", " France", " is"]


def test_the_value_that_france_wrote_is_the_first(explanation: Explanation) -> None:
    first = explanation.values[0]
    assert (first.unit, first.source, first.kind) == ("L23H4@3", " France", "attention_subvalue")
    assert first.increase == pytest.approx(2.975, abs=0.01)
    assert first.promotes[:3] == [" France", " Breton", " French"]
    assert first.coefficient == pytest.approx(0.90, abs=0.01)
    assert "L24N1005" in [value.unit for value in explanation.values[:4]]


def test_certificates_hold_with_small_errors(explanation: Explanation) -> None:
    certificate = explanation.certificate
    assert certificate.holds and certificate.failed is None
    assert certificate.relative_error < 1e-5 and certificate.max_relative_error < 1e-5
    assert certificate.nats is not None and certificate.nats < 1e-4
    assert certificate.labels.holds and certificate.labels.checked >= 12
    # query, key, value, gate and up in 30 layers, and the readout
    assert certificate.reads.holds and certificate.reads.checked == 151
    assert certificate.reads.worst < 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_is_exact(trace: Trace, level: str) -> None:
    for position in (-1, 0, 2):
        certificate = trace.decompose(level, position).certificate
        assert certificate is not None and certificate.holds
        assert certificate.relative_error < 1e-5
        assert certificate.tolerance < 1e-2
        assert certificate.worst_dimension < 1e-3


def test_the_whole_model_is_read_as_it_is_built(demo_model: Model) -> None:
    sizes = demo_model.anatomy.sizes
    assert (sizes.n_layers, sizes.d_model, sizes.d_vocab, sizes.d_mlp) == (30, 576, 49152, 1536)
    assert (sizes.n_heads, sizes.n_key_value_heads, sizes.d_head) == (9, 3, 64)
    assert demo_model.anatomy.tied and demo_model.anatomy.causal
    units = ["embed", *(f"L{layer}.{sublayer}" for layer in range(30) for sublayer in ("attn", "mlp"))]
    assert [str(unit) for unit in demo_model.anatomy.sublayers()] == units


def test_scores_sum_to_what_they_say(trace: Trace) -> None:
    logits, target = trace.logits().double(), Target(ids=(PARIS,), text=" Paris")
    wanted = {
        "direct": float(logits[PARIS]),
        "additive": float(logits.log_softmax(-1)[PARIS]) + math.log(len(logits)),
    }
    for score, total in wanted.items():
        for level in ("sublayers", "units"):
            made = trace.attribute(target, level, score)
            assert made.functional.total == pytest.approx(total, abs=1e-3)
            assert sum(float(s.sum()) for s in made.scores) == pytest.approx(total, abs=1e-3)


def test_an_explanation_has_the_keys_that_were_promised(explanation: Explanation) -> None:
    document = explanation.as_dict()
    promised = {
        "": "schema command provenance warnings model prompt position target against norm score certificate layers "
        "values queries search",
        "provenance": "mainstem torch transformers model revision dtype device seed date",
        "model": "name n_layers d_model dtype",
        "prompt": "text tokens ids",
        "target": "token id probability log_probability rank",
        "certificate": "level position relative_error max_relative_error tolerance holds parts nats labels reads",
        "search": "units scored exact slack",
    }
    for key, names in promised.items():
        part = document if not key else document[key]
        assert set(names.split()) <= set(part), key
    for check in ("labels", "reads"):
        assert {"checked", "worst", "holds"} <= set(document["certificate"][check])
    rows = {
        "warnings": "code text value",
        "layers": "unit lens_log_probability log_probability_increase",
        "values": "unit kind coefficient increase additive direct promotes suppresses",
    }
    for key, names in rows.items():
        assert document[key] and all(set(names.split()) <= set(row) for row in document[key])
    assert document["schema"] == "mainstem/explain/1"


def test_the_layers_lead_to_the_prediction(explanation: Explanation) -> None:
    rows = explanation.layers
    assert len(rows) == 61 and rows[-1].lens_log_probability == pytest.approx(
        explanation.target.log_probability, abs=1e-4
    )
    assert sum(row.log_probability_increase for row in rows) == pytest.approx(rows[-1].lens_log_probability, abs=1e-4)
    assert rows[-1].top == [" Paris"]


def test_its_warnings_are_those_of_a_chat_model_with_a_sink(explanation: Explanation) -> None:
    codes = {warning["code"] for warning in explanation.warnings}
    assert codes >= {"sink", "first-token", "tied", "cancel", "chat"}


# --- runs ---------------------------------------------------------------------------------------------------


def test_capture_changes_no_bit(demo_model: Model) -> None:
    ids = torch.tensor([demo_model.encode(PROMPT)])
    with torch.no_grad():
        before = demo_model.module(input_ids=ids, use_cache=False).logits[0]
    trace = demo_model.trace(PROMPT, positions=range(5))
    assert torch.equal(torch.stack([trace.logits(position) for position in range(5)]), before)


def test_a_batch_gives_each_prompt_what_it_gets_alone(demo_model: Model) -> None:
    batch = demo_model.trace(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone, together = demo_model.trace(prompt).explain(top=5), batch.explain(top=5, row=row)
        assert together.prompt["ids"] == alone.prompt["ids"] and together.position == alone.position
        assert together.target.id == alone.target.id
        assert together.target.probability == pytest.approx(alone.target.probability, abs=1e-4)
        assert together.certificate.holds and together.certificate.relative_error < 1e-5
        assert together.certificate.reads.holds
        assert [value.unit for value in together.values] == [value.unit for value in alone.values]
        for mine, single in zip(together.values, alone.values, strict=True):
            assert mine.increase == pytest.approx(single.increase, abs=1e-3)
            assert mine.source == single.source


def test_another_precision_gives_the_same_account(other: Model, demo_model: Model, explanation: Explanation) -> None:
    assert other.anatomy.sublayers() == demo_model.anatomy.sublayers()
    again = other.explain(PROMPT, top=10)
    half = again.model["dtype"] == "bfloat16"
    assert again.target.id == PARIS
    assert again.target.probability == pytest.approx(explanation.target.probability, abs=0.03 if half else 1e-5)
    certificate = again.certificate
    assert certificate.holds and certificate.labels.holds and certificate.reads.holds
    assert certificate.relative_error < (5e-3 if half else 1e-11)
    assert certificate.tolerance < (0.1 if half else 1e-6)
    assert again.values[0].unit == "L23H4@3"
    assert again.values[0].increase == pytest.approx(explanation.values[0].increase, abs=0.1 if half else 1e-4)
    if not half:
        assert [value.unit for value in again.values] == [value.unit for value in explanation.values]
