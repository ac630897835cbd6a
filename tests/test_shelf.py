"""Copies that lie beside each other: the numbers of what was put there, and nothing of each other's."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from mainstem.run.blocks import Blocks
from mainstem.run.shelf import FIRST, Shelf


@pytest.mark.parametrize("most", [0, FIRST, 1 << 22])
@pytest.mark.parametrize("rows", [1, 1 << 10, 1 << 15])
def test_copies_have_their_own_numbers_whatever_the_block(rows: int, most: int) -> None:
    own, originals, copies = Shelf(most), [], []
    for number, dtype in enumerate([torch.float32, torch.bool, torch.float64, torch.bfloat16, torch.int64] * 3):
        count = rows * (number + 1)
        original = torch.arange(7 * count).remainder(5).to(dtype).reshape(count, 7).T[::2]
        originals.append(original.clone())
        copies.append(own.put(original))
        original.zero_()  # a copy is no view
    for original, copy in zip(originals, copies, strict=True):
        assert copy.dtype == original.dtype and copy.is_contiguous() and torch.equal(copy, original)
    copies[3].fill_(1)
    assert all(torch.equal(copies[i], originals[i]) for i in range(len(copies)) if i != 3)


def test_many_copies_share_a_block_and_an_empty_one_needs_none() -> None:
    own = Shelf()
    made = [own.put(torch.full((3, 5), float(i))) for i in range(10)]
    assert len({one.untyped_storage().data_ptr() for one in made}) == 1
    assert own.put(torch.empty(0, 5)).shape == (0, 5)
    assert float(own.put(torch.tensor(2.5))) == 2.5


def test_blocks_grow_and_what_has_more_than_half_of_the_largest_lies_alone() -> None:
    own, most = Shelf(4 * FIRST), 4 * FIRST
    sizes = [own.put(torch.zeros(FIRST // 8)).untyped_storage().nbytes() for _ in range(60)]
    assert sizes == sorted(sizes) and set(sizes) == {FIRST, 2 * FIRST, most}
    assert own.put(torch.zeros(most // 4)).untyped_storage().nbytes() == most
    before = own.put(torch.zeros(1)).untyped_storage().data_ptr()
    assert own.put(torch.zeros(most // 8 + 1)).untyped_storage().nbytes() == most // 2 + 4
    assert own.put(torch.zeros(1)).untyped_storage().data_ptr() == before


def test_rows_that_are_joined_lie_one_after_the_other_and_are_no_views() -> None:
    own = Shelf()
    for _ in range(3):
        rows = [torch.arange(5.0)[None], torch.empty(1, 0), torch.arange(40.0).reshape(1, 8, 5)[:, :, 1]]
        joined, sizes = own.join(rows)
        expected = torch.cat(rows, 1)
        rows[0].zero_()
        assert torch.equal(joined, expected[None]) and sizes == [5, 0, 8]


def lasting(block: Tensor) -> list[object]:
    """What shares a block's memory."""
    return [block[3:5], block.detach(), block.data, block.view(torch.int16), block.numpy(), block.untyped_storage()]


@pytest.mark.parametrize("way", range(6))
def test_a_block_is_used_again_when_nothing_shares_its_memory_and_not_before(way: int) -> None:
    blocks = Blocks(1 << 10)
    block = blocks.take(64)
    place, held = block.data_ptr(), lasting(block)[way]
    del block
    gc.collect()
    other = blocks.take(64)
    assert other.data_ptr() != place
    assert not blocks._idle
    del held
    gc.collect()
    assert [one.ctypes.data for one in blocks._idle[64]] != []
    places = {one.data_ptr() for one in [blocks.take(64), blocks.take(64)]}
    assert place in places and len(places) == 2


def test_what_a_gradient_needs_is_not_written_over() -> None:
    blocks, weight = Blocks(1 << 10), torch.ones(8, requires_grad=True)
    block = blocks.take(64).view(torch.float64).fill_(3.0)
    product = (weight * block).sum()
    del block
    blocks.take(64).fill_(0)
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 8


def test_no_more_than_asked_is_kept() -> None:
    blocks = Blocks(100)
    taken = [blocks.take(40) for _ in range(5)]
    places = {block.data_ptr() for block in taken}
    del taken
    assert len(blocks._idle[40]) == 2
    again = [blocks.take(40) for _ in range(2)]
    assert {block.data_ptr() for block in again} <= places
    assert not any(blocks._idle.values())


def test_threads_do_not_get_the_same_block() -> None:
    blocks = Blocks(1 << 20)

    def work(mine: int) -> bool:
        for _ in range(300):
            held = [blocks.take(1 << 10).fill_(mine) for _ in range(3)]
            if any(np.any(one.numpy() != mine) for one in held):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
