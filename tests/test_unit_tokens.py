"""What single units say: by their address at any level, beside a null that can say no, and the sigmoid of a token."""

from functools import cache
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
import zoo
from torch import Tensor

import mainstem
from mainstem.analysis.bases import entries
from mainstem.analysis.readout import before_softmax, frozen_scale, normed
from mainstem.analysis.unit_tokens import alone, centred_logits, spread
from mainstem.analysis.warnings import null_warning
from mainstem.errors import LevelRefusedError, UnitError, UsageError
from mainstem.read.unit_reading import UnitReader
from mainstem.session import Model
from mainstem.tracing import Trace
from mainstem.units import Unit


@cache
def trace_of(name: str) -> Trace:
    model = zoo.build(name)
    return mainstem.open(model if name == "mixtral" else model.double()).trace(zoo.prompt(9, seed=2)[0].tolist())


def read_alone(trace: Trace, vector: Tensor) -> Tensor:
    """W_U (gain x scale x v) written out, for a final RMS norm."""
    module, last = trace.model.module, trace.run.moment().stream.double()
    norm, head = module.model.norm, module.lm_head
    scale = (last.pow(2).mean() + norm.variance_epsilon).rsqrt()
    return head.weight.double() @ (vector.double() * scale * norm.weight.double())


UNITS = ["embed", "L1.attn", "L2.mlp", "L1H2", "L1H2@3", "L1H2.5", "L1H2.5@3", "L2N7"]


@pytest.mark.parametrize("address", UNITS)
def test_a_units_tokens_are_its_centred_logits(address: str) -> None:
    trace = trace_of("llama")
    reading = trace.unit_tokens(address, top=4, directions=20)
    part = UnitReader(trace).part(address)
    logits = read_alone(trace, part.vector)
    logits = logits - logits.mean()
    assert reading.unit == address and reading.kind == Unit.parse(address).kind
    assert [token.id for token in reading.promotes] == logits.topk(4).indices.tolist()
    assert [token.id for token in reading.suppresses] == logits.topk(4, largest=False).indices.tolist()
    assert [token.logit for token in reading.promotes] == pytest.approx(logits.topk(4).values.tolist(), abs=1e-6)
    assert reading.size == pytest.approx(float(part.vector.norm()))


def test_parts_by_address_are_those_of_the_decompositions() -> None:
    trace, reader = trace_of("llama"), UnitReader(trace_of("llama"))
    assert torch.allclose(reader.part("L1.attn").vector, trace["L1.attn"][-1].double())
    heads = sum(reader.part(f"L1H{h}").vector for h in range(trace.model.anatomy.sizes.n_heads))
    assert torch.allclose(torch.as_tensor(heads), reader.part("L1.attn").vector, atol=1e-6)
    sources = sum(reader.part(f"L1H2.5@{s}").vector for s in range(9))
    assert torch.allclose(torch.as_tensor(sources), reader.part("L1H2.5").vector, atol=1e-9)
    entries_ = sum(reader.part(f"L1H2.{j}@3").vector for j in range(trace.model.anatomy.sizes.d_head))
    assert torch.allclose(torch.as_tensor(entries_), reader.part("L1H2@3").vector, atol=1e-9)


def test_the_sign_of_the_coefficient_is_in_the_tokens() -> None:
    """What a neuron of negative activation promotes is what its column suppresses."""
    trace = trace_of("llama")
    activations = next(g for g in trace.decompose("neurons").groups if str(g.units[0]) == "L2N0").coefficients
    neuron = int(activations.argmin())
    reading = trace.unit_tokens(f"L2N{neuron}", top=3)
    column = read_alone(trace, trace.model.module.model.layers[2].mlp.down_proj.weight[:, neuron])
    assert reading.coefficient < 0
    assert [token.id for token in reading.promotes] == column.topk(3, largest=False).indices.tolist()


# --- the null -----------------------------------------------------------------------------------------------


def test_the_null_is_that_of_random_vectors_of_the_same_norm() -> None:
    """And a vector made of a token's own direction is beyond it, where a random one is not."""
    trace = trace_of("llama")
    made = trace.decompose("sublayers")
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(400, len(made.moment.stream), generator=generator).double()
    vectors = 3.0 * vectors / vectors.norm(dim=-1, keepdim=True)
    largest = torch.stack([(z - z.mean()).max() for z in (read_alone(trace, v) for v in vectors)])
    drawn = spread(made, 400, seed=1)
    assert 3 * float(drawn.largest.mean()) == pytest.approx(float(largest.mean()), rel=0.03)
    assert float((largest > drawn.threshold(3.0)).double().mean()) < 0.05
    own = trace.model.module.lm_head.weight[7].double()
    peak = float(centred_logits(made, own[None]).max())
    assert peak > drawn.threshold(float(own.norm()))


def test_the_reading_says_whether_it_is_beyond_the_null(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of("llama")
    readings = [trace.unit_tokens(f"L2N{n}", directions=200).null for n in range(0, 90, 3)]
    assert any(not n.beyond_null for n in readings)
    for n in readings:
        assert n.directions == 200 and n.null_max_mean > 0
        assert (n.z_promotes > 4) <= n.promotes_beyond and (n.z_promotes > 0) >= n.promotes_beyond
    reader = UnitReader(trace)
    part = reader.part("L2N4")
    token = trace.model.module.lm_head.weight[7].double() * 5
    monkeypatch.setattr(reader, "part", lambda address: type(part)(part.unit, part.group, part.index, 1.0, token))
    found = reader.read("L2N4")
    assert found.null.promotes_beyond and found.beyond_null and found.null.z_promotes > 2


def test_the_null_is_the_same_for_the_same_seed() -> None:
    made = trace_of("llama").decompose("sublayers")
    assert torch.equal(spread(made, 10, seed=3).largest, spread(made, 10, seed=3).largest)
    assert not torch.equal(spread(made, 10, seed=3).largest, spread(made, 10, seed=4).largest)


# --- additivity and the sigmoid -----------------------------------------------------------------------------


def additivity(trace: Trace, level: str, some: int) -> float:
    """The largest difference of bs(x + v) from bs(x) + bs(v) over tokens, for some units of each group."""
    made = trace.decompose(level)  # type: ignore[arg-type]
    readout = trace.model.anatomy.readout
    scale, places, worst = frozen_scale(readout, made.moment.stream), entries(made), 0.0

    def read(state: Tensor) -> Tensor:
        return before_softmax(readout, normed(readout, state[None], scale).to(made.moment.logits.dtype))[0]

    for group in made.groups:
        if group.kind in ("bias", "rounding"):
            continue
        entry = places[group.sublayer or group.units[0]]
        for index in range(0, len(group), 1 + len(group) // some):
            v = entry.vectors(group, torch.tensor([index]))[0]
            difference = read(entry.base + v) - (read(entry.base) + alone(made, v[None])[0])
            worst = max(worst, float(difference.abs().max()))
    return worst


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_values_before_the_softmax_add(name: str) -> None:
    for level in ("sublayers", "heads", "units"):
        assert additivity(trace_of(name), level, 4) < (1e-4 if name == "mixtral" else 1e-9)


@pytest.mark.slow
def test_values_before_the_softmax_add_on_the_default_model(demo_model: Model) -> None:
    assert additivity(demo_model.trace("The capital of France is"), "units", 1) < 1e-4


@pytest.mark.parametrize("address", ["L2N7", "L1H2@3", "L1H2", "L1.mlp", "L1H2.5"])
def test_the_sigmoid_is_what_one_token_alone_would_do(address: str) -> None:
    trace, reader = trace_of("llama"), UnitReader(trace_of("llama"))
    token = int(trace.logits().argmax())
    curve = reader.sigmoid(reader.part(address), token)
    unit = Unit.parse(address)
    x = trace[f"blocks.{unit.layer}.hook_{'resid_pre' if unit.place == 'attn' else 'resid_mid'}"][-1]
    base, own = read_alone(trace, x), read_alone(trace, reader.part(address).vector)
    for value, p in list(zip(curve.values, curve.probabilities, strict=True))[::20]:
        pushed = base.clone()
        pushed[token] += value
        assert p == pytest.approx(float(pushed.softmax(-1)[token]), abs=1e-6)
    assert curve.value == pytest.approx(float(own[token]), abs=1e-6)
    assert curve.before == pytest.approx(float(base.softmax(-1)[token]), abs=1e-6)
    assert curve.probability == pytest.approx(float((base + own).softmax(-1)[token]), abs=1e-6)
    pushed = base.clone()
    pushed[token] += own[token]
    assert curve.alone == pytest.approx(float(pushed.softmax(-1)[token]), abs=1e-6)
    assert min(curve.values) <= 0 <= max(curve.values) and curve.probabilities == sorted(curve.probabilities)


def test_capped_logits_follow_no_sigmoid() -> None:
    trace = trace_of("gemma2")
    reader = UnitReader(trace)
    assert reader.read("L1N3", [5]).sigmoids == []
    with pytest.raises(LevelRefusedError, match="capped"):
        reader.sigmoid(reader.part("L1N3"), 5)


# --- the warning of explain ---------------------------------------------------------------------------------


def test_early_units_that_say_no_more_than_chance_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit writes a random direction, one what a token is read by; the same in the last layer is no early unit."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    made = trace_of("llama").decompose("sublayers")
    rows = made.moment.anatomy.readout.unembedding.double()
    chance = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(4)).double()
    drawn = [(Unit.ffn_neuron(layer, 3), v) for layer in (0, 2) for v in (chance, rows[5])]
    values = [SimpleNamespace(unit=unit, vector=lambda v=vector: v) for unit, vector in drawn]
    (warning,) = null_warning(made, values)  # type: ignore[arg-type]
    assert warning.code == "null" and warning.value == 0.5 and "of the 2 listed units" in warning.text
    assert null_warning(made, values[1:]) == null_warning(made, values[2:]) == []  # type: ignore[arg-type]


def test_explain_warns_of_early_units_without_a_null() -> None:
    trace = trace_of("llama")
    made = trace.explain(top=200, kinds=["ffn_neuron"], score="norm")
    (warning,) = [warning for warning in made.warnings if warning["code"] == "null"]
    assert (
        0 < warning["value"] <= 1 and f"of the {sum(v.unit.startswith('L0') for v in made.values)} " in warning["text"]
    )


# --- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("L9N3", "L0 to L2"),
        ("L2N9999", r"L2N0 to L2N\d+"),
        ("L1H9", "L1H0 to L1H3"),
        ("L1H2@9", "L1H0@0 to L1H3@8"),
        ("L1H9.3@1", "L1H0@0"),
        ("L1E0N4", "L1N0"),
        ("L1.mixer", "L1.attn, L1.mlp"),
        ("L1 head 3", "address"),
    ],
)
def test_a_unit_that_does_not_exist_is_answered_with_those_that_do(address: str, words: str) -> None:
    with pytest.raises(UnitError, match=words):
        trace_of("llama").unit_tokens(address)


def test_nothing_to_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UsageError, match="at least 1"):
        trace_of("llama").unit_tokens("embed", top=0)
