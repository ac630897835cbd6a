"""What a run may and may not do: nothing changes, nothing stays behind, and what is kept is what was there."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import mainstem
from mainstem.errors import (
    MainstemError,
)
from mainstem.model.function_taps import STAND_IN
from mainstem.model.hooks import Site, tapped
from mainstem.run import keeper
from mainstem.run.memory import LiveBytes
from mainstem.run.shelf import Shelf
from mainstem.session import Model
from mainstem.targets import Target

MODELS = ["llama", "gemma2", "mixtral", "gpt2", "bloom", "in_place", "shared_block", "attributes"]
QUICK = {"llama", "in_place"}
FUSED = ["llama", "gpt2", "mixtral", "falcon"]
WITH_ATTENTION = [
    pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.slow)
    for kind, names in (("eager", [*FUSED, "gemma2", "bloom"]), ("sdpa", FUSED))
    for name in names
]


def some(names: list[str]) -> pytest.MarkDecorator:
    """The names, of which the quick part has a few."""
    marks = {name: () if name in QUICK else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@cache
def opened(name: str) -> Model:
    return mainstem.open(build(name))


def ids_of(length: int = 9, seed: int = 3) -> list[int]:
    return zoo.prompt(length, seed)[0].tolist()


# --- nothing changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), WITH_ATTENTION)
def test_outputs_are_the_same_bits_with_and_without_capture(name: str, attention: str) -> None:
    module = zoo.build(name, attn_implementation=attention)
    ids = zoo.prompt(12, seed=4)
    before = zoo.logits(module, ids)[0]
    trace = mainstem.open(module).trace(ids[0].tolist(), positions=range(12))
    kept = torch.stack([trace.logits(position) for position in range(12)])
    assert torch.equal(kept, before)
    assert torch.equal(zoo.logits(module, ids)[0], before)


@some(MODELS)
def test_everything_leaves_the_model_as_it_was(name: str) -> None:
    module = build(name)
    module.train(name == "gpt2")
    state = {key: value.clone() for key, value in [*module.named_parameters(), *module.named_buffers()]}
    grads = [parameter.requires_grad for parameter in module.parameters()]
    model, training, rng = mainstem.open(module.eval()), module.training, torch.get_rng_state()
    explanation = model.trace(ids_of()).explain(kinds=list(KINDS), top=3)
    assert explanation.certificate.holds and explanation.certificate.labels.holds
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in state.items())
    assert [parameter.requires_grad for parameter in module.parameters()] == grads
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.training == training
    assert torch.equal(torch.get_rng_state(), rng)
    assert hooks_of(module) == 0


KINDS = ("sublayer", "head", "attention_subvalue", "attention_neuron", "ffn_neuron", "expert_neuron")


# --- nothing stays behind -----------------------------------------------------------------------------------


def hooks_of(module: nn.Module) -> int:
    """Hooks registered anywhere in a module, function modes that are switched on, and who needs the stand-in."""
    own = [
        len(hooks)
        for part in module.modules()
        for name, hooks in vars(part).items()
        if name.startswith("_forward") and "hooks" in name
    ]
    return sum(own) + len(_get_current_function_mode_stack()) + STAND_IN.users + len(STAND_IN.watching)


class BrokenError(Exception):
    """What a broken module raises."""


@pytest.mark.parametrize("place", [0, 7, -1])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_no_hook_is_left_behind_by_a_run_that_fails(name: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module at `place` raises, at the first, second ... call of everything that runs the model."""
    module = build(name)
    model = mainstem.open(module)
    expected = model.trace(ids_of()).decompose("units").total()
    leaves = [part for part in module.modules() if not list(part.children())]
    broken = leaves[place % len(leaves)]
    original = broken.forward

    def fail_after(calls: int) -> None:
        left = iter(range(calls))

        def forward(*args, **kwargs):
            if next(left, None) is None:
                raise BrokenError
            return original(*args, **kwargs)

        monkeypatch.setattr(broken, "forward", forward)

    for calls in range(2):
        for run in (lambda: model.trace(ids_of()), lambda: mainstem.open(module).anatomy, lambda: fresh_labels(model)):
            fail_after(calls)
            with pytest.raises((BrokenError, MainstemError)) if calls == 0 else Tolerant():
                run()
            assert hooks_of(module) == 0
    monkeypatch.undo()
    assert torch.equal(model.trace(ids_of()).decompose("units").total(), expected)


def fresh_labels(model: Model) -> None:
    other = Model(model.loaded)
    other.__dict__["anatomy"] = model.anatomy
    _ = other.labels


class Tolerant:
    """Lets a run end either way."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, trace) -> bool:
        return kind is not None and issubclass(kind, BrokenError | MainstemError)


# --- what is kept is what was there -------------------------------------------------------------------------


def seen_by_hooks(module: nn.Module, paths: dict[str, str], ids: list[int]) -> dict[str, Tensor]:
    """What plain hooks see: the input of a module for a name that ends in `_pre`, else its output; copies."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, path in paths.items():
        part = module.get_submodule(path)

        def before(module, args, kwargs, name=name):
            seen[name] = (args[0] if args else kwargs["hidden_states"]).detach().clone()

        def after(module, args, output, name=name):
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        if name.endswith("_pre"):
            handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(part.register_forward_hook(after))
    with torch.no_grad():
        module(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return {name: tensor[0] for name, tensor in seen.items()}


PLACES = {
    "llama": ("model.layers", "self_attn", "mlp", "post_attention_layernorm"),
    "gpt2": ("transformer.h", "attn", "mlp", "ln_2"),
    "in_place": ("blocks", "attention", "mlp", "norm2"),
}


@pytest.mark.parametrize("name", PLACES)
def test_hook_style_names_are_what_hooks_see(name: str) -> None:
    """Also where the stream is changed in place after each hook: then only copies hold."""
    model = opened(name)
    layers, attention, mlp, norm = PLACES[name]
    paths: dict[str, str] = {}
    for layer in range(3):
        paths[f"blocks.{layer}.hook_resid_pre"] = f"{layers}.{layer}"
        paths[f"blocks.{layer}.hook_attn_out"] = f"{layers}.{layer}.{attention}"
        paths[f"blocks.{layer}.hook_mlp_out"] = f"{layers}.{layer}.{mlp}"
        paths[f"blocks.{layer}.hook_resid_post"] = f"{layers}.{layer}"
    seen = seen_by_hooks(model.module, paths, ids_of())
    middles = {f"{layer}_pre": f"{layers}.{layer}.{norm}" for layer in range(3)}
    middle = seen_by_hooks(model.module, middles, ids_of())
    trace = model.trace(ids_of())
    for key, value in seen.items():
        assert torch.equal(trace[key], value), key
    for layer in range(3):
        assert torch.equal(trace[f"blocks.{layer}.hook_resid_mid"], middle[f"{layer}_pre"])
        assert torch.equal(trace[f"L{layer}.attn"], trace[f"blocks.{layer}.hook_attn_out"])


@some(MODELS)
def test_another_position_is_what_a_fresh_trace_gives(name: str) -> None:
    model = opened(name)
    late = model.trace(ids_of(), positions=(-1,))
    for position in (0, 4, -3):
        fresh = model.trace(ids_of(), positions=(position,)).decompose("units", position)
        again = late.decompose("units", position)
        assert again.position == fresh.position == position % 9
        assert torch.equal(again.total(), fresh.total())
        assert torch.equal(late.logits(position), model.trace(ids_of(), positions=(position,)).logits(position))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, dict):
        yield from (tensor for part in value.values() for tensor in tensors_in(part))
    elif isinstance(value, list | tuple):
        yield from (tensor for part in value for tensor in tensors_in(part))


def sizes_of(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("mixtral", {"experts_implementation": "eager"})])
def test_a_trace_made_in_inference_mode_is_what_it_is_outside(name: str, more: dict[str, str]) -> None:
    outside = mainstem.open(zoo.build(name, **more)).trace(ids_of())
    model = mainstem.open(zoo.build(name, **more))
    with torch.inference_mode():
        inside = model.trace(ids_of())  # its structure is discovered here, too
    for level in ("sublayers", "units"):
        assert torch.equal(inside.decompose(level).total(), outside.decompose(level).total())


def test_what_is_taken_out_of_a_trace_holds_nothing_else() -> None:
    trace = opened("llama").trace(ids_of())  # its first stream is a write as it is
    for name in ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.1.hook_resid_post", "L1.mlp"):
        assert trace[name].untyped_storage().nbytes() <= 2 * trace[name].nbytes
    batch = mainstem.open(zoo.build("gpt2")).trace([ids_of()] * 3)
    for write in batch.run.first.writes:
        rows = {write[row].data_ptr() for row in range(3)}
        assert len(rows) == (1 if write.stride(0) == 0 else 3)
    assert any(write.stride(0) == 0 for write in batch.run.first.writes)  # positions, the same for all


@pytest.fixture
def without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have memory of their own, so that it can be counted."""
    monkeypatch.setattr(keeper, "Shelf", lambda *_: Shelf(0))


@pytest.mark.parametrize(("name", "attention"), WITH_ATTENTION)
@pytest.mark.usefixtures("without_blocks")
def test_no_tensor_of_positions_by_positions_is_held(name: str, attention: str) -> None:
    model = mainstem.open(zoo.build(name, attn_implementation=attention))
    held = []
    for length in (48, 80, 112):  # every copy is a multiple of what it is aligned to, and no size of the models is one
        tensors = list(tensors_in(model.trace(ids_of(length)).run.first))
        assert all(list(tensor.shape).count(length) < 2 for tensor in tensors)
        held.append(sizes_of(tensors))
    short, middle, long = held
    assert long - middle == middle - short  # with the square of the length there would be more


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox"])
@pytest.mark.usefixtures("without_blocks")
def test_what_a_trace_holds_grows_by_writes_keys_and_values(name: str) -> None:
    model = mainstem.open(zoo.build(name))
    _ = model.anatomy

    def held(length: int) -> tuple[int, int]:
        with LiveBytes() as live:
            trace = model.trace(ids_of(length))
        run = trace.run.first
        attention = [tensor for each in run.attention.values() for tensor in (each.key, each.value)]
        return live.live, sizes_of(list(tensors_in([run.writes, run.stream, attention])))

    (all_short, own_short), (all_long, own_long) = held(32), held(96)
    assert own_long - own_short <= all_long - all_short <= 1.02 * (own_long - own_short)


class Inner(nn.Module):
    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.add(x, 1)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, times: int) -> Tensor:
        return torch.add(self.inner(torch.add(x, 10), times), 100)


@pytest.mark.parametrize("times", [0, 3])
def test_functions_are_counted_where_a_module_calls_them_and_not_where_those_in_it_do(times: int) -> None:
    outer = nn.Sequential(Outer())
    outer.forward = lambda x: outer[0](x, times)  # type: ignore[method-assign]
    seen: dict[str, float] = {}

    def at(path: str, ordinal: int):
        name = f"{path} {ordinal}"
        site = Site(path, 0, "result", function="add", ordinal=ordinal)
        return site, lambda leaves: seen.update({name: float(leaves[0])})

    with tapped(outer, [at("0", 0), at("0", 1), at("0.inner", 0), at("0.inner", 2)]):
        outer(torch.tensor(0.0))
    expected = {"0 0": 10, "0 1": 110 + times}
    assert seen == expected | ({"0.inner 0": 11, "0.inner 2": 13} if times else {})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in outer.modules())


def test_a_run_that_ends_at_a_modules_input_leaves_other_modes_alone() -> None:
    """Also where functions inside that module are watched, which then never begin."""

    class Plain(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class EnoughError(Exception):
        pass

    def enough(leaves: list) -> None:
        raise EnoughError

    model = mainstem.open(zoo.build("llama"))
    core = next(write.attention for write in model.anatomy.writes if write.attention is not None)
    taps = [(core.site, lambda leaves: None), (Site(core.site.path, core.site.call, "input"), enough)]
    with Plain() as outer:
        with pytest.raises(EnoughError), tapped(model.module, taps):
            model.module(input_ids=torch.tensor([ids_of()]))
        assert _get_current_function_mode_stack() == [outer]
    assert not _get_current_function_mode_stack()


# --- batches ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=4)
@given(lengths=st.lists(st.integers(2, 9), min_size=2, max_size=3), seed=st.integers(0, 99))
@some(["llama", "gpt2", "gemma2", "in_place"])
def test_a_padded_batch_gives_each_row_what_it_gets_alone(name: str, lengths: list[int], seed: int) -> None:
    from mainstem.run.inputs import make_inputs
    from mainstem.tracing import Trace

    model = opened(name)
    rows = [ids_of(length, seed + place) for place, length in enumerate(lengths)]
    batch = Trace(model, make_inputs(model.module, rows, 200, "cpu"), (-1,))
    target = Target(ids=(7,), text="id:7")
    for row, ids in enumerate(rows):
        alone = model.trace(ids)
        assert batch.ids(row) == ids
        assert torch.allclose(batch.logits(row=row), alone.logits(), atol=1e-4)
        together, single = (trace.attribute(target, "units", row=place) for trace, place in ((batch, row), (alone, 0)))
        assert len(together.decomposition) == len(single.decomposition)
        for mine, other in zip(together.decomposition.groups, single.decomposition.groups, strict=False):
            if mine.kind != "rounding":
                assert list(mine.units) == list(other.units)
                assert torch.allclose(mine.coefficients.double(), other.coefficients.double(), atol=1e-4)
        assert batch.reads(row=row).holds
        assert float(batch.stream_errors(row).max()) < 1e-5
