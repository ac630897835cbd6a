"""Fused attention seen by standing in its place: where it is called by its name, and nowhere else."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import handmade
import pytest
import torch
import zoo
from accounts import account
from handmade import GROUPS, HEAD, HEADS, WIDTH
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mainstem.causal.tracked import _tap
from mainstem.errors import RunError
from mainstem.model.discovery import discover
from mainstem.model.function_taps import STAND_IN
from mainstem.model.hooks import tapped
from mainstem.run import keeper
from mainstem.run.capture import Captured, capture

BUILTIN = scaled_dot_product_attention


@pytest.fixture(autouse=True, params=["as they are", "large writes", "at once"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with small writes copied together, with all of them kept by reference, and with nothing waiting."""
    if request.param == "large writes":
        monkeypatch.setattr(keeper, "LARGE", 0)
    elif request.param == "at once":
        monkeypatch.setattr(keeper, "ENOUGH", 1)


def by_name(*args: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*args, enable_gqa=True)


def imported(*args: Tensor) -> Tensor:
    return scaled_dot_product_attention(*args, enable_gqa=True)


class InBuffers:
    """The keys of every layer are written into the same memory, and so are the values."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if not self.buffers or self.buffers[0].shape != key.shape:
            self.buffers = [torch.empty_like(key), torch.empty_like(value)]
        for buffer, new in zip(self.buffers, (key, value), strict=True):
            buffer.copy_(new)
        return by_name(query, *self.buffers, mask)


class Fused(nn.Module):
    """Grouped-query attention by torch's own function."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.attend = attend

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


def built(attend: Callable[..., Tensor]) -> nn.Module:
    with zoo.seeded(1):
        model = handmade.Model(lambda: handmade.Block(lambda: Fused(attend))).eval()
    zoo.randomise(model, 1)
    return model


def changed_afterwards(query: Tensor, *args: Tensor) -> Tensor:
    result = by_name(query, *args)
    query.zero_()
    return result


def twice(query: Tensor, *args: Tensor) -> Tensor:
    """The first of two calls is not by name, and comes to nothing."""
    return by_name(query + 0.0 * imported(query, *args), *args)


WAYS: dict[str, Callable[..., Tensor]] = {
    "by_name": by_name,
    "imported": imported,
    "in_buffers": InBuffers(),
    "changed_afterwards": changed_afterwards,
    "twice": twice,
}


@pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS)
def test_the_account_is_exact_however_attention_is_called(attend: Callable[..., Tensor]) -> None:
    made = account(built(attend))
    assert not made.failures and {"heads", "subvalues", "attention_neurons"} <= made.exact


def test_what_is_kept_is_the_same_whichever_way_leads_to_it() -> None:
    ids, last = zoo.prompt(9, seed=1), torch.tensor([[8]])
    runs, sites = {}, {}
    for way, attend in WAYS.items():
        model = built(attend)
        anatomy = discover(model)
        runs[way] = list(capture(model, anatomy, ids, last).attention.values())
        sites[way] = {write.attention.site.by_name for write in anatomy.writes if write.attention is not None}
    seen_by_name = {way for way in WAYS if sites[way] == {True}}
    assert seen_by_name == {"by_name", "in_buffers", "changed_afterwards"}
    assert all(sites[way] == {False} for way in WAYS if way not in seen_by_name)
    for way in WAYS:
        for one, two in zip(runs["by_name"], runs[way], strict=True):
            for field in ("query", "key", "value", "mask"):
                assert torch.equal(getattr(one, field), getattr(two, field)), (way, field)


def tensors(run: Captured) -> list[Tensor]:
    attention = [
        one for each in run.attention.values() for one in (each.key, each.value, each.query) if one is not None
    ]
    return [*run.writes, *run.sources.values(), *attention, run.stream, run.logits]


@pytest.mark.parametrize("way", ["by_name", "in_buffers"])
def test_what_a_run_left_is_not_changed_by_the_next(way: str) -> None:
    model, last = built(WAYS[way]), torch.tensor([[8]])
    anatomy = discover(model)
    kept = tensors(capture(model, anatomy, zoo.prompt(9, seed=1), last))
    before = [tensor.clone() for tensor in kept]
    capture(model, anatomy, zoo.prompt(9, seed=2), last)
    assert all(torch.equal(one, two) for one, two in zip(kept, before, strict=True))


def test_without_reads_everything_else_is_the_same() -> None:
    model, ids = built(by_name), zoo.prompt(9, seed=1)
    anatomy = discover(model)
    for last in (torch.tensor([[8]]), torch.tensor([[3, 8]])):
        full, less = (capture(model, anatomy, ids, last, reads=reads) for reads in (True, False))
        assert full.reads and full.block_inputs and not less.reads and not less.block_inputs
        assert all(torch.equal(one, two) for one, two in zip(tensors(full), tensors(less), strict=True))


def test_one_prompt_alone_keeps_what_several_destinations_keep() -> None:
    """One destination is taken another way, which costs less."""
    model, ids = built(by_name), zoo.prompt(9, seed=1)
    anatomy = discover(model)
    several = capture(model, anatomy, ids, torch.tensor([[3, 8]]))
    for place, position in enumerate((3, 8)):
        one = capture(model, anatomy, ids, torch.tensor([[position]]))
        pairs = [*zip(one.reads, several.reads, strict=True), *zip(one.block_inputs, several.block_inputs, strict=True)]
        pairs += [(one.sources[i], several.sources[i]) for i in one.sources] + [(one.logits, several.logits)]
        assert all(torch.equal(alone[:, 0], among[:, place]) for alone, among in pairs)


@pytest.mark.parametrize(
    ("path", "given"), [("blocks.1.mlp.down", True), ("blocks.1.mlp", False), ("blocks.2.mlp", False)]
)
def test_a_change_in_place_that_discovery_did_not_see_is_no_wrong_number(path: str, given: bool) -> None:
    """Of a neuron's input that was noted, and of a write, after it was seen, in memory that the model holds."""
    model = built(by_name)
    anatomy = discover(model)
    held: list[Tensor] = []
    model.get_submodule(path).register_forward_hook(
        lambda module, args, output: held.append(args[0] if given else output)
    )

    def change(module: nn.Module, args: tuple, output: Tensor) -> None:
        held.pop().mul_(2)

    at = path if given else path.removesuffix(".mlp")
    model.get_submodule(at).register_forward_hook(change)
    with pytest.raises(RunError, match="changed a value in place"):
        capture(model, anatomy, zoo.prompt(9, seed=1), torch.tensor([[8]]))


def test_the_stand_in_goes_with_the_last_that_needs_it_also_after_an_error() -> None:
    model = built(by_name)
    sites = [write.attention.site for write in discover(model).writes if write.attention is not None]
    seen: list[str] = []
    outer, inner = ([(site, lambda leaves, name=name: seen.append(name)) for site in sites] for name in ("out", "in"))

    def fail(leaves: list) -> None:
        raise ZeroDivisionError

    with tapped(model, outer):
        with pytest.raises(ZeroDivisionError), tapped(model, [*inner, (sites[1], fail)]):
            model(zoo.prompt(5, seed=1))
        assert seen == ["out", "in", "out", "in"] and F.scaled_dot_product_attention is not BUILTIN
        model(zoo.prompt(5, seed=1))
    assert seen[4:] == ["out"] * len(sites)
    assert F.scaled_dot_product_attention is BUILTIN and not STAND_IN.watching and not STAND_IN.users


def test_another_thread_and_another_model_go_straight_on() -> None:
    model, bystander = built(by_name), built(by_name)
    site = next(write.attention.site for write in discover(model).writes if write.attention is not None)
    ids = zoo.prompt(5, seed=1)
    expected, seen = bystander(ids).logits, []

    def run_the_other(leaves: list) -> None:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(lambda: bystander(ids).logits).result())
        seen.append(bystander(ids).logits)

    with tapped(model, [(site, run_the_other)]):
        model(ids)
    assert len(seen) == 2 and all(torch.equal(logits, expected) for logits in seen)


def test_what_somebody_else_put_there_stays_and_is_not_taken_for_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement may call torch's function with other arguments than the model calls it with."""

    def theirs(query: Tensor, *args: Tensor, **kwargs: bool) -> Tensor:
        return BUILTIN(2 * query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    model = built(by_name)
    made = account(model)
    assert not any(write.attention.site.by_name for write in made.anatomy.writes if write.attention is not None)
    assert not made.failures and "heads" in made.exact
    assert F.scaled_dot_product_attention is theirs


def test_what_somebody_puts_there_after_discovery_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, last = built(by_name), zoo.prompt(9, seed=1), torch.tensor([[8]])
    anatomy = discover(model)
    first = next(iter(capture(model, anatomy, ids, last).attention.values()))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *args, **more: BUILTIN(2 * q, *args, **more))
    doubled = next(iter(capture(model, anatomy, ids, last).attention.values()))
    assert first.query is not None and doubled.query is not None and torch.equal(2 * first.query, doubled.query)


def test_what_somebody_puts_there_while_taps_are_open_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = built(by_name), []
    site = next(write.attention.site for write in discover(model).writes if write.attention is not None)
    with tapped(model, [(site, lambda leaves: seen.append(leaves[0]))]):
        model(zoo.prompt(5, seed=1))
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", lambda q, *args, **more: BUILTIN(2 * q, *args, **more))
            model(zoo.prompt(5, seed=1))
    assert len(seen) == 2 and torch.equal(2 * seen[0], seen[1])


@pytest.mark.parametrize("way", ["by_name", "in_buffers", "changed_afterwards"])
@pytest.mark.parametrize("destinations", [[8], [3, 8]])
def test_what_is_kept_does_not_depend_on_inference_mode_or_gradients(way: str, destinations: list[int]) -> None:
    model, ids, last = built(WAYS[way]), zoo.prompt(9, seed=1), torch.tensor([destinations])
    anatomy = discover(model)
    expected = tensors(capture(model, anatomy, ids, last))
    runs, forward = [], model.forward
    with torch.inference_mode():
        runs.append(capture(model, anatomy, ids, last))
    modes = [torch.inference_mode()] + [torch.enable_grad()] * (way != "changed_afterwards")
    for mode in modes:  # a gradient cannot be had where the query is changed
        model.forward = mode(forward)
        runs.append(capture(model, anatomy, ids, last))
    for run in runs:
        assert not any(one.requires_grad or one.is_inference() for one in tensors(run))
        assert all(torch.equal(one, two) for one, two in zip(tensors(run), expected, strict=True))


def test_nothing_is_held_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until the garbage collector comes either."""
    monkeypatch.setattr(keeper, "ENOUGH", 1 << 20)
    model = built(by_name)
    anatomy = discover(model)
    made: list[weakref.ref] = []

    def note(module: nn.Module, args: tuple, output: Tensor) -> None:
        made.append(weakref.ref(output))

    def fail(module: nn.Module, args: tuple) -> None:
        raise ZeroDivisionError

    model.get_submodule("blocks.0.mlp").register_forward_hook(note)
    model.get_submodule("blocks.2.mlp").register_forward_pre_hook(fail)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            capture(model, anatomy, zoo.prompt(9, seed=1), torch.tensor([[8]]))
        del caught
        assert made and made[0]() is None
    finally:
        gc.enable()


def test_a_gradients_values_stay_as_they_were_though_the_model_changes_them() -> None:
    model, ids = built(changed_afterwards), zoo.prompt(9, seed=1)
    core = next(write.attention for write in discover(model).writes if write.attention is not None)
    site, values = core.argument_site("query"), {}
    assert site.overwritten
    with torch.no_grad(), tapped(model, [(site, _tap(site, None, values))]):
        model(ids)
    assert bool(values[site].abs().sum() > 0)


def test_what_a_tap_calls_is_not_counted() -> None:
    model = built(lambda query, *args: by_name(query + 0.0 * by_name(-query, *args), *args))
    second = next(write.attention.site for write in discover(model).writes if write.attention is not None)
    assert second.ordinal == 1 and second.by_name
    seen: list[Tensor] = []

    def look(leaves: list) -> None:
        F.scaled_dot_product_attention(*leaves[:3], enable_gqa=True)
        seen.append(leaves[0])

    with tapped(model, [(replace(second, ordinal=0), look), (second, look)]):
        model(zoo.prompt(5, seed=1))
    assert len(seen) == 2 and torch.equal(seen[0], -seen[1])


def test_other_modes_see_the_call_as_before() -> None:
    names: list[str] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__ if hasattr(func, "__name__") else "")
            return func(*args, **(kwargs or {}))

    model = built(by_name)
    site = next(write.attention.site for write in discover(model).writes if write.attention is not None)
    with Noting():
        model(zoo.prompt(5, seed=1))
        alone = list(names)
        names.clear()
        with tapped(model, [(site, lambda leaves: [*leaves[:2], leaves[2] * 1.0, *leaves[3:]])]):
            model(zoo.prompt(5, seed=1))
    assert names == alone
