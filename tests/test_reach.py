"""Weight-only numbers of neurons: right by definition, never of other weights, and a help that changes no result."""

from functools import cache

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import COUNTS, HARD, KINDS, NORMS, check, every_score, hard, targets, trace_of

import mainstem
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.lower_bounds import LowerBounds
from mainstem.analysis.readout import normed
from mainstem.analysis.search import IncreaseSearch
from mainstem.analysis.search_bases import Bases
from mainstem.errors import CacheError
from mainstem.model.reach import Reach, fingerprint, measure, neuron_writes
from mainstem.session import Model

FAMILIES = ["llama", "gpt2", "mixtral", "qwen2_moe", "granite", "gemma2", "falcon", "softcap", "narrow_embedding"]
QUICK = {"llama", "gpt2"}


def reach_of(model: Model) -> dict[str, Reach]:
    return {first: measure(model.anatomy, matrix) for first, matrix in neuron_writes(model.anatomy)}


@cache
def reach_for(name: str) -> dict[str, Reach]:
    return reach_of(trace_of(name).model)


def named(names: list[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- what the numbers are -----------------------------------------------------------------------------------


@named(FAMILIES)
def test_the_numbers_are_what_each_column_does_to_all_logits(name: str) -> None:
    anatomy, reach = trace_of(name).model.anatomy, reach_for(name)
    readout = anatomy.readout
    for first, matrix in neuron_writes(anatomy):
        one = torch.ones(1, dtype=torch.float64)
        a = normed(readout, matrix.T.double(), one, vectors=True) @ readout.unembedding.double().T * readout.scale
        wanted = (a.amin(-1), a.amax(-1), a.mean(-1), (a - a.mean(-1, keepdim=True)).pow(2).sum(-1))
        for got, want in zip(vars(reach[first]).values(), wanted, strict=True):
            assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5), first


@named(FAMILIES)
def test_every_group_of_neurons_that_all_tokens_use_has_its_numbers(name: str) -> None:
    groups = trace_of(name).decompose("units").groups
    firsts = {str(g.units[0]) for g in groups if g.kind == "ffn_neuron" or g.units[0].shared}
    assert firsts <= set(reach_for(name)) and (firsts or name == "mixtral")


# --- bounds and results -------------------------------------------------------------------------------------


def lower(made: Decomposition, target, norm, reach) -> dict:
    groups = [g for g in made.groups if g.kind in KINDS]
    owners = [g.sublayer or g.units[0] for g in groups]
    bounds = LowerBounds(Bases(made, target, norm, owners), list(zip(groups, owners, strict=True)), reach)
    found = {}
    for group in groups:
        bound, allowed = bounds.bounds(group, group.sublayer)  # type: ignore[arg-type]
        found |= dict(zip(group.units, (bound - allowed).tolist(), strict=True))
    return found


@named(FAMILIES)
@settings(max_examples=8)
@given(data=st.data())
def test_no_increase_is_below_its_bound(name: str, data) -> None:
    made, norm = trace_of(name).decompose("units"), data.draw(NORMS)
    target = targets(made, data.draw(st.sampled_from(["token", "set", "contrast"])), data.draw(st.integers(0, 99)))
    wanted = every_score(made, target, norm, frozenset(KINDS))
    for reach in (None, reach_for(name)):
        bounds = lower(made, target, norm, reach)
        assert all(bounds[unit] <= value + 2e-5 for unit, value in wanted.items())


@named(FAMILIES)
@settings(max_examples=8)
@given(data=st.data())
def test_the_most_negative_are_the_same_with_the_numbers(name: str, data) -> None:
    made, norm, count = trace_of(name).decompose("units"), data.draw(NORMS), data.draw(COUNTS)
    target = targets(made, data.draw(st.sampled_from(["token", "set"])), data.draw(st.integers(0, 99)))
    found = IncreaseSearch([(made, target)], norm, KINDS, reach_for(name)).top(count, negative=True)
    check(found, every_score(made, target, norm, frozenset(KINDS)), count, True)


@pytest.mark.slow
@pytest.mark.parametrize("change", HARD, ids=lambda change: change.__name__)
@settings(max_examples=8)
@given(data=st.data())
def test_on_hard_weights_too(change, data) -> None:
    made, norm, count = hard(change, torch.float64), data.draw(NORMS), data.draw(COUNTS)
    anatomy = made.moment.anatomy
    reach = {first: measure(anatomy, matrix) for first, matrix in neuron_writes(anatomy)}
    target = targets(made, "token", data.draw(st.integers(0, 99)))
    found = IncreaseSearch([(made, target)], norm, KINDS, reach).top(count, negative=True)
    check(found, every_score(made, target, norm, frozenset(KINDS)), count, True)


def test_the_numbers_are_used_and_wrong_ones_would_be_noticed() -> None:
    """With numbers that are too small the bounds are no bounds: the test above can fail."""
    made = trace_of("llama").decompose("units")
    target = targets(made, "token", 0)
    right, wrong = reach_for("llama"), {}
    for first, reach in right.items():
        wrong[first] = Reach(reach.low * 0.01, reach.high * 0.01, reach.mean, reach.squares * 1e-4)
    wanted = every_score(made, target, "frozen", frozenset(KINDS))
    assert lower(made, target, "frozen", right) != lower(made, target, "frozen", None)
    bounds = lower(made, target, "frozen", wrong)
    assert any(bounds[unit] > value + 2e-5 for unit, value in wanted.items())


# --- the cache ----------------------------------------------------------------------------------------------


def test_they_are_measured_once_and_found_again(empty_cache, capsys) -> None:
    model = mainstem.open(zoo.build("llama"))
    assert model.reach() is None and not empty_cache.exists()
    measured = model.reach(measure=True)
    said = capsys.readouterr().err
    assert "Measuring how far" in said and " MB kept in " in said
    again = mainstem.open(zoo.build("llama")).reach()
    assert measured is not None and again is not None and measured.keys() == again.keys()
    for first, reach in measured.items():
        assert all(torch.equal(a, b) for a, b in zip(vars(reach).values(), vars(again[first]).values(), strict=True))
    assert model.reach(measure=True) is not None and capsys.readouterr().err == ""


@pytest.mark.parametrize("path", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_other_weights_are_never_given_them(empty_cache, path: str) -> None:
    """One number changed in place by any way that torch has, in a model that is open."""
    model = mainstem.open(zoo.build("llama"))
    model.reach(measure=True)
    weight = model.module.get_parameter(path)
    before = weight.data.reshape(-1)[-1].clone()
    weight.data.reshape(-1)[-1] = before + 1e-3
    assert model.reach() is None
    weight.data.reshape(-1)[-1] = before
    assert model.reach() is not None


def test_weights_that_do_not_matter_do_not_count() -> None:
    model = mainstem.open(zoo.build("llama"))
    before = fingerprint(model.anatomy)
    with torch.no_grad():
        model.module.model.layers[1].mlp.gate_proj.weight.mul_(2)
    assert fingerprint(model.anatomy) == before


def test_exchanged_numbers_change_the_hash() -> None:
    model = mainstem.open(zoo.build("llama"))
    before = fingerprint(model.anatomy)
    weight = model.module.lm_head.weight.data
    weight[[3, 90]] = weight[[90, 3]].clone()
    assert fingerprint(model.anatomy) != before


def test_damaged_files_are_not_used(empty_cache) -> None:
    model = mainstem.open(zoo.build("llama"))
    model.reach(measure=True)
    file = next(empty_cache.glob("reach-*/reach.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    assert model.reach() is None
    assert model.reach(measure=True) is not None and model.reach() is not None


def test_a_cache_that_cannot_be_written_is_explained(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="MAINSTEM_CACHE"):
        mainstem.open(zoo.build("llama")).reach(measure=True)


def test_explain_uses_them_for_negative_units(empty_cache) -> None:
    trace = mainstem.open(zoo.build("llama")).trace(zoo.prompt(9, seed=2)[0].tolist())
    before = trace.explain(negative=True, top=8)
    after = trace.explain(negative=True, top=8, measure=True)
    assert [v.unit for v in after.values] == [v.unit for v in before.values]
    assert after.search["scored"] <= before.search["scored"]
