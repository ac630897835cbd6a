"""Keys that sum to what the model computed, shares that add up, and mistakes that are caught."""

from dataclasses import replace

import handmade
import pytest
import torch
import zoo
from query_samples import FAMILIES, SIDES, TARGET, key, slowly, traced
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2CLS, ACT2FN

import mainstem
from mainstem.analysis.keys import Key, evaluated, pattern_key, value_key
from mainstem.analysis.neuron_keys import neuron_key
from mainstem.analysis.queries import shares_of
from mainstem.errors import CertificateError
from mainstem.explain.unit_keys import key_of
from mainstem.model.activation import ray_gradient
from mainstem.model.anatomy import Anatomy
from mainstem.model.graph import NormNode, SumNode
from mainstem.tracing import Trace
from mainstem.units import Unit

# --- the key ------------------------------------------------------------------------------------------------


def gated(name: str, seed: int):
    """A gated neuron with biases in float64: its function, its reads' values, its rows and the stream."""
    made = torch.Generator().manual_seed(seed)
    rows, x, bias = (torch.randn(*s, generator=made, dtype=torch.float64) for s in ((2, 24), (24,), (2,)))
    act = ACT2FN[name].double()
    for parameter in act.parameters():
        parameter.requires_grad_(False)
    return (lambda z: act(z[:, 0]) * z[:, 1]), rows @ x + bias, rows, x, bias


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(ACT2CLS))
def test_the_key_sums_to_the_activation(name: str, seed: int) -> None:
    if name in ("prelu", "xielu"):
        torch.manual_seed(seed)
    function, z, rows, x, bias = gated(name, seed)
    slopes, off = ray_gradient(function, z)
    m = float(function(z[None])[0].detach())
    exact = 1e-6 if name == "xielu" else 1e-10  # it computes in its parameters' bfloat16 steps
    assert float((slopes @ rows) @ x + slopes @ bias) == pytest.approx(m, rel=exact, abs=exact)
    assert off <= exact * max(1.0, abs(m))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "relu"])
def test_the_local_linearisation_counts_twice(name: str) -> None:
    function, z, *_ = gated(name, 1)
    z = z.abs()
    assert float(_local(function, z) @ z) / float(function(z[None])[0]) == pytest.approx(2.0, abs=0.5)


def _local(function, z: Tensor) -> Tensor:
    point = z.clone().requires_grad_()
    return torch.autograd.grad(function(point[None]).sum(), point)[0]


def test_the_integrated_key_is_the_formula() -> None:
    """a = u integral s act'(s g) ds and b = integral act(s g) ds, by another quadrature."""
    g, u = torch.tensor(1.7, dtype=torch.float64), -0.6
    s = ((torch.arange(20000, dtype=torch.float64) + 0.5) / 20000).requires_grad_()
    (slope,) = torch.autograd.grad(F.silu(s * g).sum(), s)  # g act'(s g)
    a, b = u * float((s * slope / g).mean().detach()), float(F.silu(s * g).mean().detach())
    found, _ = ray_gradient(lambda z: F.silu(z[:, 0]) * z[:, 1], torch.tensor([float(g), u], dtype=torch.float64))
    assert found.tolist() == pytest.approx([a, b], abs=1e-8)


# --- shares add up to what the model computed ---------------------------------------------------------------


@pytest.mark.parametrize("name", slowly(FAMILIES))
def test_shares_of_neurons_add_up(name: str) -> None:
    trace = traced(name)
    for unit in ("L0N3", "L1N40", "L2N5"):
        for position in (-1, 4):
            found = shares_of(key(trace, unit, position=position))
            assert found.holds, (unit, found.error, found.tolerance)
            assert found.tolerance < 1e-2 * (found.positives - found.negatives)
            assert found.net + found.constant == pytest.approx(found.key.observed, abs=found.tolerance)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", slowly(FAMILIES))
def test_shares_of_attention_add_up(name: str, side: str) -> None:
    trace = traced(name)
    for unit in ("L1H0@20", "L2H3@19", *(["L2H1.2@21"] if side == "value" else [])):
        found = shares_of(key(trace, unit, side))
        assert found.key.moment.position == (22 if side == "query" else int(unit.split("@")[1]))
        assert found.holds, (unit, found.error, found.tolerance)
        assert found.tolerance < 1e-2 * (found.positives - found.negatives)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "bloom", "mpt", "codegen", "granite", "qwen2_moe", "gpt_neo"]
)
def test_shares_of_values_add_up_where_the_model_computes_the_pattern(name: str) -> None:
    trace = traced(name, "eager")
    neuron = "L2S0N5" if name == "qwen2_moe" else "L2N5"
    for unit in (neuron, "L2H1@20", "L2H1.2@20"):
        assert shares_of(key(trace, unit)).holds


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("name", slowly(["gpt2", "qwen3", "gemma2", "gemma3_text", "mpt", "gpt_oss", "doge", "plain"]))
def test_shares_of_patterns_add_up_where_the_model_computes_them(name: str, side: str) -> None:
    found = shares_of(key(traced(name, "eager"), "L2H1@20", side))
    assert found.key.quantity == "score before scale" and found.holds
    assert found.tolerance < 1e-2 * (found.positives - found.negatives)


EXPERTS = [
    *("mixtral", "qwen2_moe", "deepseek_v3", "dbrx", "afmoe", "aria_text", "axk1", "bailing_hybrid", "cohere2_moe"),
    *("deepseek_v2", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite"),
    *("granitemoe", "granitemoehybrid", "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "laguna", "lfm2_moe"),
    *("longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "nemotron_h", "olmoe", "phimoe"),
    *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "sarvam_moe", "solar_open", "zaya"),
]


def chosen_experts(trace: Trace) -> dict[int, list[int]]:
    """The experts that were chosen at the last position, by layer."""
    moment, found = trace.run.moment(), {}
    for write in (write for write in moment.anatomy.writes if write.experts is not None):
        assert write.experts is not None and write.unit.layer is not None
        parts = moment.experts[f"{write.experts.path}#{write.experts.call}"]
        found[write.unit.layer] = sorted({int(expert) for rows in parts.rows for expert in rows.expert})
    return found


@pytest.mark.parametrize("name", slowly(EXPERTS, {"mixtral", "nemotron_h"}))
def test_shares_of_experts_neurons_add_up(name: str) -> None:
    trace = traced(name, "eager")
    for layer, experts in chosen_experts(trace).items():
        for expert in experts:
            found = shares_of(key(trace, f"L{layer}E{expert}N7"), "sublayers")
            assert found.holds, (layer, expert, found.error, found.tolerance)
            assert found.tolerance < 1e-2 * (found.positives - found.negatives)
            assert found.net + found.constant == pytest.approx(found.key.observed, abs=found.tolerance)


@pytest.mark.parametrize("kind", ["eager", "grouped_mm", "batched_mm"])
def test_experts_have_the_same_keys_however_they_are_computed(kind: str) -> None:
    """One by one, in one grouped product, or with matrices chosen by token; some experts have a single row."""
    trace, other = (traced("mixtral", hidden_act="relu2", **more) for more in ({}, {"experts_implementation": kind}))
    layer, experts = max(chosen_experts(trace).items())
    for expert in experts:
        unit = f"L{layer}E{expert}N7"
        one, again = key(trace, unit), key(other, unit)
        assert torch.allclose(one.direction, again.direction, rtol=1e-4, atol=1e-6)
        assert shares_of(again, "sublayers").holds


@pytest.mark.slow
def test_a_mistake_in_what_experts_read_is_caught() -> None:
    trace = traced("mixtral")
    moment = trace.run.moment()
    layer, experts = max(chosen_experts(trace).items())
    unit = Unit.parse(f"L{layer}E{experts[0]}N7")
    others = {
        site: [replace(one, rows=replace(one.rows, matrix=one.rows.matrix.roll(1, -2))) for one in made]
        for site, made in moment.expert_reads.items()
    }
    moved = tuple(replace(read, node=moment.anatomy.blocks[-1].input_node) for read in moment.anatomy.expert_reads)
    for wrong in (
        replace(moment, expert_reads=others),
        replace(moment, anatomy=replace(moment.anatomy, expert_reads=moved)),
    ):
        assert not shares_of(neuron_key(wrong, unit), "sublayers").holds


def test_both_ways_to_attend_give_the_same_shares() -> None:
    """Fused and written out: the scores differ by their scale."""
    fused, own = (shares_of(key(traced("llama", way), "L2H1@20", "key"), "sublayers") for way in ("sdpa", "eager"))
    scale = fused.key.observed / own.key.observed
    assert scale == pytest.approx(16**-0.5, rel=1e-4)
    for (_, a), (_, b) in zip(fused.placed[:6], own.placed[:6], strict=True):
        assert torch.allclose(a, b * scale, rtol=1e-3, atol=1e-6)


def test_rotary_embedding_is_that_of_the_real_positions() -> None:
    """The same stream at another position has another key: only the rotation tells them apart."""
    trace = traced("llama")
    reading = key_of(trace, Unit.parse("L2H1@20"), -1, "value", TARGET, 0)[1]
    assert reading is not None
    carrying, _ = reading.operands.of("key")
    direction = torch.ones(carrying.received.shape[2], dtype=torch.float64)
    here, there = (carrying.pull_back(direction, 0, position)[0] for position in (20, 3))
    assert float(here.norm()) == pytest.approx(float(there.norm()), rel=1e-5)  # a rotation keeps lengths
    assert float((here - there).norm()) > 0.1 * float(here.norm())


def test_rows_of_a_padded_batch_get_what_they_get_alone() -> None:
    model = traced("llama").model
    ids = zoo.prompt(23, 3)[0].tolist()
    from mainstem.run.inputs import make_inputs

    inputs = make_inputs(model.module, [ids[:9], ids], model.input_vocabulary, "cpu")
    batch, alone = Trace(model, inputs, (-1,)), model.trace(ids[:9])
    for unit, side in (("L2N5", "value"), ("L2H1@7", "value"), ("L2H1@7", "key")):
        ours, its = (shares_of(key(t, unit, side), "sublayers") for t in (batch, alone))
        assert ours.holds and ours.key.observed == pytest.approx(its.key.observed, rel=1e-3, abs=1e-5)
        assert ours.net == pytest.approx(its.net, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    trace = mainstem.open(zoo.build(name, attn_implementation="sdpa", dtype=dtype)).trace(zoo.prompt(23, 3)[0].tolist())
    for unit, side in (("L2N5", "value"), *(("L2H1@20", side) for side in SIDES)):
        found = shares_of(key(trace, unit, side))
        assert found.holds, (unit, side, found.error, found.tolerance)
        assert found.tolerance < (0.5 if dtype == torch.bfloat16 else 1e-2) * (found.positives - found.negatives)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(handmade.ALL) - {"two_streams"}))
def test_shares_of_neurons_add_up_in_awkward_models(name: str) -> None:
    assert shares_of(key(traced(name), "L2N5")).holds


@pytest.mark.parametrize("act", ["relu", "gelu_new", "sigmoid", "relu2"])
def test_the_activation_is_found_from_behaviour(act: str) -> None:
    trace = traced("llama", hidden_act=act)
    for neuron in range(4):
        assert shares_of(key(trace, f"L1N{neuron}"), "sublayers").holds


def test_levels_refine_one_another() -> None:
    """What a sublayer's units have together is what the sublayer has."""
    found = key(traced("llama"), "L2N5")
    whole = {group.units[0]: float(one.sum()) for group, one in shares_of(found, "sublayers").placed}
    for level in ("heads", "subvalues", "attention_neurons", "neurons", "units"):
        sums: dict[Unit, float] = {}
        for group, one in shares_of(found, level).placed:
            unit = group.units[0] if group.kind in ("bias", "rounding") else group.units[0].sublayer
            unit = group.sublayer if group.sublayer is not None else unit
            sums[unit] = sums.get(unit, 0.0) + float(one.sum())
        for unit, share in whole.items():
            if unit.kind == "sublayer":
                assert sums[unit] == pytest.approx(share, abs=1e-4 * abs(found.observed) + 1e-5)


def test_a_share_is_the_inner_product_with_the_normed_part() -> None:
    """Written out by hand for a sublayer of a plain pre-norm model."""
    trace = traced("llama")
    moment = trace.run.moment()
    found = key(trace, "L2N5")
    norm = next(read.norm for read in moment.anatomy.reads if read.node == found.node)
    assert norm is not None and norm.gain is not None
    scale = float(norm.scale(evaluated(moment).values[found.stream_node].double()))
    index = moment.anatomy.writes_of(Unit.parse("L1.mlp"))[0]
    part = moment.writes[index][0].double() * scale * norm.gain.double()
    shares = {str(g.units[0]): float(s.sum()) for g, s in shares_of(found, "sublayers").placed}
    assert shares["L1.mlp"] == pytest.approx(float(found.direction @ part), rel=1e-9)


# --- checks that can fail -----------------------------------------------------------------------------------


def mutated(anatomy: Anatomy, found: Key, mistake: str) -> Anatomy:
    """The anatomy with one mistake at the reads or the norm of a neuron's key."""
    reads, nodes = list(anatomy.reads), list(anatomy.graph.nodes)
    chosen = [i for i, read in enumerate(reads) if read.node == found.node]
    if mistake == "wrong row":
        for i in chosen:
            reads[i] = replace(reads[i], weight=reads[i].weight.roll(1, 0))
    elif mistake == "gate and up exchanged":
        a, b = chosen
        reads[a], reads[b] = replace(reads[a], weight=reads[b].weight), replace(reads[b], weight=reads[a].weight)
    elif mistake == "bias forgotten":
        for i in chosen:
            reads[i] = replace(reads[i], bias=None)
    else:
        for i in range(found.stream_node + 1, found.node + 1):
            node = nodes[i]
            if isinstance(node, NormNode):
                nodes[i] = replace(node, norm=replace(node.norm, gain=None))
            elif isinstance(node, SumNode):
                nodes[i] = replace(node, terms=tuple(replace(term, factor=1.0) for term in node.terms))
    graph = replace(anatomy.graph, nodes=tuple(nodes))
    return replace(anatomy, reads=tuple(reads), graph=graph)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("llama", "wrong row"),
        ("llama", "norm gain forgotten"),
        ("llama", "gate and up exchanged"),
        ("gpt2", "wrong row"),
        ("gpt2", "norm gain forgotten"),
        ("gpt2", "bias forgotten"),
    ],
)
def test_a_mistake_is_caught(name: str, mistake: str) -> None:
    trace = traced(name)
    moment = trace.run.moment()
    found = key(trace, "L2N5")
    wrong = replace(moment, anatomy=mutated(moment.anatomy, found, mistake))
    shares = shares_of(neuron_key(wrong, found.unit))
    assert not shares.holds
    with pytest.raises(CertificateError, match="The shares in the .*activation of L2N5"):
        shares.require()


@pytest.mark.parametrize("side", SIDES)
def test_a_mistake_of_attention_is_caught(side: str) -> None:
    """The stream of another position, and the matrix's rows of another head."""
    trace = traced("llama")
    unit = Unit.parse("L2H1@20")
    _, reading = key_of(trace, unit, -1, "value", TARGET, 0)
    assert reading is not None

    def made(reading) -> Key:
        towards = torch.ones_like(reading.here.stream, dtype=torch.float64)
        return value_key(reading, towards) if side == "value" else pattern_key(reading, side)  # type: ignore[arg-type]

    assert shares_of(made(reading)).holds
    other = trace.run.moment(15)
    found = made(reading)
    assert not shares_of(replace(found, moment=other)).holds
    _, number = reading.operands.of(side)
    reads = list(reading.here.anatomy.reads)
    reads[number] = replace(reads[number], weight=reads[number].weight.roll(16, 0))
    anatomy = replace(reading.here.anatomy, reads=tuple(reads))
    wrong = replace(reading, here=replace(reading.here, anatomy=anatomy), there=replace(reading.there, anatomy=anatomy))
    assert not shares_of(made(wrong)).holds
