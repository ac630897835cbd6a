"""Every kind of target in every score: what it sums to, how it is searched, and what is refused."""

import math
from functools import cache

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from query_samples import traced
from safetensors.torch import save_file
from test_search import FAMILIES, every_score, trace_of

import mainstem
from mainstem.analysis.attribution import attribute
from mainstem.analysis.queries import shares_of
from mainstem.analysis.search import SLACK, IncreaseSearch
from mainstem.analysis.steps import step_targets
from mainstem.errors import TargetError, TokenError, UnitError, UsageError
from mainstem.explain.unit_keys import key_of
from mainstem.session import Model
from mainstem.targets import Target
from mainstem.tracing import Trace
from mainstem.units import Unit

KINDS = frozenset({"attention_subvalue", "ffn_neuron", "expert_neuron"})
QUICK = {"llama", "mixtral"}
CONTINUED = ["llama", "gemma2", "mixtral", "gpt2", "falcon", "qwen2_moe"]


def named(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]
    )


@cache
def continued(name: str, length: int = 3) -> tuple[Trace, Trace, Target]:
    """A trace, the teacher-forced run of its continuation, and the continuation."""
    trace = trace_of(name)
    target = Target(continuation=tuple(zoo.prompt(length, seed=8)[0].tolist()), text="three")
    n = len(trace.ids())
    forced = trace.model.trace([*trace.ids(), *target.continuation[:-1]], positions=range(n - 1, n - 1 + length))
    return trace, forced, target


def steps_of(name: str):
    trace, forced, target = continued(name)
    first = len(trace.ids()) - 1
    return [(forced.decompose("units", first + j), own) for j, own in enumerate(step_targets(target))]


# --- continuations ------------------------------------------------------------------------------------------


@named(CONTINUED)
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("norm", ["frozen", "recompute"])
def test_a_continuation_ranks_units_by_the_sum_over_its_steps(name: str, norm, negative: bool) -> None:
    steps, sign = steps_of(name), -1 if negative else 1
    sums: dict = {}
    for made, target in steps:
        for unit, value in every_score(made, target, norm, KINDS).items():
            sums[unit] = sums.get(unit, 0.0) + value
    found = IncreaseSearch(steps, norm, set(KINDS)).top(12, negative)
    assert found.units == len(sums)
    listed = [f.unit for f in found.found]
    for f in found.found:
        assert f.increase == pytest.approx(sums[f.unit], abs=1e-4) == pytest.approx(sum(f.increases), abs=1e-4)
    worst = min(sign * sums[unit] for unit in listed)
    assert all(sign * value <= worst + 2 * SLACK for unit, value in sums.items() if unit not in set(listed))
    scores = [sign * sums[unit] for unit in listed]
    assert all(a >= b - 2 * SLACK for a, b in zip(scores, scores[1:], strict=False))


@named(CONTINUED)
def test_a_continuation_is_explained_by_its_own_teacher_forced_run(name: str) -> None:
    trace, _, target = continued(name)
    ids, logits = trace.ids(), 0.0
    for token in target.continuation:  # each by a bare run of its own
        row = zoo.logits(trace.model.module, torch.tensor([ids]))[0, -1].double()
        logits += float(row.log_softmax(-1)[token])
        ids = [*ids, token]
    made = trace.explain(continuation=target.continuation, top=5)
    assert made.target_kind == "continuation" and [step.id for step in made.steps] == list(target.continuation)
    assert made.target.log_probability == pytest.approx(logits, abs=1e-3)
    assert made.target.rank == max(step.rank or 0 for step in made.steps)
    assert made.position == len(trace.ids()) - 1
    assert made.layers[-1].lens_log_probability == pytest.approx(logits, abs=1e-3)
    assert made.certificate.holds and made.certificate.reads.holds
    assert all(len(v.steps) == 3 and v.increase == pytest.approx(sum(v.steps), abs=1e-3) for v in made.values)
    assert sum(v for k, v in made.account.items() if k != "total") == pytest.approx(made.account["total"], abs=1e-3)
    for score in ("additive", "direct"):
        again = trace.explain(target=target, score=score, top=5)
        assert all(getattr(v, score) == pytest.approx(sum(v.steps), abs=1e-6) for v in again.values)
        assert [getattr(v, score) for v in again.values] == sorted(
            (getattr(v, score) for v in again.values), reverse=True
        )


def test_a_continuation_of_one_token_is_that_token() -> None:
    trace = trace_of("llama")
    one, token = trace.explain(continuation=[17], top=8), trace.explain(target="id:17", top=8)
    assert [v.unit for v in one.values] == [v.unit for v in token.values]
    assert [v.increase for v in one.values] == pytest.approx([v.increase for v in token.values], abs=1e-5)
    assert one.account == pytest.approx(token.account, abs=1e-4)
    assert one.target.log_probability == pytest.approx(token.target.log_probability, abs=1e-5)


def test_a_continuation_takes_the_place_of_what_followed() -> None:
    trace = trace_of("llama")
    inside = trace.explain(continuation=[17, 30], position=4, top=3)
    alone = trace.model.trace(trace.ids()[:5]).explain(continuation=[17, 30], top=3)
    assert inside.position == 4 and inside.values == alone.values


# --- contrasts and sets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_under_the_frozen_norm_a_contrasts_increase_is_its_direct_attribution(name: str) -> None:
    """Without a softcap: the normalisation cancels, and what is left is linear. Under `recompute` it is not."""
    contrast = Target(ids=(11,), against=(12, 40))
    made = trace_of(name).explain(target=contrast, top=10)
    assert [v.increase for v in made.values] == pytest.approx([v.direct for v in made.values], abs=1e-4)
    assert all(v.kl is None and v.bound == pytest.approx(v.increase, abs=1e-3) for v in made.values)
    again = trace_of(name).explain(target=contrast, top=10, norm="recompute")
    assert max(abs((v.increase or 0) - (v.additive or 0)) for v in again.values) > 1e-2
    exhaustive = trace_of(name).explain(target=contrast, top=10, norm="recompute", exhaustive=True)
    assert [v.unit for v in again.values] == [v.unit for v in exhaustive.values]


def test_the_additive_score_of_a_set_against_rivals_sums_to_its_log_odds() -> None:
    trace, ids, rivals = trace_of("gemma2"), [4, 9, 30], [70, 71]
    log_p = trace.logits().double().log_softmax(-1)
    made = attribute(trace.decompose("units"), Target(ids=tuple(ids), against=tuple(rivals)), "additive")
    odds = float(log_p[ids].logsumexp(0) - log_p[rivals].mean())
    explained = float(sum(s.sum() for s in made.scores)) + sum(made.functional.constants.values())
    assert explained == pytest.approx(odds - math.log(3), abs=1e-3)
    assert made.unexplained == pytest.approx(0, abs=1e-3)


# --- directions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", pytest.param("olmo2", marks=pytest.mark.slow), "gpt2"])
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6))
def test_a_directions_scores_sum_to_the_streams_inner_product_with_it(name: str, seed: int) -> None:
    trace = trace_of(name)
    stream = trace.run.moment().stream.double()
    direction = torch.randn(len(stream), generator=torch.Generator().manual_seed(seed)).double()
    made = trace.explain(direction=direction, top=6)
    assert made.score == "direct" and made.target_kind == "direction"
    assert made.account["total"] == pytest.approx(float(stream @ direction), rel=1e-5, abs=1e-5)
    entries = sum(v for k, v in made.account.items() if k != "total")
    assert entries == pytest.approx(made.account["total"], abs=1e-4)
    groups = trace.decompose("units").groups
    best = max(float(g.dot(direction).max()) for g in groups if g.kind in KINDS)
    assert made.values[0].direct == pytest.approx(best)
    assert made.values[0].increase is None and made.values[0].additive is None and made.target.probability is None


def test_a_direction_from_a_file(tmp_path) -> None:
    trace = trace_of("llama")
    numbers = torch.randn(1, trace.model.anatomy.sizes.d_model)
    save_file({"probe": numbers}, tmp_path / "a.safetensors")
    save_file({"direction": numbers[0].to(torch.float16), "bias": torch.ones(1)}, tmp_path / "b.safetensors")
    one, two = (trace.explain(direction=tmp_path / f"{letter}.safetensors", top=3) for letter in "ab")
    assert one.target.token == "a" and [v.unit for v in one.values] == [v.unit for v in two.values]
    assert one.values[0].direct == pytest.approx(two.values[0].direct, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "unit", "side"),
    [
        ("llama", "L2N5", "value"),
        ("llama", "L2H1@5", "query"),
        ("gpt2", "L2N5", "value"),
        ("gpt2", "L2H1@5", "query"),
        *(pytest.param(name, "L2N5", "value", marks=pytest.mark.slow) for name in ("qwen3", "opt", "cohere")),
    ],
)
def test_a_unit_names_the_direction_that_it_reads(name: str, unit: str, side: str) -> None:
    """Earlier units' inner products with it are their shares in what the unit reads, which are certified."""
    trace = trace_of(name)
    target = trace.direction(unit)
    shares = shares_of(key_of(trace, Unit.parse(unit), -1, side, target, 0)[0], "sublayers")
    made = attribute(trace.decompose("sublayers"), target)
    direct = dict(zip((str(g.units[0]) for g in made.decomposition.groups), made.scores, strict=True))
    assert shares.holds
    for group, share in shares.placed:
        if group.kind in ("sublayer", "embedding"):
            assert float(direct[str(group.units[0])]) == pytest.approx(float(share.sum()), rel=1e-5, abs=1e-7)
    named = trace.explain(direction=unit, top=3)
    assert named.target.token == f"input of {unit}" and named.values == trace.explain(target=target, top=3).values
    assert any(f"{unit} reads this direction" in note for note in named.notes)


@pytest.mark.parametrize(
    ("unit", "error", "words"),
    [
        ("L2H1", UnitError, "no one direction.*d_head"),
        ("L2H1.3@2", UnitError, "no one direction.*sources"),
        ("L2.mlp", UnitError, "no one direction.*many"),
        ("L2.mlp.bias", UnitError, "no one direction.*writes"),
        ("L2N999", UnitError, "no neuron"),
        ("L2H1@99", UnitError, "no unit"),
    ],
)
def test_units_that_read_no_one_direction_are_refused(unit: str, error, words: str) -> None:
    for asked in (lambda: trace_of("llama").explain(direction=unit), lambda: trace_of("llama").direction(unit)):
        with pytest.raises(error, match=words):
            asked()


def test_the_direction_of_a_unit_belongs_to_a_run() -> None:
    with pytest.raises(TargetError, match="depends on the run.*trace.direction"):
        trace_of("llama").model.target(direction="L2N5")
    with pytest.raises(TargetError, match="mixes"):
        trace_of("llama").explain(direction="L2N5", target="id:3")


def test_what_has_no_verdict_says_why() -> None:
    trace = traced("llama")
    width = trace.model.anatomy.sizes.d_model
    for options, words in (
        ({"continuation": [3, 4], "ablate": {"ffn": 2}}, "one destination.*one by one"),
        ({"direction": [1.0] * width, "ablate": {"ffn": 2}}, "direction has neither.*Trace.check_queries"),
        ({"continuation": [3, 4], "queries": 1}, "one destination.*Trace.queries"),
    ):
        with pytest.raises(UsageError, match=words):
            trace.explain(**options)
    for target in (Target(continuation=(3, 4)), Target(direction=(1.0,) * width)):
        with pytest.raises(UsageError, match="A causal verdict"):
            trace.verify(target)


def test_what_writes_along_a_direction_has_queries() -> None:
    trace = traced("llama")
    target = trace.direction("L2N5")
    made = trace.explain(direction="L2N5", top=8, queries=2, kinds=["ffn_neuron", "attention_subvalue"])
    assert len(made.query_sums) + len(made.query_refusals) == 8 and all(one["holds"] for one in made.query_sums)
    found = trace.queries("L1H0@3", target=target, level="sublayers")
    assert found.quantity == "direct effect" and found.holds
    own = next(g for g in trace.decompose("units").groups if str(g.units[0]).startswith("L1H0@"))
    scores = own.dot(torch.tensor(target.direction, dtype=torch.float64))
    place = [str(unit) for unit in own.units].index("L1H0@3")
    assert found.observed == pytest.approx(float(scores[place]), rel=1e-4, abs=1e-6)


def test_a_unit_that_is_off_reads_nothing() -> None:
    trace = traced("llama", hidden_act="relu")
    off = next(unit for unit in (f"L2N{i}" for i in range(24)) if trace.unit_tokens(unit).coefficient == 0)
    with pytest.raises(UnitError, match=f"{off} is off"):
        trace.direction(off)


# --- refusals -----------------------------------------------------------------------------------------------


def file(tmp_path, **tensors) -> str:
    save_file(tensors, tmp_path / "x.safetensors")
    return str(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"target": []}, TargetError, "names nothing"),
        ({"target": ["id:3"], "against": ["id:3"]}, UsageError, "its own rival"),
        ({"direction": [1.0, 2.0]}, TargetError, r"shape \[2\].*d_model"),
        ({"direction": "nan"}, TargetError, "NaN"),
        ({"direction": "zero"}, TargetError, "zero everywhere"),
        ({"direction": "ones", "score": "increase"}, TargetError, "no score 'increase'.*'direct'"),
        ({"direction": "ones", "score": "additive"}, TargetError, "no score 'additive'.*'direct'"),
        ({"direction": "ones", "norm": "recompute"}, UsageError, "before the final norm"),
        ({"direction": "ones", "target": "id:3"}, TargetError, "mixes"),
        ({"direction": "ones", "against": ["id:3"]}, TargetError, "rivals"),
        ({"continuation": []}, TokenError, "continuation is empty"),
        ({"continuation": [3, 10**6]}, TokenError, "outside the vocabulary"),
        ({"continuation": "text"}, TokenError, "without a tokenizer"),
        ({"continuation": [3], "against": ["id:4"]}, TargetError, "rivals"),
        ({"continuation": [3], "target": "id:4"}, TargetError, "mixes"),
        ({"continuation": [3] * 200}, UsageError, "context"),
        ({"target": Target(direction=(1.0,))}, TargetError, "1 numbers"),
        ({"target": Target(ids=(10**6,))}, TokenError, "outside the vocabulary"),
    ],
)
def test_what_is_no_target_is_refused(options: dict, error, words: str) -> None:
    trace = trace_of("llama")
    width = trace.model.anatomy.sizes.d_model
    made = {"ones": torch.ones(width), "zero": torch.zeros(width), "nan": torch.full((width,), math.nan)}
    if isinstance(options.get("direction"), str):
        options = {**options, "direction": made[options["direction"]]}
    with pytest.raises(error, match=words) as caught:
        trace.explain(**options)
    assert caught.value.exit_code == 2


def test_files_that_hold_no_direction_are_refused(tmp_path) -> None:
    model: Model = trace_of("llama").model
    (tmp_path / "text.safetensors").write_text("no")
    for path, words in (
        (tmp_path / "none.safetensors", "no such file"),
        (tmp_path / "text.safetensors", "not safetensors"),
        (file(tmp_path, a=torch.ones(3), b=torch.ones(3)), r"2 tensors \(a, b\)"),
    ):
        with pytest.raises(TargetError, match=words):
            model.target(direction=path)


def test_one_destination_has_no_attribution_of_a_continuation() -> None:
    with pytest.raises(TargetError, match="destination for each of its tokens"):
        trace_of("llama").attribute(Target(continuation=(3, 4)))


def test_families_are_those_of_the_search() -> None:
    assert set(CONTINUED) <= set(FAMILIES) and mainstem.Target is Target
