"""Where copies are kept that outlive a run's own values, so that they do not break up the memory these leave behind.

A small tensor that stays in the middle of memory that was just freed leaves a hole in which the next value of the same
size has no room: with hundreds of them a run takes several times the memory that it holds. Here copies lie beside each
other in a few large blocks.
"""

import torch
from torch import Tensor

from mainstem.run.blocks import BLOCKS

FIRST = 1 << 18
"""Bytes of a first block."""


class Shelf:
    """Blocks of memory, by dtype and device, each filled from its beginning; in main memory they are used again.

    Args:
        most: bytes of a block at most; each block is twice as large as the one before until then. What has more than
            half of it lies alone, in memory that is not used again.
    """

    def __init__(self, most: int = FIRST) -> None:
        self.most = most
        self._blocks: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        return self._room(tensor, tensor.numel()).view(tensor.shape).copy_(tensor)

    def join(self, rows: list[Tensor]) -> tuple[Tensor, list[int]]:
        """[1, 1, entry]: a copy of [1, n] tensors of one dtype and device one after the other; and what each n is."""
        sizes = [row.shape[1] for row in rows]
        room = self._room(rows[0], sum(sizes))
        torch.cat(rows, 1, out=room.view(1, -1))
        return room.view(1, 1, -1), sizes

    def _room(self, like: Tensor, size: int) -> Tensor:
        """The next `size` entries for values of the dtype and device of `like`."""
        key, bytes_needed = (like.dtype, like.device), size * like.element_size()
        if bytes_needed > self.most // 2:
            return torch.empty(size, dtype=like.dtype, device=like.device)
        block, used = self._blocks.get(key, (None, 0))
        if block is None or used + size > block.numel():
            room = FIRST if block is None else min(self.most, 2 * block.nbytes)
            while room < bytes_needed:
                room *= 2
            in_main_memory = like.device.type == "cpu"
            memory = BLOCKS.take(room) if in_main_memory else torch.empty(room, dtype=torch.uint8, device=like.device)
            block, used = memory.view(like.dtype), 0
        self._blocks[key] = block, used + size
        return block[used : used + size]
