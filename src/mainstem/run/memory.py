"""How many bytes of tensors a run holds at once, counted as they are made and freed.

Resident memory moves by pages and by what other work frees; tensors are counted exactly. What a kernel takes inside
itself and gives back is not seen. Cost: some microseconds for each operation.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mainstem.model.trees import leaves_of


class LiveBytes(TorchDispatchMode):
    """While active: `live` is the number of bytes of tensors made inside and still held, `peak` the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in leaves_of((args, kwargs or {})) if isinstance(leaf, Tensor)}
        for leaf in leaves_of(result):
            if isinstance(leaf, Tensor):
                key = _storage(leaf)
                if key in self._holders or key not in given:
                    self._hold(leaf, key)
        self.peak = max(self.peak, self.live)
        return result

    def _hold(self, tensor: Tensor, key: int) -> None:
        size = tensor.untyped_storage().nbytes()
        if key not in self._holders:
            self._holders[key] = 0
            self.live += size
        self._holders[key] += 1
        weakref.finalize(tensor, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        if key not in self._holders:
            return
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= size

    def kept(self, tensor: Tensor) -> Tensor:
        """A tensor that is kept on purpose, and no longer counts."""
        if self._holders.pop(_storage(tensor), 0):
            self.live -= tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
