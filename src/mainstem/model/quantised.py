"""Products whose weights are quantised, so that a refusal can say so and name the module.

Weights that are stored small and multiplied out before the product (whole numbers times their scales, packed or not)
are no trouble: the recorder sees the matrix that they make. A kernel that multiplies whole numbers, or takes its
weights packed, shows none, and often rounds what it reads, so that it is not even linear.
"""

from collections.abc import Container

import torch

from mainstem.model.recording import Call, Value
from mainstem.model.trees import leaves_of


def quantised_reason(value: Value | None, until: Container[int] = ()) -> str | None:
    """Which module behind a value multiplies by quantised weights, as the reason of a refusal; None if none is seen.

    Args:
        value: where the walk back begins.
        until: numbers of values that are not gone behind.
    """
    pending, seen = [value] if value is not None else [], set()
    while pending:
        current = pending.pop(0)
        call = current.call
        if current.id in seen or current.id in until or call is None:
            continue
        seen.add(current.id)
        if _is_quantised(call):
            where = (call.frame.path if call.frame is not None else "") or call.name
            return f"{where} multiplies by quantised weights and shows no matrix; dequantise the model first"
        pending.extend(call.active_operands())
    return None


def _is_quantised(call: Call) -> bool:
    """Whether packed weights, or a matrix of whole numbers, meet something that depends on the tokens."""
    leaves = leaves_of((call.args, call.kwargs))
    if not call.active_operands():
        return False
    return any(isinstance(leaf, torch.ScriptObject) for leaf in leaves) or any(
        not operand.active and operand.tensor.dim() >= 2 and _is_whole(operand.tensor) for operand in call.operands()
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_quantized or not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
