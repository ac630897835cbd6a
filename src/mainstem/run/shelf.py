"""Where copies are kept that outlive a run's own values, so that they do not break up the memory these leave behind.

A small tensor that stays in the middle of memory that was just freed leaves a hole in which the next value of the same
size has no room: with hundreds of them a run takes several times the memory that it holds. Here copies lie beside each
other in a few large blocks.
"""

import torch
from torch import Tensor

BLOCK = 1 << 24
"""Bytes of a block at most, unless one copy has more."""
ALIGNED = 64


class Shelf:
    """Blocks of memory, by device, each filled from its beginning.

    Args:
        many: how many copies of the size of a block's first one it has room for.
    """

    def __init__(self, many: int) -> None:
        self.many = max(many, 1)
        self._rest: dict[torch.device, Tensor] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        size = tensor.numel() * tensor.element_size()
        padded = -(-size // ALIGNED) * ALIGNED
        rest = self._rest.get(tensor.device)
        if rest is None or len(rest) < padded:
            block = max(padded, min(BLOCK, self.many * padded))
            rest = torch.empty(block, dtype=torch.uint8, device=tensor.device)
        self._rest[tensor.device] = rest[padded:]
        return rest[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
