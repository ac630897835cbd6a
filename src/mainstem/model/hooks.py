"""The only module that registers hooks: what watches or edits a running model is acquired and released here.

Three things are needed of a running model: to know in which module call an operation happens (`watch_calls`, for the
recorder), to compute something in another way (`replaced_calls`, `replaced_functions`), and to see or replace a value
at a `Site` (`tapped`, for everything else). A site is found once, by the anatomy; afterwards a run costs a plain hook
where the value crosses a module's boundary, and where it does not, what `function_taps` does inside that module's
call. Nothing is returned by a hook unless a value is replaced, so a tapped run computes the same bits as an untapped
one.

Limits: a module that is compiled or exported shows its boundary only.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import count
from typing import Any, Literal

import torch

from mainstem.model.function_taps import STAND_IN, FunctionTaps, Replacement, Tap, apply, opened


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
        by_name: whether the function is called through its name in `torch.nn.functional`, and can be stood in for.
    """

    path: str
    call: int
    where: Literal["input", "output", "arguments", "result", "call"]
    slot: int = 0
    function: str = ""
    ordinal: int = 0
    overwritten: bool = False
    positions_first: bool = False
    by_name: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        inside = f" of {self.function}#{self.ordinal}" if self.function else ""
        return f"{self.path or '<model>'} call {self.call}: {self.where} {self.slot}{inside}"


class _ModuleTaps:
    """All taps of one module, whoever asked for them: its hooks, and what its calls open to see functions.

    There is one at a time for a module, so that a value goes through taps in the order in which they were asked for,
    also where the contexts are nested.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.users = 0
        self.calls = 0
        self.open: list[tuple[int, list[Callable[[], None]]]] = []
        self.inputs: dict[int, list[Tap]] = {}
        self.outputs: dict[int, list[Tap]] = {}
        self.inside: dict[int, dict[tuple[str, str, int], list[Any]]] = {}
        self.by_name: dict[int, bool] = {}
        self.handles: list[Any] = []
        self.watches_before = self.watches_after = False

    def taps_at(self, site: Site) -> list[Any]:
        """The list of the taps at a site of this module."""
        if not self.watches_before and site.where != "output":
            self.watches_before = True
            self.handles.append(self.module.register_forward_pre_hook(self.before, with_kwargs=True))
        if not self.watches_after and site.where != "input":
            self.watches_after = True
            self.handles.append(self.module.register_forward_hook(self.after, always_call=True))
        if site.function:
            self.by_name[site.call] = site.by_name and self.by_name.get(site.call, True)
            inside = self.inside.setdefault(site.call, {})
            return inside.setdefault((site.where, site.function, site.ordinal), [])
        return (self.inputs if site.where == "input" else self.outputs).setdefault(site.call, [])

    def restart(self) -> None:
        """A new forward pass begins: calls count from 0."""
        if self.open:
            self.close_functions()
        self.calls = 0

    def close(self) -> None:
        """Removes every hook."""
        self.close_functions()
        for handle in self.handles:
            handle.remove()

    def close_functions(self) -> None:
        """Closes what calls that died between their two hooks had opened."""
        while self.open:
            for close in reversed(self.open.pop()[1]):
                close()

    def before(self, module, args, kwargs):
        call, self.calls = self.calls, self.calls + 1
        functions: list[Callable[[], None]] = []
        if self.watches_after:
            self.open.append((call, functions))
        taps = self.inputs.get(call)
        new = apply(taps, (args, kwargs)) if taps else None
        inside = self.inside.get(call)
        if inside and any(inside.values()):  # only now, because a tap may end the run
            functions.append(opened(FunctionTaps(module, inside), self.by_name[call]))
        return new

    def after(self, module, args, output):
        if not self.watches_before:
            call, self.calls = self.calls, self.calls + 1
        elif self.open:
            call, functions = self.open.pop()
            for close in reversed(functions):
                close()
        else:  # the call never got past another hook
            return None
        taps = self.outputs.get(call)
        return apply(taps, output) if taps and output is not None else None


_tapped: dict[int, _ModuleTaps] = {}
"""The taps there are now, by the identity of their modules."""


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

    Cost: one hook for each module whose inputs or outputs are named by a site, a pair where both are, or a function.
    """
    modules = {"": model}
    handlers: dict[str, _ModuleTaps] = {}
    added: list[tuple[_ModuleTaps, list[Any], Any]] = []
    with ExitStack() as stack:
        stack.callback(_remove, added)
        for site, tap in taps:
            handler = handlers.get(site.path)
            if handler is None:
                handler = handlers[site.path] = _handler_of(_module_at(site.path, modules))
            taps_there = handler.taps_at(site)
            taps_there.append(tap)
            handler.users += 1
            added.append((handler, taps_there, tap))

        def restart(module, args, kwargs) -> None:
            for handler in handlers.values():
                handler.restart()
            if begin is not None:
                begin(args, kwargs)

        if handlers:  # before the model's own taps, so that its first call is counted
            handle = model.register_forward_pre_hook(restart, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        if any(site.by_name for site, _ in taps):
            stack.enter_context(STAND_IN.needed())
        yield


def _module_at(path: str, known: dict[str, torch.nn.Module]) -> torch.nn.Module:
    """`get_submodule` with a memory: `known` holds the model under "", and what has been found before."""
    if path not in known:
        owner, _, name = path.rpartition(".")
        known[path] = getattr(_module_at(owner, known), name)
    return known[path]


def _remove(added: list[tuple[_ModuleTaps, list[Any], Any]]) -> None:
    """Takes taps away, and the hooks of modules that nobody taps any more."""
    for handler, taps_there, tap in reversed(added):
        taps_there.remove(tap)
        handler.users -= 1
        if not handler.users:
            handler.close()
            _tapped.pop(id(handler.module), None)


def _handler_of(module: torch.nn.Module) -> _ModuleTaps:
    """One module's taps; its hooks are shared with other contexts that are open."""
    handler = _tapped.get(id(module))
    if handler is None:
        handler = _tapped[id(module)] = _ModuleTaps(module)
    return handler


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
