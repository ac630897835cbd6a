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
        most: bytes of a block at most, unless one copy has more.
        many: how many copies of the size of a block's first one it has room for at most.
    """

    def __init__(self, most: int, many: int | None = None) -> None:
        self.most, self.many = most, many
        self._blocks: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        return self._room(tensor, tensor.numel()).view(tensor.shape).copy_(tensor)

    def join(self, rows: list[Tensor], size: int) -> Tensor:
        """A copy of one-dimensional tensors of one dtype and device, one after the other; `size` is what they have."""
        return torch.cat(rows, out=self._room(rows[0], size))

    def _room(self, like: Tensor, size: int) -> Tensor:
        """The next `size` entries for values of the dtype and device of `like`."""
        key = (like.dtype, like.device)
        block, used = self._blocks.get(key, (None, 0))
        if block is None or used + size > block.numel():
            most = self.most // like.element_size()
            room = max(size, most if self.many is None else min(most, self.many * size))
            block, used = torch.empty(room, dtype=like.dtype, device=like.device), 0
        self._blocks[key] = block, used + size
        return block[used : used + size]
