"""Quantised runs: the right products, put in their place and undone, whatever the model; refusals name their place."""

import copy
from functools import cache
from typing import Any

import handmade
import pytest
import torch
import zoo
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from mainstem.analysis.quantizers import PUBLISHED, QUANTISERS, Quantiser, Scheme
from mainstem.causal.linear_layers import LinearLayer, linear_layers, refuse_quantised, unquantised
from mainstem.causal.quantised import (
    Prepared,
    input_maxima,
    layer_errors,
    prepared,
    quantised,
    quantised_run,
)
from mainstem.errors import NotFiniteError, RefusedError
from mainstem.model import hooks
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover

EVERYTHING = {"everything": Quantiser(Scheme("row"), Scheme("row"), threshold=1e-30)}
"""All inputs are kept in the float dtype: the same products as the model's, computed by what replaces them."""

LLAMA_ROLES = ["attn query", "attn key", "attn value", "attn out", "mlp gate", "mlp up", "mlp out"]
DENSE = {
    "llama": LLAMA_ROLES,
    "gpt2": ["attn query+key+value", "attn out", "mlp up", "mlp out"],
    "gpt_neox": ["attn query+key+value", "attn out", "mlp up", "mlp out"],
    "phi3": ["attn query+key+value", "attn out", "mlp up+gate", "mlp out"],
    "gemma2": LLAMA_ROLES,
    "plain": LLAMA_ROLES,
    "shared_block": LLAMA_ROLES,
    "in_place": LLAMA_ROLES,
}


def arguments(name: str) -> dict[str, Any]:
    return {} if name in handmade.ALL else {"use_cache": False}


@cache
def made(name: str) -> tuple[nn.Module, Anatomy, tuple[LinearLayer, ...]]:
    module = handmade.ALL[name]() if name in handmade.ALL else zoo.build(name)
    anatomy = discover(module, **arguments(name))
    return module, anatomy, linear_layers(module, anatomy, zoo.prompt(8, seed=2))


@torch.no_grad()
def logits(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return quantised_run(module, ())(ids)


def one(name: str, quantiser: str) -> Prepared:
    module, _, layers = made(name)
    return prepared(layers, {quantiser: {**QUANTISERS, **EVERYTHING}[quantiser]}, input_maxima(module, layers, IDS))[
        quantiser
    ]


IDS = zoo.prompt(11, seed=5, batch=2)


# --- which layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_every_linear_layer_of_a_block_is_found_fused_ones_and_transposed_ones_too(name: str) -> None:
    module, anatomy, layers = made(name)
    assert [layer.name for layer in layers if layer.name.startswith("L1.")] == [f"L1.{role}" for role in DENSE[name]]
    assert len(layers) == anatomy.sizes.n_layers * len(DENSE[name])
    assert unquantised(module, anatomy, layers) == {}
    first = unquantised(module, anatomy, layers[1:])
    assert list(first.values()) == [layers[0].weight.numel()] or name == "shared_block"


@pytest.mark.parametrize("name", DENSE)
def test_what_replaces_a_product_computes_it(name: str) -> None:
    module, _, _ = made(name)
    expected = logits(module, IDS)
    with quantised(module, one(name, "everything")):
        got = logits(module, IDS)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantiser", ["smoothquant", "w4a4-smoothquant", "llm.int8", "w4"])
def test_a_model_in_half_precision_stays_in_it(quantiser: str, dtype: torch.dtype) -> None:
    module = zoo.build("llama", dtype=dtype)
    layers = linear_layers(module, discover(module, use_cache=False), zoo.prompt(8, seed=2))
    own = prepared(layers, {quantiser: QUANTISERS[quantiser]}, input_maxima(module, layers, IDS))[quantiser]
    x = torch.ones(2, layers[0].weight.shape[1], dtype=dtype)
    assert own[0].rows(x).dtype == own[0](x).dtype == dtype
    with quantised(module, own):
        got = logits(module, IDS)
    assert got.dtype == dtype and got.isfinite().all() and not torch.equal(got, logits(module, IDS))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_alone_are_those_of_a_model_that_has_them(name: str) -> None:
    module, _, layers = made(name)
    made_of = one(name, "w4")
    other = copy.deepcopy(module)
    by_storage = {p.untyped_storage().data_ptr(): n for n, p in module.named_parameters()}
    for layer in made_of:
        name_of = by_storage[layer.layer.weight.untyped_storage().data_ptr()]
        parameter, values = other.get_parameter(name_of), layer.matrix.codes.values()
        parameter.data = values if layer.layer.weight.is_contiguous() else values.T.contiguous()
    with quantised(module, made_of):
        torch.testing.assert_close(logits(module, IDS), logits(other, IDS), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(other, IDS), logits(module, IDS), rtol=1e-3)


def test_layers_of_one_sublayer_with_one_role_have_names_of_their_own() -> None:
    _, _, layers = made("qwen3_5_text")
    names = [layer.name for layer in layers]
    assert {"L0.mixer input", "L0.mixer input.2"} <= set(names) and len(set(names)) == len(names)


# --- nothing stays behind -----------------------------------------------------------------------------------


def bits(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()]


@pytest.mark.parametrize("name", ["llama", "gpt2", "shared_block"])
@pytest.mark.parametrize("quantiser", ["llm.int8", "w4a4-smoothquant"])
def test_afterwards_the_model_is_the_same_bits(name: str, quantiser: str) -> None:
    module, _, _ = made(name)
    before, weights = logits(module, IDS), bits(module)
    with quantised(module, one(name, quantiser)):
        first, second = logits(module, IDS), logits(module, IDS)
    assert torch.equal(first, second) and not torch.equal(first, before)
    assert torch.equal(logits(module, IDS), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, bits(module), strict=True))
    assert not hooks._tapped and not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_afterwards_is_also_after_an_error() -> None:
    module, _, _ = made("llama")
    before = logits(module, IDS)
    with pytest.raises(ZeroDivisionError), quantised(module, one("llama", "absmax")):
        1 / 0  # noqa: B018
    handle = module.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), quantised(module, one("llama", "absmax")):
        logits(module, IDS)
    handle.remove()
    assert torch.equal(logits(module, IDS), before)
    assert not hooks._tapped and not _get_current_function_mode_stack()


def test_the_inner_of_two_quantisers_holds_and_the_outer_after_it() -> None:
    module, outer, inner = made("llama")[0], one("llama", "absmax"), one("llama", "w4a4")
    with quantised(module, outer):
        alone = logits(module, IDS)
        with quantised(module, inner):
            within = logits(module, IDS)
        assert torch.equal(logits(module, IDS), alone)
    with quantised(module, inner):
        assert torch.equal(logits(module, IDS), within)


def test_taps_see_what_is_put_in_place() -> None:
    module, _, layers = made("llama")
    layer = next(layer for layer in layers if layer.name == "L1.mlp up")
    seen: list[torch.Tensor] = []
    site = hooks.Site(layer.path, layer.site.call, "output")
    with (
        quantised(module, one("llama", "absmax")),
        hooks.tapped(module, [(site, lambda leaves: seen.append(leaves[0]))]),
    ):
        within = logits(module, IDS)
    with hooks.tapped(module, [(site, lambda leaves: seen.append(leaves[0]))]):
        assert not torch.equal(logits(module, IDS), within)
    assert not torch.equal(seen[0], seen[1])


# --- what is measured ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_errors_of_layers_are_those_on_inputs_in_full_precision() -> None:
    module, _, layers = made("gpt2")
    inputs: dict[str, torch.Tensor] = {}
    for layer in layers:
        module.get_submodule(layer.path).register_forward_pre_hook(
            lambda m, args, name=layer.name: inputs.setdefault(name, args[0].clone())
        )
    made_of = prepared(layers, {name: PUBLISHED[name] for name in ("absmax", "llm.int8")})
    logits(module, IDS)
    for m in module.modules():
        m._forward_pre_hooks.clear()
    found = layer_errors(module, made_of, IDS)
    for name, own in made_of.items():
        assert list(found[name]) == [layer.name for layer in layers]
        for layer in own:
            x = inputs[layer.layer.name].reshape(-1, layer.layer.weight.shape[1])
            full = x.double() @ layer.layer.weight.double().T
            off = layer.matrix(x).double() - full
            assert found[name][layer.layer.name].relative_error == pytest.approx(
                float(off.norm() / full.norm()), rel=1e-3
            )


def test_a_run_is_entered_for_each_batch_and_does_not_depend_on_others() -> None:
    module, _, _ = made("llama")
    run = quantised_run(module, one("llama", "vector-wise"))
    with torch.no_grad():
        torch.testing.assert_close(run(IDS)[1:], run(IDS[1:]), rtol=1e-4, atol=1e-5)  # scales are of rows


def test_layers_that_read_the_same_value_are_smoothed_alike_and_others_not() -> None:
    by_name = {layer.layer.name: layer for layer in one("llama", "smoothquant")}
    query, key = by_name["L1.attn query"].divisors, by_name["L1.attn key"].divisors
    assert query is not None and torch.equal(query, key)
    assert not torch.equal(query, by_name["L1.mlp up"].divisors)
    assert by_name["L1.mlp out"].divisors is None and by_name["L1.attn out"].divisors is None


def test_codes_are_shared_between_quantisers_that_round_alike() -> None:
    _, _, layers = made("llama")
    both = prepared(layers, {name: PUBLISHED[name] for name in ("vector-wise", "llm.int8", "row-wise")})
    first = {name: own[0].matrix.codes for name, own in both.items()}
    assert first["vector-wise"] is first["llm.int8"] and first["vector-wise"] is not first["row-wise"]


# --- what is refused ----------------------------------------------------------------------------------------


def test_routed_experts_are_refused_with_their_sublayer() -> None:
    module = zoo.build("mixtral")
    with pytest.raises(RefusedError, match=r"L0\.mlp"):
        linear_layers(module, discover(module, use_cache=False), zoo.prompt(8))


def test_a_product_of_another_layout_is_refused_with_its_module() -> None:
    module = handmade.ALL["einsum_sinks"]()
    with pytest.raises(RefusedError, match=r"L0\.attn query.*blocks\.0\.attention"):
        linear_layers(module, discover(module), zoo.prompt(8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_model_that_is_quantised_already_is_refused_with_the_weight(dtype: torch.dtype) -> None:
    module = handmade.ALL["plain"]()
    module.blocks[2].mlp.register_buffer("codes", torch.zeros(4, 4).to(dtype))
    with pytest.raises(RefusedError, match=r"blocks\.2\.mlp\.codes"):
        refuse_quantised(module)
    assert refuse_quantised(handmade.ALL["plain"]()) is None


def test_an_overflow_names_its_layer() -> None:
    module = zoo.build("llama", dtype=torch.float16)
    anatomy = discover(module, use_cache=False)
    layers = linear_layers(module, anatomy, zoo.prompt(8))
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(0).add_(6e4)
        made_of = prepared(layers, {"vector-wise": PUBLISHED["vector-wise"]})["vector-wise"]
        with quantised(module, made_of), pytest.raises(NotFiniteError, match=r"float16 \(L1\.mlp out .*down_proj"):
            logits(module, IDS)
