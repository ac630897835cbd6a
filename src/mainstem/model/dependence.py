"""What a write depends on: which stream values, through which calls, and whether across positions.

Limits: what a piece does to positions is seen on the recorded prompt, by changing the stream at one position.
"""

from typing import Any

import torch

from mainstem.model.program import extract
from mainstem.model.recording import Call, Value


def stream_inputs(leaf: Value, known: set[int]) -> tuple[list[Value], list[Call]]:
    """The stream values that a write was computed from, and the calls in between, latest first."""
    found: dict[int, Value] = {}
    seen: dict[int, Value] = {}
    pending = [leaf]
    while pending:
        value = pending.pop()
        if value.id in seen or value.id in found:
            continue
        if value.id in known:
            found[value.id] = value
        else:
            seen[value.id] = value
            if value.call is not None:
                pending.extend(value.call.operands())
    calls = {id(v.call): v.call for _, v in sorted(seen.items(), reverse=True) if v.call is not None and v.active}
    return [found[i] for i in sorted(found)], list(calls.values())


def by_position_alone(leaf: Value, inputs: list[Value], positions: int) -> bool:
    """Whether a change of the stream at one position changes the write there alone.

    Products that are applied row by row cannot mix positions, and are the only part that costs: they are replaced by
    something cheap that changes the same rows.
    """
    program = extract(leaf, inputs, stand_in=_row_by_row)
    if program is None:
        return False
    try:
        before = program(*[value.tensor for value in inputs]).reshape(positions, -1)
        changed = []
        for value in inputs:
            tensor = value.tensor.clone().reshape(positions, -1)
            tensor[1] = _nudged(tensor[1])
            changed.append(tensor.reshape(value.shape))
        after = program(*changed).reshape(positions, -1)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    moved = (before.double() - after.double()).abs().amax(-1)
    others = torch.arange(positions, device=moved.device) != 1
    return bool(moved[1] > 0) and bool(moved[others].max() <= 1e-3 * moved[1])


ROW_BY_ROW = frozenset(["linear", "matmul", "__matmul__", "mm", "addmm"])


def _row_by_row(call: Call) -> tuple[Value, Any] | None:
    """For a product of rows with one matrix: its activations, and a cheap function that changes the same rows."""
    active = call.active_operands()
    if call.name not in ROW_BY_ROW or len(active) != 1 or len(call.outputs) != 1:
        return None
    source, result = active[0].tensor, call.outputs[0].tensor
    plain = all(o.tensor.dim() <= 2 for o in call.operands() if not o.active)
    if not plain or source.shape[:-1] != result.shape[:-1] or call.outputs[0].slot != 0:
        return None

    def cheap(x: torch.Tensor) -> torch.Tensor:
        changed = (x != source.to(x)).any(-1, keepdim=True)
        return torch.where(changed, _nudged(result), result).to(result.dtype if x.dtype == source.dtype else x.dtype)

    return active[0], cheap


def _nudged(rows: torch.Tensor) -> torch.Tensor:
    """Rows changed by a little, but by enough to be seen in their dtype: little, so that routing stays what it was."""
    return rows + max(1e-3, 8 * torch.finfo(rows.dtype).eps) * rows.roll(1, -1)
