"""Queries: what is refused by name, what is listed, and the causal check that bites."""

from dataclasses import replace

import handmade
import pytest
import torch
from query_samples import SIDES, TARGET, key, traced
from torch import Tensor
from torch.nn import functional as F

import mainstem
from mainstem.analysis.queries import Shares, query_totals, shares_of
from mainstem.causal.query_check import QueryCheck, _edits, check_queries
from mainstem.errors import ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.explain.unit_keys import key_of
from mainstem.run.capture import capture
from mainstem.session import Model
from mainstem.tracing import Trace
from mainstem.units import Unit

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
        ("L9N5", {}, UnitError, "no neuron L9N5. Its layers go from L0 to L2"),
        ("L2N99999", {}, UnitError, r"no neuron.*L2N0 to L2N\d+"),
        ("L2E1N3", {}, UnitError, r"no neuron.*L2N0 to L2N\d+"),
        ("L9H1@3", {}, UnitError, "no sublayer.*L0 to L2"),
        ("L2H99@3", {}, UnitError, "no unit.*L2H0@0 to L2H3@22"),
        ("L2H1@99", {}, UnitError, "no unit.*L2H0@0 to L2H3@22"),
        ("L2H1.99@3", {}, UnitError, r"no unit.*value has \d+ entries.*L2H0@0"),
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


def test_experts_that_were_not_chosen_have_no_queries() -> None:
    trace = traced("mixtral")
    for unit, says in (("L2E9N5", "no neuron.*L2E"), ("L2E1N999", "no neuron.*L2E"), ("L2N5", "no neuron.*L2E")):
        with pytest.raises(UnitError, match=says):
            trace.queries(unit)
    refused = 0
    for expert in range(4):
        try:
            made = trace.queries(f"L2E{expert}N5")
            assert made.kind == "expert_neuron" and made.quantity == "activation" and made.holds
        except UnitError as error:
            assert f"Expert {expert} of L2.mlp was not chosen (position 22). Chosen there: " in str(error)
            refused += 1
    assert refused == 2


@pytest.mark.slow
def test_structures_without_a_key_are_refused_by_name() -> None:
    with pytest.raises(LevelRefusedError, match="L2E1N5.*biases or factors of their own"):
        traced("gpt_oss", "eager").queries("L2E1N5")
    with pytest.raises(LevelRefusedError, match="L2E0N5.*no one value of the stream"):
        traced("llama4_text", "eager").queries("L2E0N5")
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


def test_the_check_reads_an_experts_neuron() -> None:
    trace = traced("mixtral")
    unit = next(value.unit for value in trace.explain(target=TARGET, top=1, kinds=["expert_neuron"]).values)
    made = trace.check_queries(unit, 3, draws=2)
    assert made.before == pytest.approx(key(trace, unit).observed, rel=1e-4) and made.after != made.before


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
