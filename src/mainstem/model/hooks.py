"""The only module that registers hooks: what watches or edits a running model is acquired and released here.

Three things are needed of a running model: to know in which module call an operation happens (`watch_calls`, for the
recorder), to compute something in another way (`replaced_calls`, `replaced_functions`), and to see or replace a value
at a `Site` (`tapped`, for everything else). A site is found once, by the anatomy; afterwards a run costs a plain hook
where the value crosses a module's boundary, and a `TorchFunctionMode` that is active only inside that module's call
where it does not. Nothing is returned by a hook unless a value is replaced, so a tapped run computes the same bits as
an untapped one.

Limits: a module that is compiled or exported shows its boundary only.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from mainstem.model.trees import leaves_of, map_leaves


@dataclass(frozen=True)
class Site:
    """Where a value can be seen in a run.

    Attributes:
        path: the module whose call holds the value, as `named_modules` names it.
        call: which call of that module in one forward pass, counted from 0.
        where: "input" or "output" of the module, or "arguments" or "result" of a function called inside it, or "call":
            the function's own work (see `replaced_functions`).
        slot: which leaf of the inputs, outputs, arguments or results.
        function: the function (see `counted_by`), for "arguments" and "result".
        ordinal: which call of that function inside the module's call, calls in nested modules not counted (how many
            those make may depend on the tokens, as where experts are chosen).
        overwritten: whether the model changes the tensor in place later, so that a copy must be kept.
        positions_first: whether the value's axes are position, batch, ... instead of batch, position, ...
    """

    path: str
    call: int
    where: Literal["input", "output", "arguments", "result", "call"]
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


def _apply(taps: list[Tap], tree: Any) -> Any | None:
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


def _instead(new: Replacement, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunction():  # as in _apply
        return new(func, args, kwargs)


_CALL = torch.nn.Module._call_impl.__code__


def _innermost_module() -> torch.nn.Module | None:
    """The module in whose call the code that asks runs; None outside of any."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class _FunctionTaps(TorchFunctionMode):
    """Counts the functions called inside one module call and shows the tapped ones."""

    def __init__(self, owner: "_ModuleTaps", taps: Mapping[tuple[str, str, int], list[Any]]) -> None:
        super().__init__()
        self.owner = owner
        self.taps = taps
        self.names = {name for _, name, _ in taps}
        self.functions = {name.split(" ", 1)[0] for name in self.names}
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = function_name(func)
        if name not in self.functions or _innermost_module() is not self.owner.module:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
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
        instead = self.taps.get(("call", name, ordinal))
        result = _instead(instead[-1], func, args, kwargs) if instead else func(*args, **kwargs)
        after = self.taps.get(("result", name, ordinal))
        if after:
            new = _apply(after, result)
            if new is not None:
                result = new
        return result


class _ModuleTaps:
    """All taps of one module, whoever asked for them: its hooks, and the function mode that its calls switch on.

    There is one at a time for a module, so that a value goes through taps in the order in which they were asked for,
    also where the contexts are nested.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.users = 0
        self.calls = 0
        self.open: list[tuple[int, _FunctionTaps | None]] = []
        self.boundary: dict[tuple[str, int], list[Tap]] = defaultdict(list)
        self.inside: dict[int, dict[tuple[str, str, int], list[Any]]] = defaultdict(lambda: defaultdict(list))
        self.handles: list[Any] = [module.register_forward_hook(self.after, always_call=True)]
        self.watches_before = False

    def taps_at(self, site: Site) -> list[Any]:
        """The list of the taps at a site of this module."""
        if not self.watches_before and (site.function or site.where == "input"):
            self.watches_before = True
            self.handles.append(self.module.register_forward_pre_hook(self.before, with_kwargs=True))
        if not site.function:
            return self.boundary[(site.where, site.call)]
        return self.inside[site.call][(site.where, site.function, site.ordinal)]

    def restart(self) -> None:
        """A new forward pass begins: calls count from 0."""
        self.close_modes()
        self.calls = 0

    def close(self) -> None:
        """Removes every hook."""
        self.close_modes()
        for handle in self.handles:
            handle.remove()

    def close_modes(self) -> None:
        """Leaves the modes of calls that died between their two hooks."""
        while self.open:
            _, mode = self.open.pop()
            if mode is not None:
                mode.__exit__(None, None, None)

    def before(self, module, args, kwargs):
        call, self.calls = self.calls, self.calls + 1
        inside = {key: taps for key, taps in self.inside[call].items() if taps} if call in self.inside else None
        self.open.append((call, None))
        taps = self.boundary.get(("input", call))
        new = _apply(taps, (args, kwargs)) if taps else None
        if inside:
            mode = _FunctionTaps(self, inside)
            self.open[-1] = call, mode  # not before, because a tap may end the run, and only what was entered is left
            mode.__enter__()
        return new

    def after(self, module, args, output):
        if not self.watches_before:
            call, self.calls = self.calls, self.calls + 1
        elif self.open:
            call, mode = self.open.pop()
            if mode is not None:
                mode.__exit__(None, None, None)
        else:  # the call never got past another hook
            return None
        taps = self.boundary.get(("output", call))
        return _apply(taps, output) if taps and output is not None else None


_tapped: "WeakKeyDictionary[torch.nn.Module, _ModuleTaps]" = WeakKeyDictionary()
"""The modules that have taps now."""


@contextmanager
def tapped(
    model: torch.nn.Module, taps: Sequence[tuple[Site, Any]], begin: Callable[[tuple, dict], None] | None = None
) -> Iterator[None]:
    """Runs inside see every tap fire at its site; on leaving, also after an error, no hook is left behind.

    Taps of an outer context fire before those of an inner one. Calls of modules and functions are counted within one
    forward pass of `model`, so a context may hold many passes.

    Args:
        model: the module that is run.
        taps: what to show or replace, and where.
        begin: is called with the arguments of each forward pass before it runs.

    Cost: one hook pair for each module named by a site.
    """
    modules = dict(model.named_modules())
    by_path: dict[str, list[tuple[Site, Any]]] = defaultdict(list)
    for site, tap in taps:
        by_path[site.path].append((site, tap))
    added: list[tuple[_ModuleTaps, list[Any], Any]] = []
    handles: list[Any] = []
    try:
        for path, own in by_path.items():
            handler = _handler_of(modules[path])
            for site, tap in own:
                taps_there = handler.taps_at(site)
                taps_there.append(tap)
                handler.users += 1
                added.append((handler, taps_there, tap))
        handlers = list(dict.fromkeys(handler for handler, _, _ in added))

        def restart(module, args, kwargs) -> None:
            for handler in handlers:
                handler.restart()
            if begin is not None:
                begin(args, kwargs)

        if handlers:  # before the model's own taps, so that its first call is counted
            handles.append(model.register_forward_pre_hook(restart, with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for handler, taps_there, tap in reversed(added):
            taps_there.remove(tap)
            handler.users -= 1
            if not handler.users:
                handler.close()
                _tapped.pop(handler.module, None)


def _handler_of(module: torch.nn.Module) -> _ModuleTaps:
    """One module's taps; its hooks are shared with other contexts that are open."""
    if module not in _tapped:
        _tapped[module] = _ModuleTaps(module)
    return _tapped[module]


def replaced_functions(
    model: torch.nn.Module, replacements: Mapping[Site, Replacement]
) -> AbstractContextManager[None]:
    """In all forward passes inside, some functions are replaced where the model calls them.

    What `tapped` says of several passes and of leaving holds here too; of nested contexts the inner one replaces.

    Args:
        model: the module that is run.
        replacements: by the site of one of the function's arguments, or of its result.
    """
    return tapped(model, [(replace(site, where="call", slot=0), new) for site, new in replacements.items()])


@contextmanager
def around_call(
    model: torch.nn.Module, path: str, call: int, enter: Callable[[Any], None], leave: Callable[[Any], None]
) -> Iterator[None]:
    """Calls `enter(inputs)` before and `leave(outputs)` after call number `call` of one module; None: it failed.

    Calls are counted within one forward pass of `model`.
    """
    module = dict(model.named_modules())[path]
    running: list[bool] = []
    calls = Counter[str]()

    def restart(module, args) -> None:
        calls.clear()

    def before(module, args, kwargs):
        running.append(calls[path] == call)
        calls[path] += 1
        if running[-1]:
            enter((args, kwargs))

    def after(module, args, output):
        if running and running.pop():
            leave(output)

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        # Before the taps of other contexts: the module's own output, in whose place they may put another.
        stack.callback(module.register_forward_hook(after, always_call=True, prepend=True).remove)
        stack.callback(model.register_forward_pre_hook(restart, prepend=True).remove)
        yield


@contextmanager
def replaced_calls(model: torch.nn.Module, replacements: Mapping[tuple[str, int], Replacement]) -> Iterator[None]:
    """In the one forward pass inside, some calls are replaced, by a module's path and the number of its call.

    Hooks of the module itself still run, those of modules inside it only where they are called. On leaving, also after
    an error, every module has its own `forward` back.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for path in dict.fromkeys(path for path, _ in replacements):
            own = {call: new for (owner, call), new in replacements.items() if owner == path}
            stack.enter_context(_replacing(modules[path], own))
        yield


@contextmanager
def _replacing(module: torch.nn.Module, replacements: Mapping[int, Replacement]) -> Iterator[None]:
    own = vars(module).get("forward")  # where something else has replaced the class's forward already
    computed, calls = module.forward, count()

    @wraps(computed)
    def forward(*args, **kwargs):
        new = replacements.get(next(calls))
        return computed(*args, **kwargs) if new is None else new(computed, args, kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


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
