"""Descriptions of anatomies, traces of shapes and readings of the lens, on tiny models of many families."""

import math

import pytest
import report_samples
import torch
import zoo

import mainstem
from mainstem.errors import MainstemError, UsageError
from mainstem.read.describing import describe_anatomy
from mainstem.read.lens_reading import read_lens
from mainstem.report import as_html, as_json, as_text

pytestmark = pytest.mark.slow  # thorough, and not among what every edit runs

IDS = [5, 6, 7, 8, 9, 10]
QUICK = ["llama", "gemma2", "mixtral"]
SLOW = ["gpt2", "openai-gpt", "granite", "mamba", "falcon", "deepseek_v3"]
SOME = [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
ACTIVATIONS = {
    "silu": "silu",
    "gelu_new": "gelu (tanh)",
    "gelu_pytorch_tanh": "gelu (tanh)",
    "gelu": "gelu",
    "relu": "relu",
}


def described(family, **options):
    model = mainstem.open(zoo.build(family, **options))
    return model, describe_anatomy(model, IDS)


@pytest.fixture(scope="module", params=SOME)
def pair(request):
    return described(request.param)


def test_a_description_repeats_the_anatomy(pair):
    model, d = pair
    anatomy = model.anatomy
    assert [w.unit for w in d.writes] == [str(w.unit) for w in anatomy.writes]
    assert [tuple(r.roles) for r in d.reads] == [r.roles for r in anatomy.reads]
    assert len(d.blocks) == anatomy.sizes.n_layers == d.model["n_layers"]
    assert {u for b in d.blocks for u in b.sublayers} == {w.unit for w in d.writes if w.layer is not None}
    assert d.sizes["d_model"] == d.final.unembedding[1] and d.sizes["d_vocab"] == d.final.unembedding[0]
    assert all(r.matrix[1] == d.sizes["d_model"] for r in d.reads)
    assert all(w.matrix[0] == d.sizes["d_model"] for w in d.writes if w.matrix is not None)


def test_levels_count_the_parts_of_a_decomposition(pair):
    model, d = pair
    trace = model.trace(IDS)
    kinds = {"heads": "head", "subvalues": "attention_subvalue", "attention_neurons": "attention_neuron", "neurons": ""}
    for row in d.levels:
        if row.level == "sublayers":
            assert row.units == len({w.unit for w in d.writes})
            continue
        if row.refused:
            with pytest.raises(MainstemError):
                trace.decompose(row.level)
            continue
        kind = kinds[row.level] or ("expert_neuron" if any(w.experts for w in d.writes) else "ffn_neuron")
        found = sum(len(g) for g in trace.decompose(row.level).groups if g.kind == kind)
        if kind == "expert_neuron":  # a token meets some experts only
            assert 0 < found <= row.units
        else:
            assert found == (row.units or 0) * (len(IDS) if row.per_source else 1)


@pytest.mark.parametrize("implementation", [None, "eager"])
def test_neurons_are_counted_where_experts_stand_beside_dense_layers(implementation):
    """A dense layer of 96, then experts of 40 and one shared expert of 40; most experts are chosen by no token."""
    model, _ = described("deepseek_v3", experts_implementation=implementation, n_routed_experts=16, n_group=4)
    config = model.module.config
    assert (config.n_routed_experts, config.first_k_dense_replace, config.num_hidden_layers) == (16, 1, 3)
    (neurons,) = [row for row in describe_anatomy(model).levels if row.level == "neurons"]
    assert neurons.units == 96 + 2 * (16 + 1) * 40


def test_shapes_follow_from_each_other(pair):
    """Every product of a matrix with what it reads has the matrix's rows; the stream keeps its shape throughout."""
    _, d = pair
    stream = [1, len(IDS), d.sizes["d_model"]]
    last = None
    for row in d.shapes:
        assert len(row.axes) == len(row.shape)
        if row.tensor in ("stream", "normed stream") or row.tensor == row.unit:
            assert row.shape == stream
        if row.matrix:
            last = row
        elif last is not None and row.how == f"{last.tensor} x":
            assert row.shape == [1, len(IDS), last.shape[0]]
        if "(" not in "".join(row.axes):
            assert all(d.sizes.get(axis) in (None, size) for axis, size in zip(row.axes, row.shape, strict=True))
    assert d.shapes[-1].shape == [1, len(IDS), d.sizes["d_vocab"]]


def test_reports_of_a_description_can_be_made(pair):
    _, d = pair
    assert as_json(d) and as_html(d)
    shown = as_text(d, 100)
    assert all(block.module.rpartition(".")[0] in shown for block in d.blocks)


def test_what_lies_between_writes_and_stream_is_said():
    _, d = described("gemma2")
    own = [w for w in d.writes if w.layer is not None]
    assert all([step.kind for step in w.tail] == ["norm"] and w.tail[0].norm.gain is not None for w in own)
    assert all(r.norm is not None and r.norm.gain is not None and not r.factors for r in d.reads)
    assert [(row.unit, row.step.factor) for row in d.stream] == [("embed", 8.0)]
    assert d.final.softcap is not None
    _, d = described("granite")
    assert all(w.coefficient == pytest.approx(w.tail[0].factor) != 1.0 for w in d.writes if w.layer is not None)
    assert d.final.scale != 1.0
    _, d = described("openai-gpt")
    assert all(r.norm is None for r in d.reads) and {row.step.kind for row in d.stream} == {"norm"}


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_non_linearities_are_told_by_their_values(activation):
    for dtype in (torch.float32, torch.bfloat16):
        _, d = described("llama", hidden_act=activation, dtype=dtype)
        rows = [row.how for row in d.shapes if row.tensor == "activations"]
        near = {ACTIVATIONS[activation]} | (
            {"gelu", "gelu (tanh)"} if "gelu" in activation and dtype != torch.float32 else set()
        )
        assert set(rows) <= {f"{name}(gate) up" for name in near}, rows


def test_an_unknown_non_linearity_is_no_known_one():
    module = zoo.build("llama")
    for layer in module.model.layers:
        layer.mlp.act_fn = torch.nn.Softsign().eval()
    d = describe_anatomy(mainstem.open(module), IDS)
    assert {row.how for row in d.shapes if row.tensor == "activations"} == {"f(gate) up"}


def test_a_model_that_attends_both_ways_is_said_to():
    module = zoo.build("llama")
    d = describe_anatomy(mainstem.open(module))
    assert d.causal and d.warnings == [] and d.shapes is None and d.prompt is None


# --- the lens ---------------------------------------------------------------------------------------------


def test_the_last_state_is_the_models_own_prediction(pair):
    model, _ = pair
    trace = model.trace(IDS)
    for norm in ("recompute", "frozen"):
        reading = read_lens(trace, norm=norm)
        assert reading.certificate.last_state < 1e-3 and reading.certificate.holds
        best = int(trace.logits().argmax())
        assert reading.states[-1].top[0].id == reading.tokens[0].id == best
        assert reading.states[-1].course[0].rank == 1


def test_a_reading_is_consistent_with_itself(pair):
    model, _ = pair
    reading = read_lens(model.trace(IDS), ["id:7", "id:9"], position=2, top=3)
    assert reading.position == 2 and [t.id for t in reading.tokens] == [7, 9]
    size = model.anatomy.sizes.d_vocab
    for state in reading.states:
        likely = [token.probability for token in state.top]
        assert likely == sorted(likely, reverse=True) and sum(likely) <= 1 + 1e-5
        assert 0 <= state.entropy <= math.log(size) + 1e-4
        for row in state.course:
            assert 1 <= row.rank <= size
            assert math.exp(row.log_probability) <= likely[0] + 1e-6


def test_the_lens_refuses_what_it_cannot_read():
    model = mainstem.open(zoo.build("llama"))
    trace = model.trace(IDS)
    with pytest.raises(UsageError, match="--top"):
        read_lens(trace, top=0)
    with pytest.raises(UsageError, match="tokenizer"):
        read_lens(trace, ["Paris"])
    with pytest.raises(UsageError, match="norm"):
        read_lens(trace, norm="both")  # type: ignore[arg-type]


def test_sample_results_have_the_keys_of_real_ones(pair):
    """The hand-made results of the reports' tests are like those that the program makes."""
    model, d = pair
    assert report_samples.anatomy().as_dict().keys() == d.as_dict().keys()
    reading = read_lens(model.trace(IDS))
    assert report_samples.lens_reading().as_dict().keys() == reading.as_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.families())
def test_every_family_can_be_described(family):
    try:
        module = zoo.build(family)
    except zoo.NotBuilt as reason:
        pytest.skip(str(reason))
    model = mainstem.open(module)
    try:
        d = describe_anatomy(model, IDS)
        reading = read_lens(model.trace(IDS))
    except MainstemError as refusal:
        assert refusal.remedy
        return
    for result in (d, reading):
        assert as_json(result) and as_html(result) and as_text(result, 80)
