"""Runs in which a model's own casts to narrower numbers do nothing: a float64 copy then computes in float64 throughout.

Stock modules compute norms and softmaxes in float32 whatever the model's dtype, so that a float64 copy is good to 1e-7
only. Inside `widened()` every cast of floating numbers, and every dtype that a function is asked for, is float64.
Limits: for float64 models alone; casts in compiled kernels are not seen, and of kernels without float64 only
grouped products have a stand-in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mainstem.model.function_taps import function_name
from mainstem.model.trees import map_leaves

CASTS = ("float", "half", "bfloat16")
GROUPED = ("grouped_mm", "_grouped_mm")


class _Widened(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function_name(func) in CASTS:
            func = torch.Tensor.double
        if function_name(func) in GROUPED:
            return _grouped(*args, **kwargs)
        return func(*map_leaves(_wide, args), **map_leaves(_wide, kwargs))


def _grouped(rows: Tensor, matrices: Tensor, offs: Tensor, **options: Any) -> Tensor:
    """Rows [token, d_in] times the matrix [expert, d_in, d_out] of their group; torch's kernel has no float64."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    parts = [part @ matrix for part, matrix in zip(rows.split(sizes), matrices, strict=True)]
    return torch.cat(parts) if options.get("bias") is None else torch.cat(parts) + options["bias"]


def _wide(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


@contextmanager
def widened() -> Iterator[None]:
    """Every cast of floating numbers inside gives float64."""
    own = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(own)
