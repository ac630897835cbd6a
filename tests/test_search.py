"""The search by bounds finds what scoring every unit finds: same units, same order up to ties, same scores.

The reference adds every unit to the stream that its sublayer read and reads the sum in float64, one product with the
vocabulary for each unit; nothing of the search or its bounds is in it.
"""

from dataclasses import replace
from functools import cache, lru_cache

import handmade
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mainstem
from mainstem.analysis import search, search_bases
from mainstem.analysis.bases import entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.readout import frozen_scale, normed, softcapped
from mainstem.analysis.search import SLACK, IncreaseSearch, Search
from mainstem.targets import Target
from mainstem.tracing import Trace
from mainstem.units import Unit

TOLERANCE = 1e-4
KINDS = {"attention_subvalue", "ffn_neuron", "expert_neuron"}
FAMILIES = [
    *["llama", "gpt2", "gemma2", "gemma3_text", "olmo2", "gpt_neox", "falcon", "cohere", "mixtral", "gpt_oss"],
    *["granite", "phi", "opt", "bloom", "qwen3", "qwen2_moe", "stablelm", "deepseek_v3", "openai-gpt", "glm4"],
    *["softcap", "narrow_embedding", "no_final_norm", "channel_gates"],
]
QUICK = ["llama", "gemma2", "mixtral"]
NORMS = st.sampled_from(["frozen", "recompute"])
COUNTS = st.sampled_from([1, 3, 10, 40, 10**6])


@cache
def trace_of(name: str, dtype: torch.dtype = torch.float32) -> Trace:
    model = handmade.ALL[name]().to(dtype) if name in handmade.ALL else zoo.build(name, dtype=dtype)
    return mainstem.open(model).trace(zoo.prompt(9, seed=2)[0].tolist())


def read64(made: Decomposition, states: Tensor, scale: Tensor | None) -> Tensor:
    readout = made.moment.anatomy.readout
    u = normed(readout, states, scale) @ readout.unembedding.double().T * readout.scale
    return softcapped(readout, u if readout.bias is None else u + readout.bias.double())


def score64(logits: Tensor, target: Target) -> Tensor:
    """log p of a token or set; with rivals, log p of the set minus the mean of theirs: the log of the odds."""
    log_p = logits.log_softmax(-1)
    own = log_p[:, list(target.ids)].logsumexp(-1)
    return own - log_p[:, list(target.against)].mean(-1) if target.against else own


@lru_cache(64)
def every_score(made: Decomposition, target: Target, norm: str, kinds: frozenset[str]) -> dict[Unit, float]:
    """The increase of each unit by definition, in float64."""
    scale = frozen_scale(made.moment.anatomy.readout, made.moment.stream) if norm == "frozen" else None
    places, found = entries(made), {}
    for group in made.groups:
        if group.kind not in kinds:
            continue
        entry = places[group.sublayer or group.units[0]]
        states = torch.cat([entry.base[None], entry.base + entry.vectors(group, torch.arange(len(group)))])
        scores = score64(read64(made, states, scale), target)
        found |= dict(zip(group.units, (scores[1:] - scores[0]).tolist(), strict=True))
    return found


def check(found: Search, wanted: dict[Unit, float], count: int, negative: bool, tolerance: float = TOLERANCE) -> None:
    """Same scores; nothing better left out; in order; equal units by address, the first of them first."""
    sign = -1 if negative else 1
    units = [f.unit for f in found.found]
    assert found.units == len(wanted) and found.scored <= found.units
    assert len(units) == len(set(units)) == min(count, len(wanted))
    for f in found.found:
        assert f.increase == pytest.approx(wanted[f.unit], abs=tolerance), f.unit
        assert sign * f.bound >= sign * f.increase - tolerance, f.unit
    scores = [sign * wanted[unit] for unit in units]
    near = SLACK + 2 * tolerance
    assert all(a >= b - near for a, b in zip(scores, scores[1:], strict=False))
    missed = [unit for unit in wanted if unit not in set(units)]
    assert all(sign * wanted[unit] <= scores[-1] + near for unit in missed)
    alike: dict[float, list[Unit]] = {}
    for unit, score in wanted.items():
        alike.setdefault(round(score, 10), []).append(unit)
    place = {unit: i for i, unit in enumerate(units)}
    for equal in alike.values():
        equal.sort(key=lambda unit: unit.sort_key)
        own = sorted((unit for unit in equal if unit in place), key=place.__getitem__)
        assert own == equal[: len(own)]


def targets(made: Decomposition, kind: str, seed: int) -> Target:
    logits = made.moment.logits.double()
    likely = logits.argsort(descending=True).tolist()
    other = torch.randperm(len(likely), generator=torch.Generator().manual_seed(seed)).tolist()
    if kind == "token":
        return Target(ids=(likely[0] if seed % 2 else other[0],))
    if kind == "set":
        return Target(ids=(likely[0], other[0], likely[1])) if other[0] not in likely[:2] else Target(ids=(*other[:2],))
    return Target(ids=tuple(other[:2]), against=tuple(other[2:4]))


def compare(made: Decomposition, target: Target, norm, count: int, negative: bool, tolerance: float = TOLERANCE):
    found = IncreaseSearch([(made, target)], norm, KINDS).top(count, negative)
    check(found, every_score(made, target, norm, frozenset(KINDS)), count, negative, tolerance)
    return found


def agrees(name: str, dtype: torch.dtype, data) -> None:
    made = trace_of(name, dtype).decompose("units")
    target = targets(made, data.draw(st.sampled_from(["token", "set", "contrast"])), data.draw(st.integers(0, 99)))
    compare(made, target, data.draw(NORMS), data.draw(COUNTS), data.draw(st.booleans()))


def test_units_that_write_nothing_change_nothing_and_stand_in_the_order_of_addresses() -> None:
    """Their rounding differs from one base to the next, and two could stand on both sides of a tie's end."""
    made = trace_of("gemma3_text", torch.float32).decompose("units")
    found = compare(made, targets(made, "contrast", 38), "frozen", 1_000_000, False)
    still = [f.unit for f in found.found if f.increase == 0]
    assert len(still) >= 8 and still == sorted(still, key=lambda unit: unit.sort_key)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "phi"])
def test_pieces_chunks_and_the_sorted_beginning_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_bases, "PIECE", 7)
    monkeypatch.setattr(search, "CHUNKS", (2, 3))
    monkeypatch.setattr(search, "FIRST", 5)
    monkeypatch.setattr(search, "SPARE", 1)
    made = trace_of(name).decompose("units")
    for norm in ("frozen", "recompute"):
        for negative in (False, True):
            compare(made, targets(made, "token", 3), norm, 4, negative)


@pytest.mark.parametrize("name", ["llama", "phi", "cohere"])  # plain, with biases, with a scale
@pytest.mark.parametrize("norm", ["frozen", "recompute"])
def test_means_of_the_vocabulary_are_the_same_in_one_pass(name: str, norm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_bases, "PIECE", 7)
    made = trace_of(name).decompose("units")
    owners = [group.sublayer for group in made.groups if group.sublayer is not None]
    once, twice = (search_bases.Bases(made, targets(made, "token", 1), norm, owners) for _ in range(2))
    p = twice.p.double()  # from here on it has probabilities
    for part, own in vars(once.means).items():
        other = getattr(twice.means, part)
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own.double(), other.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(once.means.negentropy, (p * p.log()).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(once.log_p.argsort(), twice.log_p.argsort()) and "p" not in vars(once)


@pytest.mark.parametrize("norm", ["frozen", "recompute"])
@pytest.mark.parametrize("negative", [False, True])
def test_tokens_that_a_bias_rules_out_spoil_nothing(norm, negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a whole piece of the vocabulary, and the first."""
    monkeypatch.setattr(search_bases, "PIECE", 7)
    model = zoo.build("phi")
    with torch.no_grad():
        model.lm_head.bias[:9] = -1e9
    made = mainstem.open(model).trace(zoo.prompt(9, seed=2)[0].tolist()).decompose("units")
    target = Target(ids=(int(made.moment.logits.argmax()),))
    found = compare(made, target, norm, 5, negative)
    assert all(one.kl == pytest.approx(one.bound - one.increase, abs=1e-4) for one in found.found if not negative)


# --- families ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
@settings(max_examples=10)
@given(data=st.data())
def test_the_search_finds_what_scoring_everything_finds(name: str, data) -> None:
    agrees(name, torch.float32, data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow), "gemma2"])
@settings(max_examples=6)
@given(data=st.data())
def test_in_other_precisions(name: str, dtype: torch.dtype, data) -> None:
    agrees(name, dtype, data)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("norm", ["frozen", "recompute"])
def test_whole_heads_and_attention_neurons_are_searched_alike(norm, negative: bool) -> None:
    for level, kind in (("heads", "head"), ("attention_neurons", "attention_neuron"), ("sublayers", "sublayer")):
        made = trace_of("llama").decompose(level)
        target = targets(made, "token", 1)
        found = IncreaseSearch([(made, target)], norm, {kind}).top(5, negative)
        check(found, every_score(made, target, norm, frozenset({kind})), 5, negative)


# --- weights that make it hard -----------------------------------------------------------------------------


def rows_of_a_thousand(model) -> None:
    model.lm_head.weight[::7] *= 1000


def peaked(model) -> None:
    model.lm_head.weight *= 30


def one_row(model) -> None:
    model.lm_head.weight[11] *= 300


def loud_neurons(model) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight *= 40


def silent_neurons(model) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, ::2] = 0


def alike(model) -> None:
    """Neurons 3, 4, 9 and 20 of a layer are one neuron four times over; so are heads 0 and 1."""
    for layer in model.model.layers:
        for matrix in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            matrix[[4, 9, 20]] = matrix[3].clone()
        layer.mlp.down_proj.weight[:, [4, 9, 20]] = layer.mlp.down_proj.weight[:, [3]].clone()


def all_alike(model) -> None:
    for layer in model.model.layers:
        for matrix in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            matrix[:] = matrix[3].clone()
        layer.mlp.down_proj.weight[:] = layer.mlp.down_proj.weight[:, [3]].clone()


HARD = [rows_of_a_thousand, peaked, one_row, loud_neurons, silent_neurons, alike, all_alike]
HARD_QUICK = (rows_of_a_thousand, all_alike)


def hard_ones() -> list:
    return [pytest.param(change, marks=() if change in HARD_QUICK else pytest.mark.slow) for change in HARD]


@cache
def hard(change, dtype: torch.dtype) -> Decomposition:
    model = zoo.build("llama", dtype=dtype)
    with torch.no_grad():
        change(model)
    return mainstem.open(model).trace(zoo.prompt(9, seed=2)[0].tolist()).decompose("units")


@pytest.mark.slow
@pytest.mark.parametrize("change", hard_ones(), ids=lambda change: change.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_hard_weights_cost_time_but_not_correctness(change, data) -> None:
    made = hard(change, torch.float64)
    target = targets(made, data.draw(st.sampled_from(["token", "set", "contrast"])), data.draw(st.integers(0, 99)))
    compare(made, target, data.draw(NORMS), data.draw(COUNTS), data.draw(st.booleans()))


@pytest.mark.slow
@pytest.mark.parametrize("change", [alike, all_alike, silent_neurons], ids=lambda change: change.__name__)
@settings(max_examples=8)
@given(data=st.data())
def test_ties_come_in_the_order_of_their_addresses_in_single_precision_too(change, data) -> None:
    made = hard(change, torch.float32)
    compare(made, targets(made, "token", data.draw(st.integers(0, 9))), data.draw(NORMS), data.draw(COUNTS), False)


def test_identical_units_are_told_apart_by_address_alone() -> None:
    """Three times as many equal units as are asked for: the first addresses are listed, whatever was scored first."""
    made = hard(all_alike, torch.float64)
    for negative in (False, True):
        found = compare(made, targets(made, "token", 1), "frozen", 5, negative)
        neurons = [f.unit for f in found.found if f.unit.kind == "ffn_neuron"]
        assert neurons == sorted(neurons, key=lambda unit: unit.sort_key)


def test_huge_logits_in_single_precision() -> None:
    """Rounding grows with the logits, and so does what the search allows for it."""
    made = hard(peaked, torch.float32)
    for norm in ("frozen", "recompute"):
        for negative in (False, True):
            compare(made, targets(made, "token", 1), norm, 10, negative, tolerance=2e-3)


# --- the check itself, and the default model ----------------------------------------------------------------


def test_the_comparison_can_fail() -> None:
    made, kinds = trace_of("llama").decompose("units"), KINDS
    target = targets(made, "token", 1)
    wanted = every_score(made, target, "frozen", frozenset(kinds))
    right = IncreaseSearch([(made, target)], "frozen", kinds).top(5)
    check(right, wanted, 5, False)
    found = right.found
    wrong = [
        [*found[1:], found[0]],  # order
        [*found[1:], IncreaseSearch([(made, target)], "frozen", kinds).top(6).found[5]],  # the best left out
        found[:4],  # too few
    ]
    for listed in wrong:
        with pytest.raises(AssertionError):
            check(Search(listed, right.units, right.scored, right.slack), wanted, 5, False)
    for changed in (wanted | {found[2].unit: found[2].increase + 1e-3}, wanted | {found[0].unit: -1.0}):
        with pytest.raises(AssertionError):
            check(right, changed, 5, False)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 4])
def test_the_default_model_both_signs_both_norms(demo_model, prompt: int) -> None:
    text = [
        "The capital of France is",
        "When Mary and John went to the store, John gave a drink to",
        "Once upon a time there was a",
        "Two and two make",
        "The opposite of hot is",
    ][prompt]
    made = demo_model.trace(text).decompose("units")
    if prompt:  # all units of one prompt, and of the others those of every third layer
        made = replace(made, groups=[g for g in made.groups if (g.units[0].layer or 0) % 3 == prompt % 3])
    target = Target(ids=(int(made.moment.logits.argmax()),))
    for norm in ("frozen", "recompute"):
        search = IncreaseSearch([(made, target)], norm, KINDS)
        units = [unit for slot in search.slots for unit in slot.units]
        scores = torch.cat([search.scores(chunk)[0][:, 0] for chunk in torch.arange(len(units)).split(64)])
        assert len(units) > (10 if prompt else 30) * 1_536  # the neurons of these layers, and their subvalues
        for negative in (False, True):
            found = search.top(100, negative)
            assert found.units == len(units) and found.scored < 5000
            order = scores.argsort(descending=not negative)
            expected = scores[order[:100]].tolist()
            assert [f.increase for f in found.found] == pytest.approx(expected, abs=TOLERANCE)
            for place, one in enumerate(found.found):  # the same unit, or one within the slack of it
                own = float(scores[units.index(one.unit)])
                assert own == pytest.approx(expected[place], abs=2 * TOLERANCE)
            clear = [units[int(i)] for i, gap in zip(order[:100], scores[order[:101]].diff().abs(), strict=True)
                     if float(gap) > 2 * TOLERANCE]  # fmt: skip
            assert set(clear) <= {f.unit for f in found.found}
