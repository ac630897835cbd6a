"""One forward pass as a graph of values and the calls that made them.

The recorder sees every torch function that the model calls (a `TorchFunctionMode`), which module call it happens in,
and which tensors it changes in place. A tensor that changes becomes a new `Value`, so that an operation's operands are
what the operation saw, not what the tensor holds afterwards. Aliases of a changed tensor are noticed by their version
counter and refreshed when they are next used.

Cost: all intermediate tensors of the run are kept while the `Recording` lives, so record few tokens. Limits: tensors
made out of torch's sight (custom kernels that bypass its function protocol) appear as constants.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from mainstem.model.function_taps import FUSED, STAND_IN, counted_by, function_name
from mainstem.model.hooks import around_call, watch_calls
from mainstem.model.outputs import logits_of
from mainstem.model.recording import Call, Frame, Recording, Value
from mainstem.model.trees import leaves_of, map_leaves


def _changes_in_place(name: str, kwargs: dict) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


class Recorder(TorchFunctionMode):
    """Records what happens while it is active; `inputs` are the tensors that make values active."""

    def __init__(self, model: torch.nn.Module, inputs: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.frames: list[Frame] = []
        self.frame: Frame | None = None
        self.calls: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.current: dict[int, tuple[Value, int]] = {}
        self.by_storage: dict[int, list[Value]] = defaultdict(list)
        self.last_change: dict[int, Value] = {}
        self.names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
        self.names |= {id(b): n for n, b in model.named_buffers(remove_duplicate=False)}
        for tensor in inputs or []:
            self.note(tensor, None, 0, active=True)

    def note(self, tensor: torch.Tensor, call: Call | None, slot: int, active: bool) -> Value:
        """A new value for what `tensor` holds now."""
        value = Value(len(self.values), tensor, tensor, call, slot, active, self.names.get(id(tensor)))
        self.values.append(value)
        self.current[id(tensor)] = (value, _version(tensor))
        self.by_storage[_storage(tensor)].append(value)
        return value

    def lookup(self, tensor: torch.Tensor) -> Value:
        """The value of `tensor` now; an alias whose storage was changed through another tensor is refreshed."""
        known = self.current.get(id(tensor))
        if known is None:
            return self.note(tensor, None, 0, active=False)
        value, version = known
        if version == _version(tensor):
            return value
        change = self.last_change.get(_storage(tensor))
        sources = (value,) if change is None else (value, change)
        call = Call("<alias>", None, sources, {}, self.frame, 0)
        fresh = self.note(tensor, call, 0, active=any(source.active for source in sources))
        call.outputs.append(fresh)
        return fresh

    def _protect(self, tensors: list[torch.Tensor]) -> None:
        """Before a call that may change tensors: keep what the values that share their storage hold."""
        for storage in {_storage(tensor) for tensor in tensors}:
            for value in self.by_storage[storage]:
                if value.tensor is value.holder and value.parameter is None:
                    value.tensor = value.holder.detach().clone()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = function_name(func)
        ordinals = self._count(counted_by(name, args))
        if name == FUSED and self.frame is not None:  # the stand-in counts none but those that are called by name
            self.frame.by_name &= STAND_IN.called()
        if any(is_functorch_wrapped_tensor(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        if leaves and _changes_in_place(name, kwargs):
            self._protect(leaves if kwargs.get("out") is not None else leaves[:1])
        operands = {id(leaf): self.lookup(leaf) for leaf in leaves}
        versions = {id(leaf): _version(leaf) for leaf in leaves}
        result = func(*args, **kwargs)
        results = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        changed = [leaf for leaf in leaves if _version(leaf) != versions[id(leaf)]]
        if not results and not changed:
            return result

        def swap(leaf):
            return operands[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

        by_name = name == FUSED and self.frame is not None and self.frame.by_name
        call = Call(name, func, map_leaves(swap, args), map_leaves(swap, kwargs), self.frame, ordinals, by_name)
        active = any(value.active for value in operands.values())
        self._register(call, leaves, changed, results, active)
        return result

    def _count(self, name: str) -> int:
        """Counts the call in the innermost module call; how many of its kind came before it there."""
        counts = self.calls if self.frame is None else self.frame.counts
        counts[name] += 1
        return counts[name] - 1

    def _register(self, call, leaves, changed, results, active) -> None:
        done: set[int] = set()
        for leaf in changed:
            if id(leaf) in done:
                continue
            done.add(id(leaf))
            for value in self.by_storage[_storage(leaf)]:
                value.overwritten = True
            slot = next(i for i, other in enumerate(leaves) if other is leaf)
            value = self.note(leaf, call, -1 - slot, active)
            self.last_change[_storage(leaf)] = value
            call.outputs.append(value)
        known = {id(leaf) for leaf in leaves}
        for slot, leaf in enumerate(results):
            if id(leaf) not in known:  # a function that returns its argument made nothing new
                call.outputs.append(self.note(leaf, call, slot, active))

    def enter(self, path: str, module: torch.nn.Module, inputs: Any) -> None:
        """A module call begins."""
        self.frame = Frame(path, self.entered[path], module, self.frame)
        self.entered[path] += 1
        self.frame.inputs = self._boundary(inputs)
        self.frames.append(self.frame)

    def leave(self, outputs: Any) -> None:
        """The innermost module call ends."""
        if self.frame is not None:
            self.frame.outputs = self._boundary(outputs)
            self.frame = self.frame.parent

    def _boundary(self, tree: Any) -> list[Value | None]:
        return [self.lookup(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves_of(tree)]

    def recording(self, result: Any) -> Recording:
        """What was recorded up to now."""
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        return Recording(self.values, self.frames, {id(t): self.lookup(t) for t in tensors}, result)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a tensor without storage (meta wrappers)
        return id(tensor)


def record(model: torch.nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> Recording:
    """Runs the model once on `input_ids` ([batch, pos]) without gradients or cache and records it.

    Errors of the model itself are raised unchanged; no hook is left behind.
    """
    recorder = Recorder(model, [input_ids])
    with torch.no_grad(), watch_calls(model, recorder.enter, recorder.leave), STAND_IN.needed(), recorder:
        result = model(input_ids=input_ids, **kwargs)
    return recorder.recording({"logits": logits_of(result)})


@contextmanager
def recorded_call(
    model: torch.nn.Module, path: str, call: int, done: Callable[[Recording, Frame], None]
) -> Iterator[None]:
    """In the runs inside, call number `call` of the module at `path` is recorded; `done` gets it and its own frame.

    Everything that the module reads counts as depending on the tokens.
    """
    open_now: list[tuple[Recorder, ExitStack]] = []

    def enter(inputs: Any) -> None:
        module = dict(model.named_modules())[path]
        tensors = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor)]
        recorder = Recorder(module, tensors)
        recorder.enter("", module, inputs)
        stack = ExitStack()
        for name, child in module.named_children():
            stack.enter_context(watch_calls(child, _prefixed(recorder.enter, name), recorder.leave))
        stack.enter_context(STAND_IN.needed())
        stack.enter_context(recorder)
        open_now.append((recorder, stack))

    def leave(outputs: Any) -> None:
        recorder, stack = open_now.pop()
        stack.close()
        if outputs is not None:
            frame = recorder.frame
            assert frame is not None
            recorder.leave(outputs)
            recording = recorder.recording({})
            done(recording, frame)
            recording.release()

    with around_call(model, path, call, enter, leave):
        try:
            yield
        finally:
            for _, stack in open_now:
                stack.close()


def _prefixed(enter: Callable[[str, torch.nn.Module, Any], None], prefix: str):
    return lambda path, module, inputs: enter(f"{prefix}.{path}".rstrip("."), module, inputs)
