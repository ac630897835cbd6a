"""A piece of a recorded run as a function: the calls between some values and another, to be run again on new inputs.

Anatomy asks what a piece does by running it on probes ("is this a norm?", "which element of the input is this?"), so
nothing needs to be known about the operations in it. Values that do not depend on the inputs stay what they were in
the recording. A program keeps only what it needs; the recording can be dropped.

Limits: shapes that the model's code wrote into views are those of the recording, so inputs must have its shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from mainstem.model.function_taps import function_name
from mainstem.model.recording import Call, Value
from mainstem.model.trees import leaves_of, map_leaves


@dataclass(frozen=True)
class Slot:
    """A place among a program's intermediate results."""

    id: int


HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Program:
    """Calls to run in order; `inputs` and `result` are ids of slots.

    Where the model computed in half precision (`half`) and the inputs given are wider, everything is computed wide:
    what an operation is shows in float32, where bfloat16 would hide all but its size.
    """

    inputs: tuple[int, ...]
    calls: tuple[tuple[Any, Any, Any, tuple[tuple[int, int], ...]], ...]
    result: int
    half: bool = False

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The result for these inputs, in the order of `inputs`."""
        if self.half and not any(tensor.dtype in HALF for tensor in tensors):
            return self._widened(*tensors)
        held: dict[int, torch.Tensor] = dict(zip(self.inputs, tensors, strict=True))

        def fetch(leaf):
            return held[leaf.id] if isinstance(leaf, Slot) else leaf

        for func, args, kwargs, outputs in self.calls:
            new_args, new_kwargs = map_leaves(fetch, args), map_leaves(fetch, kwargs)
            if any(slot < 0 for slot, _ in outputs):  # it changes an argument: let it change a copy
                new_args, new_kwargs = map_leaves(_copy, new_args), map_leaves(_copy, new_kwargs)
            result = func(*new_args, **new_kwargs)
            if len(outputs) == 1 and outputs[0][0] == 0 and isinstance(result, torch.Tensor):
                held[outputs[0][1]] = result
                continue
            leaves = leaves_of((new_args, new_kwargs))
            changed = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            results = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
            for slot, value_id in outputs:
                held[value_id] = changed[-1 - slot] if slot < 0 else results[slot]
        return held[self.result]

    @cached_property
    def _widened(self) -> "Program":
        calls = []
        for func, args, kwargs, outputs in self.calls:
            wide = torch.Tensor.float if function_name(func) in ("half", "bfloat16") else func
            calls.append((wide, map_leaves(_widen, args), map_leaves(_widen, kwargs), outputs))
        return Program(self.inputs, tuple(calls), self.result)

    @cached_property
    def in_float64(self) -> "Program":
        """The same with every floating number and tensor in float64, casts included; for float64 inputs."""
        calls = []
        for func, args, kwargs, outputs in self.calls:
            wide = torch.Tensor.double if function_name(func) in ("half", "bfloat16", "float") else func
            calls.append((wide, map_leaves(_to_float64, args), map_leaves(_to_float64, kwargs), outputs))
        return Program(self.inputs, tuple(calls), self.result)


def _to_float64(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.double() if leaf.is_floating_point() else leaf
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _widen(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.float() if leaf.dtype in HALF else leaf
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALF else leaf


def probe_like(value: Value, seed: int, size: float = 1.0) -> torch.Tensor:
    """Random numbers to run a program on in place of `value`, in float32 where that is of half precision."""
    tensor = value.tensor
    probe = normal(tuple(tensor.shape), seed) * size
    return probe.to(dtype=probe_dtype(tensor.dtype), device=tensor.device)


@lru_cache(maxsize=256)
def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal numbers, the same for the same shape and seed; not to be changed in place."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float = 0.0) -> bool:
    """What `torch.allclose` says, for numbers that are finite, at a third of its cost."""
    return bool(((a - b).abs() <= rtol * b.abs() + atol).all())


def zeros_like(value: Value) -> torch.Tensor:
    """Zeros to run a program on in place of `value`, in float32 where that is of half precision."""
    return torch.zeros_like(value.tensor, dtype=probe_dtype(value.tensor.dtype))


def probe_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to probe what the model computes in `dtype`."""
    return torch.float32 if dtype in HALF else dtype


StandIn = Callable[[Call], tuple[Value, Callable[[torch.Tensor], torch.Tensor]] | None]


def dependents(result: Value, inputs: Sequence[Value]) -> list[Value]:
    """The values on a path from `inputs` to `result`, inputs excluded, in the order in which they were made."""
    oldest = min((value.id for value in inputs), default=result.id)
    ids = {value.id for value in inputs}
    reached: dict[int, Value] = {}
    pending = [result]
    while pending:
        value = pending.pop()
        if value.id in reached or value.id in ids or value.id < oldest or value.call is None:
            continue
        reached[value.id] = value
        pending.extend(value.call.operands())
    on_path: dict[int, Value] = {}
    for value in sorted(reached.values(), key=lambda v: v.id):
        if any(
            operand.id in ids or operand.id in on_path
            for operand in (value.call.operands() if value.call is not None else ())
        ):
            on_path[value.id] = value
    return list(on_path.values())


def extract(result: Value, inputs: Sequence[Value], stand_in: StandIn | None = None) -> Program | None:
    """The program from `inputs` to `result`; None where an alias of a changed tensor cannot be replayed.

    `stand_in` may give, for a call, one of its operands and a function of it to run in the call's place.
    """
    path = dependents(result, inputs)
    live = {value.id for value in inputs} | {value.id for value in path}
    calls: dict[int, tuple[Call, list[tuple[int, int]]]] = {}
    for value in path:
        if value.call is None or value.call.func is None:
            return None
        calls.setdefault(id(value.call), (value.call, []))[1].append((value.slot, value.id))

    def freeze(leaf):
        if not isinstance(leaf, Value):
            return leaf
        return Slot(leaf.id) if leaf.id in live else leaf.tensor

    steps = []
    for call, outputs in calls.values():
        other = stand_in(call) if stand_in is not None else None
        if other is not None:
            steps.append((other[1], (freeze(other[0]),), {}, tuple(outputs)))
            continue
        args, kwargs = map_leaves(freeze, call.args), map_leaves(freeze, call.kwargs)
        steps.append((call.func, args, kwargs, tuple(outputs)))
    half = any(value.tensor.dtype in HALF for value in (*inputs, *path))
    return Program(tuple(value.id for value in inputs), tuple(steps), result.id, half)


def one_call(result: Value, inputs: Sequence[Value]) -> Program | None:
    """The program of `result`'s own call alone, as a function of `inputs` among its operands."""
    call = result.call
    if call is None or call.func is None:
        return None
    ids = {value.id for value in inputs}

    def freeze(leaf):
        if not isinstance(leaf, Value):
            return leaf
        return Slot(leaf.id) if leaf.id in ids else leaf.tensor

    args, kwargs = map_leaves(freeze, call.args), map_leaves(freeze, call.kwargs)
    step = (call.func, args, kwargs, ((result.slot, result.id),))
    half = any(value.tensor.dtype in HALF for value in (*inputs, result))
    return Program(tuple(value.id for value in inputs), (step,), result.id, half)


def argument_slot(call: Call, value: Value) -> int:
    """Which leaf of the call's arguments is `value`."""
    return next(i for i, leaf in enumerate(leaves_of((call.args, call.kwargs))) if leaf is value)
