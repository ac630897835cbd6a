"""What is shown or replaced of the functions that are called inside one module call.

Two ways lead to a function: a `TorchFunctionMode` sees every function that the module call makes, and something that
stands in the place of torch's fused attention is called where that is looked up in `torch.nn.functional` by its name.
The second costs nothing for the other functions, of which an attention module calls some forty; a recording tells
whether it is enough (`Site.by_name`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from threading import RLock, local
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mainstem.model.trees import leaves_of, map_leaves

FUSED = "scaled_dot_product_attention"
"""The function of `torch.nn.functional` in whose place something can stand."""

Tap = Callable[[list[Any]], list[Any] | None]
"""Receives the leaves of what is at the site; returns None to look on, or the leaves to put in their place."""

Replacement = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]
"""What a call returns instead, from what would compute it and its inputs; new memory, for models change it in place."""


def function_name(func: Any) -> str:
    """One name for a torch function, method or property getter."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def counted_by(name: str, args: tuple) -> str:
    """What a call is counted by: its function, and the equation of a contraction.

    A contraction that a run adds, for a mask, then does not shift the count of another.
    """
    return f"{name} {args[0]}" if args and isinstance(args[0], str) else name


def apply(taps: list[Tap], tree: Any) -> Any | None:
    """Shows the leaves of `tree` to every tap; the rebuilt tree if one of them replaced a leaf, else None."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else leaves_of(tree)
    replaced = False
    with torch._C.DisableTorchFunction():  # what taps compute is not what the model computes, and is not counted
        for tap in taps:
            new = tap(leaves)
            if new is not None:
                leaves, replaced = new, True
    if not replaced:
        return None
    fresh = iter(leaves)
    return map_leaves(lambda old: next(fresh), tree)


_CALL = torch.nn.Module._call_impl.__code__


def _innermost_module() -> torch.nn.Module | None:
    """The module in whose call the code that asks runs; None outside of any."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class FunctionTaps:
    """The taps inside one module call: counts the calls of their functions and shows or replaces them.

    Args:
        module: the module; only calls that it makes itself are counted, not those of nested modules.
        taps: by where they look ("arguments", "result", "call"), what the function is counted by, and which call.
    """

    def __init__(self, module: torch.nn.Module, taps: Mapping[tuple[str, str, int], list[Any]]) -> None:
        self.module, self.taps = module, taps
        self.names = {name for (_, name, _), there in taps.items() if there}
        self.counts = dict.fromkeys(self.names, 0)

    def call(self, name: str, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the model's call of a function returns."""
        ordinal = self.counts[name]
        self.counts[name] += 1
        before = self.taps.get(("arguments", name, ordinal))
        if before:
            new = apply(before, (args, kwargs))
            if new is not None:
                args, kwargs = new
        instead = self.taps.get(("call", name, ordinal))
        if instead:
            with torch._C.DisableTorchFunction():  # as in apply
                result = instead[-1](func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        after = self.taps.get(("result", name, ordinal))
        if after:
            new = apply(after, result)
            if new is not None:
                result = new
        return result


class FunctionMode(TorchFunctionMode):
    """Sees every function while it is active."""

    def __init__(self, taps: FunctionTaps) -> None:
        super().__init__()
        self.taps = taps
        self.functions = {name.split(" ", 1)[0] for name in taps.names}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = function_name(func)
        if name not in self.functions or _innermost_module() is not self.taps.module:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        name = counted_by(name, args)
        return self.taps.call(name, func, args, kwargs) if name in self.taps.names else func(*args, **kwargs)


class _StandIn:
    """What stands in the place of torch's fused attention while somebody needs it, and shows its calls.

    It is there for all threads; a call that nobody watches goes straight on.
    """

    def __init__(self) -> None:
        self.lock, self.users = RLock(), 0
        self.original: Any = None
        self.function: Any = None
        self.watching: list[FunctionTaps] = []
        self.here = local()

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Inside, it stands there."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self._take_place()
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users and getattr(torch.nn.functional, FUSED) is self.function:
                    setattr(torch.nn.functional, FUSED, self.original)

    def _take_place(self) -> None:
        self.original = original = getattr(torch.nn.functional, FUSED)

        @wraps(original)
        def function(*args, **kwargs):
            return self.call(original, args, kwargs)

        self.function = function
        setattr(torch.nn.functional, FUSED, function)

    def call(self, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the function by its name."""
        if torch._C._is_torch_function_all_disabled():  # a tap calls it
            return original(*args, **kwargs)
        self.here.called = self.for_torchs_own()
        try:
            module = _innermost_module() if self.watching else None
            for taps in self.watching[::-1]:
                if taps.module is module:
                    return taps.call(FUSED, original, args, kwargs)
            return original(*args, **kwargs)
        finally:
            self.here.called = False

    def for_torchs_own(self) -> bool:
        """Whether models call it, and it calls torch's own function: other people's may call otherwise."""
        there = getattr(torch.nn.functional, FUSED)
        return there is self.function and isinstance(self.original, BuiltinFunctionType)

    def called(self) -> bool:
        """Whether a call of the function that is under way was made by its name."""
        return getattr(self.here, "called", False)


STAND_IN = _StandIn()


def opened(taps: FunctionTaps, by_name: bool) -> Callable[[], None]:
    """Lets taps see their functions from now on; what is returned ends that.

    Args:
        taps: the taps of one module call.
        by_name: whether all of them are of functions that are called by their name (`Site.by_name`).
    """
    if by_name and STAND_IN.for_torchs_own():
        STAND_IN.watching.append(taps)
        return lambda: STAND_IN.watching.remove(taps)
    mode = FunctionMode(taps)
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)
