"""Attribution patching against real runs where it is exact, against its own definitions, and its cost by counting."""

from collections.abc import Callable
from functools import cache

import handmade
import pytest
import torch
import zoo
from tiny_models import hardly_different
from torch import Tensor, nn

import mainstem
from mainstem.analysis.ranks import correlation, rank_correlation, ranks
from mainstem.causal.attribution_patching import GRADIENTS, AttributionPatcher, AttributionPatching
from mainstem.causal.exact_patching import agreement, exact_effects
from mainstem.causal.patch_places import PLACE_KINDS, patch_places
from mainstem.causal.tracked import Cost, Prompt
from mainstem.errors import ChoiceError, LevelRefusedError, MetricError, UsageError
from mainstem.intervene.attributing import PatchPair
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.run.inputs import base_arguments

BASE = zoo.prompt(9, seed=2)[0]
DONOR = torch.where(torch.arange(9) == 3, BASE + 7, BASE)
LAST = len(BASE) - 1
QUICK = {"llama", "in_place"}
BUILDERS_OF_ALL_SORTS = [
    *("llama", "gpt2", "gemma2", "olmo2", "qwen3", "phi3", "bloom", "qwen2_moe"),
    *("in_place", "post_norm", "einsum_sinks", "shared_block"),
]


def metric(logits: Tensor) -> Tensor:
    return logits[:, 3] - logits[:, 5]


def linear_end() -> nn.Module:
    """Attention and MLP side by side, and nothing behind the last block's writes but the unembedding."""
    model = zoo.build("gpt_neox", attn_implementation="sdpa", use_parallel_residual=True)
    model.gpt_neox.final_layer_norm = nn.Identity()
    return model.eval()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    **handmade.ALL,
    "mixing": handmade.Mixing,
    "linear_end": linear_end,
    **{name: (lambda n=name: zoo.build(n, attn_implementation="sdpa")) for name in ("llama", "gpt2", "qwen3", "phi3")},
    **{name: (lambda n=name: zoo.build(n)) for name in ("gemma2", "olmo2", "bloom")},
    "qwen2_moe": lambda: zoo.build("qwen2_moe", experts_implementation="eager"),
}


@cache
def opened(name: str) -> "mainstem.Model":
    return mainstem.open(BUILDERS[name]().double())


def prompts(name: str, donor: Tensor = DONOR) -> tuple[Prompt, Prompt]:
    arguments = base_arguments(opened(name).module)
    return Prompt(BASE, LAST, arguments), Prompt(donor, LAST, arguments)


def patcher(name: str, *kinds: str) -> AttributionPatcher:
    model = opened(name)
    return AttributionPatcher(model.module, model.anatomy, *prompts(name), metric, kinds or PLACE_KINDS)


def exact(made: AttributionPatcher, sample: int = 10_000) -> dict:
    return exact_effects(made.model, made.places, made.base, made.donor, made.metric, sample)


def marked(*names: str) -> list:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


# --- exact where it can be -----------------------------------------------------------------------------------


def in_the_last_block(found: dict) -> dict:
    last = max(unit.layer for _, unit in found if unit.layer is not None)
    return {key: value for key, value in found.items() if key[1].layer == last}


def test_behind_a_linear_end_estimates_are_exact() -> None:
    made = patcher("linear_end", "sublayer", "head", "attention_neuron", "ffn_neuron", "value")
    estimates = in_the_last_block(made.estimate().of_kind(*PLACE_KINDS))
    effects = in_the_last_block(exact(made))
    assert estimates.keys() == effects.keys() and len(effects) > 100
    assert max(map(abs, effects.values())) > 0.01
    for key, value in effects.items():
        assert estimates[key] == pytest.approx(value, abs=1e-12), key


def test_behind_a_linear_end_queries_and_keys_are_exact_through_the_softmax_only() -> None:
    made = patcher("linear_end", "query", "key")
    effects = in_the_last_block(exact(made))
    corrected, linear = (made.estimate(query_key=how).of_kind("query", "key") for how in ("exact", "linear"))
    assert len(effects) == 8
    for key, value in effects.items():
        assert corrected[key] == pytest.approx(value, abs=1e-12), key
    assert max(abs(linear[key] - value) for key, value in effects.items()) > 1e-3


@pytest.mark.parametrize("name", marked(*BUILDERS_OF_ALL_SORTS))
def test_small_differences_are_patched_as_estimated(name: str) -> None:
    """A donor whose token hardly differs: first order is all there is, whatever the model does."""
    with hardly_different(opened(name).module, int(DONOR[3]), int(BASE[3])):
        made = patcher(name)
        effects = exact(made, 150)
        for query_key in ("linear", "exact"):
            found = made.estimate(query_key=query_key).of_kind(*PLACE_KINDS)
            size = max(map(abs, effects.values()))
            assert size > 1e-7
            for key, value in effects.items():
                assert found[key] == pytest.approx(value, abs=2e-2 * size), key


def test_a_head_is_patched_where_its_values_enter_the_output_matrix() -> None:
    made = patcher("llama", "head")
    found = exact(made)
    module = opened("llama").module
    projection = module.model.layers[1].self_attn.o_proj
    kept: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        module(input_ids=DONOR[None])
        before = metric(module(input_ids=BASE[None]).logits[:, -1])
        handle.remove()

        def patch(_, args):
            x = args[0].clone()
            x[..., 32:48] = kept[0][..., 32:48]
            return (x,)

        handle = projection.register_forward_pre_hook(patch)
        after = metric(module(input_ids=BASE[None]).logits[:, -1])
    handle.remove()
    value = next(value for (_, unit), value in found.items() if str(unit) == "L1H2")
    assert value == pytest.approx(float(after - before), abs=1e-12)


# --- definitions ---------------------------------------------------------------------------------------------


def test_a_model_that_mixes_rows_is_patched_one_run_at_a_time() -> None:
    mixing, plain = (exact(patcher(name, "head", "sublayer")) for name in ("mixing", "plain"))
    assert mixing.keys() == plain.keys() and any(abs(effect) > 1e-3 for effect in plain.values())
    for unit, effect in plain.items():
        assert mixing[unit] == pytest.approx(effect, abs=1e-10), unit


@pytest.mark.parametrize("name", marked("llama", "gpt2", "gemma2", "in_place", "einsum_sinks"))
@pytest.mark.parametrize("gradient", ["gradient", "integrated"])
def test_finer_units_sum_to_coarser_ones(name: str, gradient: str) -> None:
    made = patcher(name).estimate(gradient)  # type: ignore[arg-type]
    sums: dict[tuple, Tensor] = {}
    for group in made.effects:
        whole = group.units[0].sublayer
        sums[group.kind, whole] = group.scores.sum(-1)
        assert torch.allclose(group.scores.sum(0), group.total)
    compared = 0
    for kind, coarse in (("head", "sublayer"), ("attention_neuron", "sublayer"), ("ffn_neuron", "sublayer")):
        for (own, whole), value in sums.items():
            if own == kind:
                assert torch.allclose(value, sums[coarse, whole], atol=1e-8), (kind, whole)
                compared += 1
    assert compared >= 3


def test_integrated_gradients_of_the_embedding_are_the_whole_change() -> None:
    made = patcher("llama", "embedding").estimate("integrated", steps=32)
    total = sum(made.of_kind("embedding").values())
    assert total == pytest.approx(made.donor - made.base, abs=1e-6)
    assert abs(total - (made.donor - made.base)) < abs(
        sum(patcher("llama", "embedding").estimate().of_kind("embedding").values()) - (made.donor - made.base)
    )


def test_a_dropped_layer_is_one_that_nothing_comes_back_through() -> None:
    """Against a model whose layer's writes are detached, for each layer and unit."""
    made = patcher("llama", "embedding", "sublayer", "head", "ffn_neuron")
    dropped = made.estimate("grad-drop")
    module, anatomy = made.model, made.anatomy
    sums = [torch.zeros_like(group.scores) for group in dropped.effects]
    for layer in range(3):
        gone = [w.site for w in anatomy.writes if w.unit.layer == layer]
        slopes = gradients_with_detached(module, made, gone)
        values = [seen_at(module, made.places, ids) for ids in (BASE, DONOR)]
        for i, place in enumerate(made.places):
            if place.units[0].layer != layer:
                others = 3 if place.units[0].layer is None else 2
                product = slopes[place.sites[0]] * (values[1][place.sites[0]] - values[0][place.sites[0]])
                sums[i] += place.rows(product, place.sites[0], 1, len(BASE))[0].sum(-1).abs() / others
    for group, expected in zip(dropped.effects, sums, strict=True):
        assert torch.allclose(group.scores, expected, atol=1e-12), group.kind
    assert any(bool((group.scores > 1e-3).any()) for group in dropped.effects)


def seen_at(module: nn.Module, places: list, ids: Tensor) -> dict[Site, Tensor]:
    found: dict[Site, Tensor] = {}

    def look(site: Site) -> Tap:
        return lambda leaves: found.update({site: leaves[site.slot]})

    with torch.no_grad(), tapped(module, [(s, look(s)) for place in places for s in place.sites]):
        module(input_ids=ids[None])
    return found


def gradients_with_detached(module: nn.Module, made: AttributionPatcher, gone: list[Site]) -> dict[Site, Tensor]:
    leaves_of: dict[Site, Tensor] = {}

    def leaf(site: Site) -> Tap:
        def tap(leaves):
            new = list(leaves)
            added = torch.zeros_like(leaves[site.slot]).requires_grad_()
            leaves_of[site] = added
            new[site.slot] = (leaves[site.slot].detach() if site in gone else leaves[site.slot]) + added
            return new

        return tap

    sites = list(dict.fromkeys(site for place in made.places for site in place.sites))
    with tapped(module, [(site, leaf(site)) for site in sites]):
        value = metric(module(input_ids=BASE[None]).logits[:, -1]).sum()
    found = torch.autograd.grad(value, list(leaves_of.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves_of, found, strict=True))


def test_single_queries_and_keys_are_those_of_the_definition() -> None:
    """One position at a time, by softmax of scores with one query or key exchanged."""
    made = patcher("linear_end", "query", "key")
    corrected = made.estimate(query_key="exact")
    for kind in ("query", "key"):
        place = [p for p in made.places if p.kind == kind][-1]
        group = [g for g in corrected.effects if g.kind == kind][-1]
        for position in (0, 3, 6, LAST):
            for unit in range(4):
                expected = patched_alone(made, place, unit, position)
                assert float(group.scores[position, unit]) == pytest.approx(expected, abs=1e-12)


def patched_alone(made: AttributionPatcher, place, unit: int, position: int) -> float:
    site = place.sites[0]
    donor = seen_at(made.model, [place], DONOR)[site]

    def tap(leaves):
        out = leaves[site.slot].clone().contiguous()
        index = place.rows(torch.arange(out.numel()).reshape(out.shape), site, 1, len(BASE))[0, position, unit]
        out.view(-1)[index] = place.rows(donor, site, 1, len(BASE))[0, position, unit]
        new = list(leaves)
        new[site.slot] = out
        return new

    with torch.no_grad():
        before = metric(made.model(input_ids=BASE[None]).logits[:, -1])
        with tapped(made.model, [(site, tap)]):
            return float(metric(made.model(input_ids=BASE[None]).logits[:, -1]) - before)


# --- cost, state and refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("query_key", ["linear", "exact"])
def test_the_cost_is_what_was_run(gradient: str, query_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = patcher("llama")
    forwards, backwards = [], []
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: backwards.append(1) or original(*a, **k))
    handle = made.model.register_forward_hook(lambda *_: forwards.append(1) and None)
    found = made.estimate(gradient, query_key, steps=3)  # type: ignore[arg-type]
    handle.remove()
    expected = {"gradient": (2, 1), "grad-drop": (2, 3), "integrated": (5, 3)}[gradient]
    assert (found.cost.forwards, found.cost.backwards) == expected == (len(forwards), len(backwards))
    assert found.cost + Cost(1, 1) == Cost(expected[0] + 1, expected[1] + 1)


def test_the_model_is_left_as_it_was() -> None:
    module = opened("in_place").module
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad():
        logits = module(input_ids=BASE[None]).logits
    made = patcher("in_place")
    for gradient in GRADIENTS:
        made.estimate(gradient, "exact")
    exact(made, 30)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    with torch.no_grad():
        assert torch.equal(module(input_ids=BASE[None]).logits, logits)


def test_parameters_without_gradients_make_no_difference() -> None:
    before = patcher("llama").estimate().of_kind(*PLACE_KINDS)
    module = opened("llama").module.requires_grad_(False)
    try:
        assert patcher("llama").estimate().of_kind(*PLACE_KINDS) == before
    finally:
        module.requires_grad_(True)


def test_wrong_requests_are_refused() -> None:
    model = opened("llama")
    base, donor = prompts("llama", DONOR[:-1])
    with pytest.raises(UsageError, match="9 and 8 tokens"):
        AttributionPatcher(model.module, model.anatomy, base, donor, metric)
    with pytest.raises(UsageError, match="No kind of unit"):
        AttributionPatcher(model.module, model.anatomy, *prompts("llama"), metric, ())
    with pytest.raises(MetricError, match="The metric has no gradient"):
        likeliest = AttributionPatcher(
            model.module, model.anatomy, *prompts("llama"), lambda logits: logits.argmax(-1) / 2
        )
        likeliest.estimate()
    with pytest.raises(UsageError, match="sample=-1"):
        model.attribution_patching(PatchPair(BASE.tolist(), DONOR.tolist(), metric), sample=-1)
    with pytest.raises(ChoiceError, match="kind"):
        patch_places(model.anatomy, ["neuron"])
    with pytest.raises(LevelRefusedError, match="not fused"):
        patcher("gemma2", "query")
    assert [str(unit) for unit in patcher("gemma2", "head", "query").missing] == ["L0.attn", "L1.attn", "L2.attn"]
    made = patcher("llama", "head")
    with pytest.raises(ChoiceError, match="grad-drop"):
        made.estimate("graddrop")  # type: ignore[arg-type]
    with pytest.raises(ChoiceError, match="linear"):
        made.estimate(query_key="none")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="step"):
        made.estimate("integrated", steps=0)


# --- agreement -----------------------------------------------------------------------------------------------


def test_ranks_share_ties_and_are_compared_as_spearman_did() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        a, b = torch.randint(0, 6, (2, 12), generator=generator).double()
        for x in (a, b):
            by_pairs = (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2
            assert torch.equal(ranks(x), by_pairs.double())
        expected = torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1]
        assert float(correlation(a, b)) == pytest.approx(float(expected), abs=1e-12)
    x = torch.arange(8.0)
    assert float(correlation(x, x.exp())) == pytest.approx(1) and float(correlation(x, -x)) == pytest.approx(-1)
    made = rank_correlation(x, torch.tensor([0.0, 1, 2, 3, 5, 4, 6, 7]))
    assert -1 <= made.low <= made.value <= made.high <= 1 and made.units == 8
    assert rank_correlation(x[:2], x[:2]).value != rank_correlation(x[:2], x[:2]).value


def test_agreement_is_over_the_sample_and_over_what_either_names() -> None:
    made = patcher("llama", "head", "sublayer")
    effects = exact(made)
    estimates = made.estimate()
    found = agreement(estimates, effects, top=3)
    assert found.correlation.units == len(effects) == 18 and not found.absolute
    assert 3 <= found.top.units <= 6
    perfect = AttributionPatching(
        [
            type(g)(g.kind, g.units, g.scores, torch.tensor([effects[g.kind, u] for u in g.units]))
            for g in estimates.effects
        ],
        "gradient",
        "linear",
        0,
        0.0,
        0.0,
        Cost(),
        {},
    )
    assert agreement(perfect, effects).correlation.value == pytest.approx(1)
    assert agreement(made.estimate("grad-drop"), effects).absolute
    assert len(exact(made, 5)) == 5


def test_keys_that_several_heads_read_are_listed_once() -> None:
    anatomy = opened("llama").anatomy
    queries, keys = ([[str(u) for u in place.units] for place in patch_places(anatomy, [k])] for k in ("query", "key"))
    assert queries[0] == ["L0H0", "L0H1", "L0H2", "L0H3"] and keys == [[f"L{n}H0", f"L{n}H2"] for n in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["gradient", "grad-drop"])
def test_on_the_indirect_object_estimates_order_heads_and_sublayers(
    gradient: str, demo_model: "mainstem.Model"
) -> None:
    """60 of 330 of the indirect object, at random; of all, 0.90 by the gradient and 0.97 with dropped gradients."""
    answer, rival = (demo_model.encode(name)[0] for name in (" Mary", " John"))
    pair = PatchPair(
        "When Mary and John went to the store, John gave a drink to",
        "When Mary and John went to the store, Mary gave a drink to",
        lambda logits: logits[:, answer] - logits[:, rival],
    )
    kinds = ("head", "sublayer")
    made = demo_model.attribution_patching(pair, gradient=gradient, kinds=kinds, sample=60)
    assert made.agreement is not None and made.agreement.correlation.value > 0.8
    assert made.estimates.base > 5 and made.estimates.donor < -5
    heads = made.estimates.of_kind("head")
    assert str(max(heads, key=lambda key: abs(heads[key]))[1]) == "L23H3"
