"""Gradients against finite differences in the real model, integrated gradients against turning a layer off."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import handmade
import pytest
import torch
import zoo
from tiny_models import build
from torch import Tensor, nn

import mainstem
from mainstem.analysis.certificate import certify
from mainstem.analysis.decompose import decompose
from mainstem.causal import gradients
from mainstem.causal.gradients import Differentiator, adding
from mainstem.run.capture import capture
from mainstem.run.inputs import base_arguments
from mainstem.run.moment import moment
from mainstem.targets import Target
from mainstem.tracing import Trace

EVERYWHERE = [
    *(name for name in handmade.ALL if name != "two_streams"),
    "llama",
    "gpt2",
    "gemma2",
    "mixtral",
    "olmo2",
    "gpt_neox",
    "granite",
    "bloom",
    "falcon",
]
QUICK = {"llama", "gemma2", "in_place"}


def marked(names: list[str]) -> list:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@cache
def trace_of(name: str) -> Trace:
    model = build(name)
    return mainstem.open(model if name == "mixtral" else model.double()).trace(zoo.prompt(9, seed=2)[0].tolist())


def target_of(name: str) -> Target:
    return Target(ids=(int(trace_of(name).logits().argmax()),), text="the likeliest")


def differentiator(name: str, level: str, kinds: set[str], target: Target | None = None) -> Differentiator:
    trace = trace_of(name)
    made = trace.decompose(level)  # type: ignore[arg-type]
    module = trace.model.module
    return Differentiator(module, made, target or target_of(name), trace.inputs.ids[0], kinds, **base_arguments(module))


@torch.no_grad()
def log_p(name: str, target: Target) -> float:
    trace = trace_of(name)
    result = trace.model.module(input_ids=trace.inputs.ids, **base_arguments(trace.model.module))
    logits = result.logits[0, -1].double()
    if target.against:
        return float(logits[list(target.ids)].mean() - logits[list(target.against)].mean())
    return float(logits[list(target.ids)].logsumexp(0) - logits.logsumexp(0))


@contextmanager
def scaled(module: nn.Module, channels: slice | int, factor: float) -> Iterator[None]:
    """What a matrix reads, some channels of the last position multiplied."""

    def before(_, args):
        x = args[0].clone()
        x[..., -1, channels] *= factor
        return (x, *args[1:])

    handle = module.register_forward_pre_hook(before)
    yield
    handle.remove()


MATRICES = {
    "llama": lambda m: (m.model.layers[1].mlp.down_proj, m.model.layers[1].self_attn.o_proj),
    "gemma2": lambda m: (m.model.layers[1].mlp.down_proj, m.model.layers[1].self_attn.o_proj),
    "gpt2": lambda m: (m.transformer.h[1].mlp.c_proj, m.transformer.h[1].attn.c_proj),
    "olmo2": lambda m: (m.model.layers[1].mlp.down_proj, m.model.layers[1].self_attn.o_proj),
}
"""The output matrices of block 1's MLP and attention: plain, with biases, and with norms after them."""

NORMED = {"gemma2", "olmo2"}
"""What the layer writes is normed: turned on, it jumps at 0, which no quadrature sees."""


STENCIL = ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0))
"""Of the derivative, to the fourth order in the step: stock norms compute in float32, so that the step is long."""


def difference(value, step: float = 0.04) -> float:
    return sum(weight * value(n * step) for n, weight in STENCIL) / (12 * step)


def slope(name: str, module: nn.Module, channels: slice | int, target: Target) -> float:
    def value(change: float) -> float:
        with scaled(module, channels, 1 + change):
            return log_p(name, target)

    return difference(value)


def in_block_1(made: Differentiator, found: list[Tensor]) -> Tensor:
    chosen = [s for g, s in zip(made.groups, found, strict=True) if g.units[0].layer == 1]
    assert len(chosen) == 1
    return chosen[0]


@pytest.mark.parametrize("name", marked(list(MATRICES)))
@pytest.mark.parametrize("contrast", [False, True])
def test_the_gradient_is_the_finite_difference(name: str, contrast: bool) -> None:
    a, b = trace_of(name).logits().topk(2).indices.tolist()
    target = Target(ids=(a,), against=(b,), text="a") if contrast else target_of(name)
    mlp, attention = MATRICES[name](trace_of(name).model.module)
    made = differentiator(name, "neurons", {"ffn_neuron"}, target)
    neurons = in_block_1(made, made.gradient())
    for neuron in (0, 7, len(neurons) - 1):
        assert float(neurons[neuron]) == pytest.approx(slope(name, mlp, neuron, target), abs=1e-5)
    made = differentiator(name, "heads", {"head"}, target)
    heads = in_block_1(made, made.gradient())
    width = trace_of(name).model.anatomy.sizes.d_head
    for head in range(len(heads)):
        channels = slice(head * width, (head + 1) * width)
        assert float(heads[head]) == pytest.approx(slope(name, attention, channels, target), abs=1e-5)
    made = differentiator(name, "attention_neurons", {"attention_neuron"}, target)
    entries = in_block_1(made, made.gradient())
    assert float(entries[5]) == pytest.approx(slope(name, attention, 5, target), abs=1e-5)
    assert torch.allclose(entries.reshape(len(heads), -1).sum(-1), heads)
    made = differentiator(name, "units", {"attention_subvalue"}, target)
    assert torch.allclose(in_block_1(made, made.gradient()).reshape(len(heads), -1).sum(-1), heads)


@pytest.mark.parametrize("name", marked(EVERYWHERE))
def test_what_is_added_at_a_write_enters_the_stream(name: str) -> None:
    """In a run with something added to every write the parts still sum to the stream, and the stream differs."""
    trace = trace_of(name)
    module, anatomy, ids = trace.model.module, trace.model.anatomy, trace.inputs.ids
    before = trace.run.moment()
    last = torch.tensor([[ids.shape[1] - 1]])
    for i, write in enumerate(anatomy.writes):
        if write.unit.kind != "sublayer":
            continue
        added = 0.1 * torch.randn(1, len(before.stream), generator=torch.Generator().manual_seed(i)).to(write.dtype)
        edit = (write.site, adding(write, added, ids.shape[1] - 1, ids.shape[1]))
        seen = capture(module, anatomy, ids, last, edits=[edit], **base_arguments(module))
        after = moment(anatomy, seen, 0, 0, 0)
        assert torch.allclose(after.writes[i] - before.writes[i], added, atol=1e-6), write.unit
        assert (after.stream - before.stream).norm() > 1e-3, write.unit
        assert certify(decompose(after, "sublayers")).holds, write.unit


@pytest.mark.parametrize("name", marked(EVERYWHERE))
def test_gradients_of_finer_parts_sum_to_their_sublayers(name: str) -> None:
    """With the sublayer's own bias, on which no unit acts."""
    made = differentiator(name, "sublayers", {"sublayer"})
    whole = {str(g.units[0]): float(s.sum()) for g, s in zip(made.groups, made.gradient(), strict=True)}
    fine = differentiator(name, "units", {"attention_subvalue", "ffn_neuron", "expert_neuron", "sublayer"})
    fine.groups += [g for g in fine.decomposition.groups if g.kind == "bias" and g.sublayer is not None]
    fine.places = [gradients._writes_of(fine.decomposition, group) for group in fine.groups]
    sums = dict.fromkeys(whole, 0.0)
    largest = 0.0
    for group, scores in zip(fine.groups, fine.gradient(), strict=True):
        sums[str(group.sublayer or group.units[0])] += float(scores.sum())
        largest = max(largest, float(scores.abs().max()))
    assert sums == pytest.approx(whole, abs=1e-5)
    assert largest > 1e-3


@pytest.mark.parametrize("name", marked(list(MATRICES)))
def test_integrated_gradients_sum_to_what_turning_the_layer_off_takes(name: str) -> None:
    target, module = target_of(name), MATRICES[name](trace_of(name).model.module)[0]
    with scaled(module, slice(None), 0.0):
        off = log_p(name, target)
    made = differentiator(name, "neurons", {"ffn_neuron"})
    found = made.integrated(64)
    layer = next(unit for unit in found.changes if unit.layer == 1)
    assert found.changes[layer] == pytest.approx(log_p(name, target) - off, abs=2e-6)
    total = float(in_block_1(made, found.scores).sum())
    assert found.gaps[layer] == pytest.approx(found.changes[layer] - total, abs=1e-12)
    if name in NORMED:
        assert abs(found.gaps[layer]) > 1e-5
        return
    assert total == pytest.approx(log_p(name, target) - off, abs=2e-6)
    assert abs(found.gaps[layer]) < 2e-6 < abs(made.integrated(2).gaps[layer])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_integrated_gradients_are_the_riemann_sum_of_the_definition(name: str) -> None:
    """m_i x the mean over a of d log p(a) / d m_i by finite differences, all neurons of the layer scaled by a."""
    target, module = target_of(name), MATRICES[name](trace_of(name).model.module)[0]
    made = differentiator(name, "neurons", {"ffn_neuron"})
    scores = in_block_1(made, made.integrated().scores)
    neuron, points, total = int(scores.abs().argmax()), 40, 0.0
    for n in range(points):
        a = (n + 0.5) / points
        with scaled(module, slice(None), a):

            def value(change: float, a: float = a) -> float:
                """`change` is of the neuron's full activation, beside the layer's share of it."""
                with scaled(module, neuron, (a + change) / a):
                    return log_p(name, target)

            total += difference(value) / points
    assert float(scores[neuron]) == pytest.approx(total, abs=1e-4)


def test_rows_that_are_not_alone_are_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = differentiator("llama", "neurons", {"ffn_neuron"})
    together = made.integrated(4)
    batches: list[int] = []
    rows = Differentiator._rows
    monkeypatch.setattr(Differentiator, "_rows", lambda self, s, t: batches.append(len(s)) or rows(self, s, t))
    monkeypatch.setattr(Differentiator, "_alike", lambda self, log_p: False)
    alone = made.integrated(4)
    assert batches[:7] == [6, 1, 1, 1, 1, 1, 1]
    for a, b in zip(together.scores, alone.scores, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_the_model_is_left_as_it_was() -> None:
    trace = trace_of("llama")
    module = trace.model.module
    ids, arguments = trace.inputs.ids, base_arguments(module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad():
        logits = module(input_ids=ids, **arguments).logits
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    made = differentiator("llama", "units", {"ffn_neuron", "attention_subvalue"})
    value, slopes = made.run(torch.ones(1), dict.fromkeys(range(1, 4)))
    assert float(value) == pytest.approx(log_p("llama", target_of("llama")), rel=1e-14)  # of the same logits
    assert all(bool(s.any()) for s in slopes.values())
    made.integrated(2)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids, **arguments).logits, logits)


def test_the_ranking_is_by_the_gradient() -> None:
    trace = trace_of("llama")
    for score in ("gradient", "integrated-gradients"):
        found = trace.scores(target_of("llama"), [score, "norm"], kinds=["ffn_neuron"])
        listed = trace.explain(score=score, kinds=["ffn_neuron"], top=5, negative=True)
        best = found.top(score, 5, negative=True)
        assert [value.unit for value in listed.values] == [str(part.unit) for part in best]
        assert [value.score for value in listed.values] == [part.score for part in best]
