"""A piece of a recorded run as a function: the calls between some values and another, to be run again on new inputs.

Anatomy asks what a piece does by running it on probes ("is this a norm?", "which element of the input is this?"), so
nothing needs to be known about the operations in it. Values that do not depend on the inputs stay what they were in
the recording. A program keeps only what it needs; the recording can be dropped.

Limits: shapes that the model's code wrote into views are those of the recording, so inputs must have its shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from mainstem.model.recorder import Call, Value


@dataclass(frozen=True)
class Slot:
    """A place among a program's intermediate results."""

    id: int


@dataclass(frozen=True)
class Program:
    """Calls to run in order; `inputs` and `result` are ids of slots."""

    inputs: tuple[int, ...]
    calls: tuple[tuple[Any, Any, Any, tuple[tuple[int, int], ...]], ...]
    result: int

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        held: dict[int, torch.Tensor] = dict(zip(self.inputs, tensors, strict=True))

        def fetch(leaf):
            return held[leaf.id] if isinstance(leaf, Slot) else leaf

        for func, args, kwargs, outputs in self.calls:
            new_args, new_kwargs = tree_map(fetch, (args, kwargs))
            if any(slot < 0 for slot, _ in outputs):  # it changes an argument: let it change a copy
                new_args, new_kwargs = tree_map(_copy, (new_args, new_kwargs))
            result = func(*new_args, **new_kwargs)
            leaves = tree_leaves((new_args, new_kwargs))
            changed = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for slot, value_id in outputs:
                held[value_id] = changed[-1 - slot] if slot < 0 else results[slot]
        return held[self.result]


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


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
        if any(operand.id in ids or operand.id in on_path for operand in value.call.operands()):
            on_path[value.id] = value
    return list(on_path.values())


def extract(result: Value, inputs: Sequence[Value]) -> Program | None:
    """The program from `inputs` to `result`; None where an alias of a changed tensor cannot be replayed."""
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
        args, kwargs = tree_map(freeze, (call.args, call.kwargs))
        steps.append((call.func, args, kwargs, tuple(outputs)))
    return Program(tuple(value.id for value in inputs), tuple(steps), result.id)


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

    args, kwargs = tree_map(freeze, (call.args, call.kwargs))
    step = (call.func, args, kwargs, ((result.slot, result.id),))
    return Program(tuple(value.id for value in inputs), (step,), result.id)


def argument_slot(call: Call, value: Value) -> int:
    """Which leaf of the call's arguments is `value`."""
    leaves, _ = tree_flatten((call.args, call.kwargs))
    return next(i for i, leaf in enumerate(leaves) if leaf is value)
