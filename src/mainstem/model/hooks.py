"""The only module that registers hooks: what watches or edits a running model is acquired and released here.

Two things are needed of a running model: to know in which module call an operation happens (`watch_calls`, for the
recorder), and to see or replace a value at a `Site` (`tapped`, for everything else). A site is found once, by the
anatomy; afterwards a run costs a plain hook where the value crosses a module's boundary, and a `TorchFunctionMode`
that is active only inside that module's call where it does not. Nothing is returned by a hook unless a value is
replaced, so a tapped run computes the same bits as an untapped one.

Limits: a module that is compiled or exported shows its boundary only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from mainstem.model.trees import leaves_of, map_leaves


@dataclass(frozen=True)
class Site:
    """Where a value can be seen in a run.

    Attributes:
        path: the module whose call holds the value, as `named_modules` names it.
        call: which call of that module in one forward pass, counted from 0.
        where: "input" or "output" of the module, or "arguments" or "result" of a function called inside it.
        slot: which leaf of the inputs, outputs, arguments or results.
        function: the function (see `counted_by`), for "arguments" and "result".
        ordinal: which call of that function inside the module's call, calls in nested modules not counted (how many
            those make may depend on the tokens, as where experts are chosen).
        overwritten: whether the model changes the tensor in place later, so that a copy must be kept.
        positions_first: whether the value's axes are position, batch, ... instead of batch, position, ...
    """

    path: str
    call: int
    where: Literal["input", "output", "arguments", "result"]
    slot: int = 0
    function: str = ""
    ordinal: int = 0
    overwritten: bool = False
    positions_first: bool = False

    def __str__(self) -> str:
        inside = f" of {self.function}#{self.ordinal}" if self.function else ""
        return f"{self.path or '<model>'} call {self.call}: {self.where} {self.slot}{inside}"


Tap = Callable[[list[Any]], list[Any] | None]
"""Receives the leaves of what is at the site; returns None to look on, or the leaves to put in their place."""


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


def _apply(taps: list[Tap], tree: Any) -> Any | None:
    """Shows the leaves of `tree` to every tap; the rebuilt tree if one of them replaced a leaf, else None."""
    leaves = leaves_of(tree)
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


class _FunctionTaps(TorchFunctionMode):
    """Counts the functions called inside one module call and shows the tapped ones."""

    def __init__(self, owner: "_ModuleTaps", taps: Mapping[tuple[str, str, int], list[Tap]]) -> None:
        super().__init__()
        self.owner = owner
        self.taps = taps
        self.names = {name for _, name, _ in taps}
        self.functions = {name.split(" ", 1)[0] for name in self.names}
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function_name(func) if not self.owner.nested else ""
        if name not in self.functions:
            return func(*args, **kwargs)
        name = counted_by(name, args)
        if name not in self.names:
            return func(*args, **kwargs)
        ordinal = self.counts[name]
        self.counts[name] += 1
        before = self.taps.get(("arguments", name, ordinal))
        if before:
            new = _apply(before, (args, kwargs))
            if new is not None:
                args, kwargs = new
        result = func(*args, **kwargs)
        after = self.taps.get(("result", name, ordinal))
        if after:
            new = _apply(after, result)
            if new is not None:
                result = new
        return result


class _ModuleTaps:
    """The taps of one module: its hooks, and the function mode that its calls switch on."""

    def __init__(self, taps: list[tuple[Site, Tap]]) -> None:
        self.calls = 0
        self.nested = 0
        self.open: list[tuple[int, _FunctionTaps | None]] = []
        self.boundary: dict[tuple[str, int], list[Tap]] = defaultdict(list)
        self.inside: dict[int, dict[tuple[str, str, int], list[Tap]]] = defaultdict(lambda: defaultdict(list))
        for site, tap in taps:
            if site.function:
                self.inside[site.call][(site.where, site.function, site.ordinal)].append(tap)
            else:
                self.boundary[(site.where, site.call)].append(tap)

    def before(self, module, args, kwargs):
        call, self.calls = self.calls, self.calls + 1
        mode = _FunctionTaps(self, self.inside[call]) if call in self.inside else None
        self.open.append((call, mode))
        taps = self.boundary.get(("input", call))
        new = _apply(taps, (args, kwargs)) if taps else None
        if mode is not None:
            mode.__enter__()
        return new

    def enter_nested(self, module, args) -> None:
        self.nested += 1

    def leave_nested(self, module, args, output) -> None:
        self.nested = max(0, self.nested - 1)

    def after(self, module, args, output):
        if not self.open:  # the call never got past another hook
            return None
        call, mode = self.open.pop()
        if mode is not None:
            mode.__exit__(None, None, None)
        taps = self.boundary.get(("output", call))
        return _apply(taps, output) if taps and output is not None else None


@contextmanager
def tapped(model: torch.nn.Module, taps: list[tuple[Site, Tap]]) -> Iterator[None]:
    """Runs inside see every tap fire at its site; on leaving, also after an error, no hook is left behind.

    Cost: one hook pair for each module named by a site.
    """
    modules = dict(model.named_modules())
    by_module: dict[str, list[tuple[Site, Tap]]] = defaultdict(list)
    for site, tap in taps:
        by_module[site.path].append((site, tap))
    with ExitStack() as stack:
        for path, own in by_module.items():
            handler = _ModuleTaps(own)
            module = modules[path]
            stack.callback(_close_modes, handler)
            stack.callback(module.register_forward_pre_hook(handler.before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(handler.after, always_call=True).remove)
            for inner in module.modules() if handler.inside else ():
                if inner is not module:
                    stack.callback(inner.register_forward_pre_hook(handler.enter_nested).remove)
                    stack.callback(inner.register_forward_hook(handler.leave_nested, always_call=True).remove)
        yield


def _close_modes(handler: _ModuleTaps) -> None:
    while handler.open:  # a run that died between the two hooks
        _, mode = handler.open.pop()
        if mode is not None:
            mode.__exit__(None, None, None)


@contextmanager
def around_call(
    model: torch.nn.Module, path: str, call: int, enter: Callable[[Any], None], leave: Callable[[Any], None]
) -> Iterator[None]:
    """Calls `enter(inputs)` before and `leave(outputs)` after call number `call` of one module; None: it failed."""
    module = dict(model.named_modules())[path]
    count = iter(range(1 << 62))
    running: list[bool] = []

    def before(module, args, kwargs):
        running.append(next(count) == call)
        if running[-1]:
            enter((args, kwargs))

    def after(module, args, output):
        if running and running.pop():
            leave(output)

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def watch_calls(
    model: torch.nn.Module,
    enter: Callable[[str, torch.nn.Module, Any], None],
    leave: Callable[[Any], None],
) -> Iterator[None]:
    """Calls `enter(path, module, inputs)` and `leave(outputs)` around every module call of the runs inside."""
    with ExitStack() as stack:
        for path, module in model.named_modules():

            def before(module, args, kwargs, path=path):
                enter(path, module, (args, kwargs))

            def after(module, args, output):
                leave(output)

            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield
