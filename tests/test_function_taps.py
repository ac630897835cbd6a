"""Fused attention seen by standing in its place: where it is called by its name, and nowhere else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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

from mainstem.model.discovery import discover
from mainstem.model.function_taps import STAND_IN
from mainstem.model.hooks import tapped
from mainstem.run.capture import capture

BUILTIN = scaled_dot_product_attention


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


@pytest.mark.parametrize("attend", [by_name, imported, InBuffers()], ids=["by_name", "imported", "in_buffers"])
def test_the_account_is_exact_however_attention_is_called(attend: Callable[..., Tensor]) -> None:
    made = account(built(attend))
    assert not made.failures and {"heads", "subvalues", "attention_neurons"} <= made.exact


def test_what_is_kept_is_the_same_whichever_way_leads_to_it() -> None:
    ids, last = zoo.prompt(9, seed=1), torch.tensor([[8]])
    ways = {"name": by_name, "import": imported, "buffer": InBuffers()}
    runs, sites = {}, {}
    for way, attend in ways.items():
        model = built(attend)
        anatomy = discover(model)
        runs[way] = list(capture(model, anatomy, ids, last).attention.values())
        sites[way] = [write.attention.site for write in anatomy.writes if write.attention is not None]
    assert [all(site.by_name for site in sites[way]) for way in ways] == [True, False, True]
    assert not any(site.by_name for site in sites["import"])
    for other in ("import", "buffer"):
        for one, two in zip(runs["name"], runs[other], strict=True):
            for field in ("query", "key", "value", "mask"):
                assert torch.equal(getattr(one, field), getattr(two, field)), (other, field)


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
