"""Where copies are kept that outlive a run's own values, so that they do not break up the memory these leave behind.

A small tensor that stays in the middle of memory that was just freed leaves a hole in which the next value of the same
size has no room: with hundreds of them a run takes several times the memory that it holds. Here copies lie beside each
other in a few large blocks.
"""

import torch
from torch import Tensor


class Shelf:
    """Blocks of memory, by dtype and device, each filled from its beginning.

    Args:
        many: how many copies of the size of a block's first one it has room for.
        most: bytes of a block at most, unless one copy has more.
    """

    def __init__(self, many: int, most: int) -> None:
        self.many, self.most = max(many, 1), most
        self._blocks: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        key, size = (tensor.dtype, tensor.device), tensor.numel()
        block, used = self._blocks.get(key, (None, 0))
        if block is None or used + size > len(block):
            room = max(size, min(self.most // tensor.element_size(), self.many * size))
            block, used = torch.empty(room, dtype=tensor.dtype, device=tensor.device), 0
        self._blocks[key] = block, used + size
        return block[used : used + size].view(tensor.shape).copy_(tensor)
