"""Memory for copies that outlive a run, used again when nothing refers to them any more.

The C library hands memory back to the kernel when much of it becomes free, as when a captured run is dropped, and the
next run then pays for thousands of page faults: 3 to 6 % of a forward pass over 128 tokens. Blocks stay in the process.
"""

from weakref import finalize

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor


class Blocks:
    """Blocks of main memory.

    Args:
        most: bytes of blocks that are kept though nobody uses them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[int, list[np.ndarray]] = {}

    def take(self, size: int) -> UInt8[Tensor, " entry"]:
        """A block of `size` bytes, undefined; it is free again when the last tensor that shares its memory is gone."""
        try:
            memory = self._idle[size].pop()
        except LookupError:
            memory = np.empty(size, np.uint8)
        lent = memory[:]  # what the tensor's memory keeps alive, however that is shared
        finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, memory: np.ndarray) -> None:
        held = sum(size * len(idle) for size, idle in list(self._idle.items()))
        if held + memory.nbytes <= self.most:
            self._idle.setdefault(memory.nbytes, []).append(memory)


BLOCKS = Blocks(1 << 26)
"""Those of this process."""
