"""Adapters and wrappers: what low-rank adapters write counts in the sublayer that they adapt, unmerged."""

from typing import Any

import peft
import pytest
import torch
import zoo
from accounts import account, moment_of
from torch import nn

import mainstem
from mainstem.analysis.decompose import LEVELS, decompose
from mainstem.model.discovery import discover
from mainstem.read.describing import describe_anatomy
from mainstem.targets import Target

pytestmark = pytest.mark.slow  # thorough, and not among what every edit runs

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "gemma2": ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_4h_to_h"],
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
}


class Wrapper(nn.Module):
    """A module that holds a model and calls it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def adapted(family: str) -> nn.Module:
    """A tiny model with adapters of rank 4 whose weights are random, both matrices."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[family], lora_dropout=0.0)
    model = peft.get_peft_model(zoo.build(family), config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("family", TARGETS)
def test_a_model_with_adapters_is_exact(family: str) -> None:
    found = account(adapted(family), use_cache=False)
    assert not found.failures
    assert not found.refused
    assert {"sublayers", "heads", "subvalues", "attention_neurons", "neurons", "units"} == found.exact


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_writes_in_the_sublayer_that_it_adapts(family: str) -> None:
    plain = discover(zoo.build(family), use_cache=False)
    model = adapted(family)
    anatomy = discover(model, use_cache=False)
    assert anatomy.sublayers() == plain.sublayers()
    pieces = [write for write in anatomy.writes if "lora" in write.module]
    assert len(pieces) == 2 * len(anatomy.blocks)
    for write in pieces:
        assert write.projection is not None
        assert [tuple(factor.shape)[0] for factor in write.projection.factors][:1] == [4]  # rank, then the stream


def test_the_adapter_is_a_part_of_the_sublayers_one_part() -> None:
    model = adapted("llama")
    anatomy = discover(model, use_cache=False)
    here = moment_of(model, anatomy, zoo.prompt(9, seed=1), use_cache=False)
    decomposition = decompose(here, "sublayers")
    addresses = [str(unit) for group in decomposition.groups if group.kind == "sublayer" for unit in group.units]
    assert len(addresses) == len(set(addresses)) == 6


def test_adapters_that_do_nothing_change_no_part() -> None:
    """With B zero, as adapters begin, the account is that of the bare model."""
    bare = zoo.build("llama")
    ids = zoo.prompt(9, seed=1)
    before = decompose(moment_of(bare, discover(bare, use_cache=False), ids, use_cache=False), "sublayers")
    model = adapted("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    after = decompose(moment_of(model, discover(model, use_cache=False), ids, use_cache=False), "sublayers")
    for a, b in zip(before.groups, after.groups, strict=False):
        if a.kind == "sublayer":
            torch.testing.assert_close(a.total(), b.total(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", TARGETS)
def test_each_unit_of_an_adapted_model_has_one_part(family: str) -> None:
    """What a matrix and its adapter write is one part, under the address that the unit has without the adapter."""
    ids = zoo.prompt(9, seed=1)[0].tolist()
    adapted_trace, bare_trace = (mainstem.open(model).trace(ids) for model in (adapted(family), zoo.build(family)))
    for level in LEVELS:
        found, bare = (
            [unit for group in trace.decompose(level).groups if group.kind != "rounding" for unit in group.units]
            for trace in (adapted_trace, bare_trace)
        )
        assert len(found) == len(set(found)), level
        assert {unit for unit in found if unit.expert is None} == {unit for unit in bare if unit.expert is None}, level


def test_a_ranking_of_an_adapted_model_has_each_unit_once_with_its_whole_score() -> None:
    """log p(t | x + v) - log p(t | x), by the model's own final modules, with v the unit's whole column."""
    model = adapted("llama")
    trace = mainstem.open(model).trace(zoo.prompt(9, seed=1)[0].tolist())
    kinds = ["head", "attention_subvalue", "attention_neuron", "ffn_neuron"]
    base = model.base_model.model
    target = int(trace.logits().argmax())
    for norm in ("recompute", "frozen"):
        for score in ("increase", "direct"):
            values = trace.explain(kinds=kinds, top=10_000, score=score, norm=norm, exhaustive=True).values
            assert len({row.unit for row in values}) == len(values) == 3 * (4 + 4 * 9 + 4 * 16 + 96)
    scores = {row.unit: row.increase for row in trace.explain(kinds=kinds, top=10_000, norm="recompute").values}
    for level, layer, place in (("heads", 1, 2), ("neurons", 2, 30)):
        (group,) = [g for g in trace.decompose(level).groups if g.sublayer and g.sublayer.layer == layer and len(g) > 1]
        vector = group.vectors(torch.tensor([place]))[0]
        mlp, attention = base.model.layers[layer].mlp.down_proj, base.model.layers[layer].self_attn.o_proj
        matrix = attention if level == "heads" else mlp
        delta = matrix.lora_B["default"].weight @ matrix.lora_A["default"].weight * matrix.scaling["default"]
        whole = (matrix.base_layer.weight + delta).detach().double()
        own = slice(16 * place, 16 * place + 16) if level == "heads" else slice(place, place + 1)
        solution = torch.linalg.lstsq(whole[:, own], vector[:, None]).solution
        assert torch.allclose(whole[:, own] @ solution, vector[:, None], atol=1e-5)
        state = trace[f"blocks.{layer}.hook_resid_{'pre' if level == 'heads' else 'mid'}"][-1].double()
        with torch.no_grad():
            logits = base.lm_head(base.model.norm(torch.stack([state, state + vector]).float())).double()
        log_p = logits.log_softmax(-1)[:, target]
        assert scores[str(group.units[place])] == pytest.approx(float(log_p[1] - log_p[0]), abs=1e-4)


@pytest.mark.parametrize("make", [lambda: zoo.build("gemma2"), lambda: adapted("llama")], ids=["plain", "adapted"])
def test_a_module_that_wraps_the_model_is_exact(make) -> None:
    inner = make()
    found = account(Wrapper(inner).eval(), use_cache=False)
    assert not found.failures
    assert not found.refused
    plain = account(inner, use_cache=False)
    assert found.exact == plain.exact
    assert found.anatomy.sublayers() == plain.anatomy.sublayers()


def test_a_merged_adapter_is_in_the_matrix() -> None:
    model = adapted("llama")
    ids = zoo.prompt(9, seed=1)
    anatomy = discover(model, use_cache=False)
    apart = decompose(moment_of(model, anatomy, ids, use_cache=False), "sublayers")
    merged = model.merge_and_unload().eval()
    whole = discover(merged, use_cache=False)
    assert len(whole.writes) < len(anatomy.writes)
    together = decompose(moment_of(merged, whole, ids, use_cache=False), "sublayers")
    torch.testing.assert_close(apart.total(), together.total(), rtol=1e-4, atol=1e-5)


def test_neurons_of_an_adapted_matrix_are_counted_once() -> None:
    rows = {row.level: row.units for row in describe_anatomy(mainstem.open(adapted("llama"))).levels}
    assert rows["neurons"] == 3 * 96


def test_scores_of_an_adapted_matrix_are_those_of_all_that_a_neuron_writes() -> None:
    """Its size and, by finite differences in the model, its gradient: through the matrix and the adapter together."""
    module = adapted("llama").double()
    trace = mainstem.open(module).trace(zoo.prompt(9, seed=2)[0].tolist())
    target = Target(ids=(int(trace.logits().argmax()),), text="the likeliest")
    found = trace.scores(target, ["norm", "gradient", "integrated-gradients"], kinds=["ffn_neuron"])
    number = next(n for n, group in enumerate(found.groups) if group.units[0].layer == 1)
    group = found.groups[number]
    assert len(group.pieces) == 2 and len(found.groups) == trace.model.anatomy.sizes.n_layers
    for neuron in (0, 7):
        index = torch.tensor([neuron])
        size = float(group.vectors(index).norm()) / abs(float(group.coefficients[neuron]))
        assert float(found.values["norm"][number][neuron]) == pytest.approx(size, rel=1e-6)
        change = 0.04
        values = []
        for factor in (1 + change, 1 - change):
            matrix = module.base_model.model.model.layers[1].mlp.down_proj
            handle = matrix.register_forward_pre_hook(_scaling(neuron, factor))
            with torch.no_grad():
                logits = module(input_ids=trace.inputs.ids, use_cache=False).logits[0, -1].double()
            handle.remove()
            values.append(float(logits.log_softmax(-1)[target.token_id]))
        slope = (values[0] - values[1]) / (2 * change)
        assert float(found.values["gradient"][number][neuron]) == pytest.approx(slope, abs=1e-4)


def _scaling(neuron: int, factor: float):
    def before(_, args):
        x = args[0].clone()
        x[..., -1, neuron] *= factor
        return (x, *args[1:])

    return before
