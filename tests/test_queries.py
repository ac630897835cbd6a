"""Queries: keys that sum to what the model computed, shares that add up, refusals by name, and checks that bite."""

from dataclasses import replace
from functools import cache

import handmade
import pytest
import torch
import zoo
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2CLS, ACT2FN

import mainstem
from mainstem.analysis.keys import Key, evaluated, neuron_key, pattern_key, value_key
from mainstem.analysis.queries import Shares, query_totals, shares_of
from mainstem.causal.query_check import QueryCheck, _edits, check_queries
from mainstem.errors import CertificateError, ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.model.activation import ray_gradient
from mainstem.model.anatomy import Anatomy
from mainstem.model.graph import NormNode, SumNode
from mainstem.querying import key_of
from mainstem.run.capture import capture
from mainstem.session import Model, Trace
from mainstem.targets import Target
from mainstem.units import Unit

TARGET = Target(ids=(7,), against=(), text="id:7")
SIDES = ("value", "query", "key")
QUICK = {"llama", "gpt2"}
FAMILIES = ["llama", "qwen3", "gpt2", "gpt_neox", "gptj", "olmo2", "falcon", "cohere", "opt", "starcoder2"]
"""Gated and plain MLPs, head norms over heads and over all of them, biases, partial and interleaved rotary embedding,
parallel blocks, norms after sublayers, grouped keys and values."""


def slowly(names: list[str]) -> list:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@cache
def traced(name: str, attention: str = "sdpa", **overrides) -> Trace:
    """A trace of 23 tokens, more than the anatomy was discovered on."""
    if name in handmade.ALL:
        return mainstem.open(handmade.ALL[name]()).trace(list(range(3, 26)))
    module = zoo.build(name, attn_implementation=attention, **overrides)
    return mainstem.open(module).trace(zoo.prompt(23, 3)[0].tolist())


def key(trace: Trace, unit: str, side: str = "value", position: int = -1) -> Key:
    return key_of(trace, Unit.parse(unit), position, side, TARGET, 0)[0]


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


# --- what is refused ----------------------------------------------------------------------------------------


class AddingMLP(handmade.MLP):
    """Gate and up are added, not multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) + torch.tanh(self.up(x)))


class MixingMLP(handmade.MLP):
    """A softmax over the neurons: every entry reaches every neuron."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).softmax(-1) * self.up(x))


@pytest.mark.parametrize(("kind", "reason"), [(AddingMLP, "not an activation"), (MixingMLP, "several")])
def test_neurons_that_are_not_understood_are_refused(kind: type, reason: str) -> None:
    module = handmade.ALL["plain"]()
    for block in module.blocks:  # type: ignore[union-attr]
        made = kind()
        made.load_state_dict(block.mlp.state_dict())
        block.mlp = made
    trace = mainstem.open(module.eval()).trace(list(range(3, 12)))
    assert trace.decompose("neurons").certificate is not None
    with pytest.raises(LevelRefusedError, match=reason):
        trace.queries("L1N5")


@pytest.mark.parametrize(
    ("unit", "options", "error", "says"),
    [
        ("L2H1", {}, UnitError, "has no one key"),
        ("L2.mlp", {}, UnitError, "has no one key"),
        ("L2H1.4", {}, UnitError, "has no one key"),
        ("L9N5", {}, UnitError, "no neuron"),
        ("L2N99999", {}, UnitError, "no neuron"),
        ("L9H1@3", {}, UnitError, "no sublayer"),
        ("L2H99@3", {}, UnitError, "no unit"),
        ("L2H1@99", {}, UnitError, "no unit"),
        ("L2N5", {"side": "key"}, UsageError, "no key side"),
        ("L2N5", {"level": "hads"}, ChoiceError, "heads"),
        ("L2N5", {"side": "keys"}, ChoiceError, "key"),
        ("L2N5", {"top": 0}, UsageError, "Nothing to list"),
    ],
)
def test_wrong_requests(unit: str, options: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        traced("llama").queries(unit, **options)


def test_a_source_that_is_not_seen_is_refused() -> None:
    with pytest.raises(UnitError, match="does not see"):
        traced("llama").queries("L2H1@9", position=4, target=TARGET)


@pytest.mark.slow
def test_structures_without_a_key_are_refused_by_name() -> None:
    with pytest.raises(LevelRefusedError, match="L2E1N5.*routed experts"):
        traced("mixtral").queries("L2E1N5")
    with pytest.raises(LevelRefusedError, match="No key side of L2H1@20.*more than linear maps and norms"):
        traced("deepseek_v3", "eager").queries("L2H1@20", side="key", target=TARGET)
    with pytest.raises(LevelRefusedError, match="No query side of L2H1@20.*was not found"):
        traced("bloom", "eager").queries("L2H1@20", side="key", target=TARGET)
    with pytest.raises(LevelRefusedError, match="No value side of L2H1@20.*no matrices that are known"):
        traced("inline_norms").queries("L2H1@20", target=TARGET)


@pytest.mark.slow
def test_norms_between_two_matrices_are_kept_at_their_scale() -> None:
    """Values and queries that come from the stream by two matrices with a norm in between."""
    trace = traced("deepseek_v3", "eager")
    for side in ("value", "query"):
        reading = key_of(trace, Unit.parse("L2H1@20"), -1, "value", TARGET, 0)[1]
        assert reading is not None and any(s.norm is not None for s in reading.operands.of(side)[0].stages)
    assert shares_of(key(trace, "L2H1@20")).holds
    assert shares_of(key(trace, "L2H1.2@20")).holds


# --- what is listed -----------------------------------------------------------------------------------------


def test_the_list_is_the_largest_shares() -> None:
    trace = traced("llama")
    shares = shares_of(key(trace, "L2N5"))
    sign = 1 if shares.key.observed > 0 else -1
    every = [
        (str(group.units[i]), value)
        for group, one in shares.placed
        if group.kind != "rounding"
        for i, value in enumerate(one.tolist())
    ]
    best = sorted(every, key=lambda pair: -sign * pair[1])
    made = trace.queries("L2N5", top=5)
    assert [row.unit for row in made.rows] == [unit for unit, _ in best[:5]]
    assert [row.share for row in made.rows] == pytest.approx([share for _, share in best[:5]])
    against = trace.queries("L2N5", top=5, negative=True)
    assert [row.unit for row in against.rows] == [unit for unit, _ in best[::-1][:5]]
    assert made.positives + made.negatives == pytest.approx(made.net)
    assert made.holds and made.of == "L2N5" and made.reads == made.position == 22


def test_totals_share_out_the_increase() -> None:
    """With one value unit and no biases, all writes together have its increase."""
    trace = traced("llama")
    shares = shares_of(key(trace, "L2N5"), "sublayers")
    found, left_out = query_totals([(shares, 1.5)], "layers", top=100)
    biases = sum(float(one.sum()) for group, one in shares.placed if group.kind in ("bias", "rounding"))
    whole = shares.net + shares.constant
    expected = 1.5 * (shares.net - biases) / whole
    assert left_out == [] and sum(total.score for total in found) == pytest.approx(expected, rel=1e-6)
    twice, _ = query_totals([(shares, 1.5), (shares, 0.5)], "layers", top=100)
    assert twice[0].score == pytest.approx(found[0].score * 2 / 1.5)
    _, left_out = query_totals([(shares, 1.5)], "layers", least_net=10.0)
    assert left_out == [Unit.parse("L2N5")]
    with pytest.raises(UsageError, match="sublayers"):
        query_totals([(shares_of(shares.key, "units"), 1.0)], "layers")
    made = trace.query_totals([("L2N5", 1.5), ("L2H1@20", 0.3)], "heads", target=TARGET, top=3)
    assert len(made.rows) == 3 and {row["position"] for row in made.rows} <= {20, 22}


def test_explain_lists_queries_when_asked() -> None:
    trace = traced("llama")
    assert trace.explain(target=TARGET, top=2).queries == []
    kinds = ("attention_subvalue", "ffn_neuron", "attention_neuron", "head")
    made = trace.explain(target=TARGET, top=12, queries=2, kinds=kinds, score="direct").as_dict()
    asked = {value["unit"] for value in made["values"]}
    of = {row["of"] for row in made["queries"]} | {row["unit"] for row in made["query_refusals"]}
    assert {unit.partition("@")[0] for unit in of} == {unit.partition("@")[0] for unit in asked}
    assert all(sum(row["of"] == one["of"] for row in made["queries"]) == 2 for one in made["query_sums"])
    assert {"unit", "kind", "of", "share"} <= set(made["queries"][0])
    with pytest.raises(UsageError, match="below zero"):
        trace.explain(target=TARGET, queries=-1)


# --- the causal check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "in_place"])
def test_a_removal_takes_away_the_write_and_nothing_before_it(name: str) -> None:
    trace = traced(name)
    run, anatomy = trace.run, trace.model.anatomy
    query = next(q for q in shares_of(key(trace, "L2N5")).top(50, kinds=["ffn_neuron"]) if q.unit.layer == 1)
    index = anatomy.writes_of(query.unit.sublayer)[0]
    vector = query.group.raw(torch.tensor([query.index]))[0]
    edits = _edits(anatomy, [[], [(index, vector)]], 22)
    ids = run.inputs.ids.expand(2, -1)
    after = capture(run.module, anatomy, ids, torch.full((2, 1), 22), edits=edits, **run.inputs.forward)
    for i, write in enumerate(after.writes):
        if i < index:
            assert torch.allclose(write[0], write[1], atol=1e-6)
    change = (after.writes[index][0] - after.writes[index][1]).double()
    assert torch.allclose(change[22], vector, atol=1e-6) and float(change[:22].abs().max()) < 1e-6
    assert float(vector.norm()) > 1e-3


@pytest.mark.parametrize(("unit", "side"), [("L2N5", "value"), *(("L2H1@20", side) for side in SIDES)])
def test_the_check_reads_the_models_own_quantity(unit: str, side: str) -> None:
    trace = traced("llama")
    made = trace.check_queries(unit, 3, side=side, target=TARGET, draws=2)
    assert made.before == pytest.approx(key(trace, unit, side).observed, rel=1e-4, abs=1e-5)
    assert len(made.queries) == 3 and len(made.controls) == 2 and abs(made.change) > 0
    assert made.side == side and made.share != 0


def test_a_verdict_needs_half_the_share_and_more_than_controls() -> None:
    unit = Unit.parse("L2N5")
    good = QueryCheck(unit, "value", "activation", (), -4.0, -10.0, -7.0, (-1.0, 0.5))
    assert good.holds and good.change == -3.0
    assert not replace(good, after=-9.0).holds
    assert not replace(good, controls=(-2.5, -2.5)).holds
    assert not replace(good, controls=(-3.5, 3.0)).holds


# --- the default model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paris(demo_model: Model) -> Trace:
    return demo_model.trace("The capital of France is")


@pytest.mark.slow
def test_the_default_models_values_add_up(paris: Trace) -> None:
    made = paris.queries("L24N1005", top=3)
    assert made.relative_error < 1e-5 and made.tolerance < 1e-3
    assert made.observed == pytest.approx(-19.21, abs=0.01)
    assert (made.positives, made.negatives) == pytest.approx((126.3, -145.5), abs=0.2)  # it cancels, and says so
    assert made.rows[0].unit == "L22N916" and " city" in made.rows[0].promotes
    assert paris.queries("L27N846").relative_error < 1e-5
    source = paris.queries("L23H4@3", top=1)
    assert source.rows[0].unit == "L13N1033" and source.rows[0].through == "L23H4"
    assert source.rows[0].promotes[0] == " France" and source.reads == 3
    for side in ("query", "key"):
        assert paris.queries("L23H4@3", side=side).relative_error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["L24N1005", "L23H4@3", "L28N625", "L28N1078"])
def test_queries_of_the_default_model_are_causal(paris: Trace, unit: str) -> None:
    made = paris.check_queries(unit, 10)
    assert made.holds, made


@pytest.mark.slow
def test_units_that_are_no_queries_fail_the_check(paris: Trace) -> None:
    found, _ = key_of(paris, Unit.parse("L24N1005"), -1, "value", None, 0)
    shares: Shares = shares_of(found)
    named = shares.top(10, kinds=["ffn_neuron"])
    others = [replace(query, index=(query.index + 7) % len(query.group)) for query in named]
    run = paris.run
    made = check_queries(
        run.module, run.anatomy, run.inputs.ids, 4, shares, others, draws=5, seed=1, **run.inputs.forward
    )
    assert made.share == sum(query.share for query in named) and not made.holds
