"""Copies that lie beside each other: the numbers of what was put there, and nothing of each other's."""

import pytest
import torch

from mainstem.run.shelf import Shelf


@pytest.mark.parametrize(("most", "many"), [(64, 4), (1 << 10, 4), (1 << 24, 4), (1 << 10, None)])
def test_copies_have_their_own_numbers_whatever_the_block(most: int, many: int | None) -> None:
    own, originals, copies = Shelf(most, many), [], []
    for number, dtype in enumerate([torch.float32, torch.bool, torch.float64, torch.bfloat16, torch.int64] * 3):
        original = torch.arange(7 * (number + 1)).remainder(5).to(dtype).reshape(number + 1, 7).T[::2]
        originals.append(original.clone())
        copies.append(own.put(original))
        original.zero_()  # a copy is no view
    for original, copy in zip(originals, copies, strict=True):
        assert copy.dtype == original.dtype and copy.is_contiguous() and torch.equal(copy, original)
    copies[3].fill_(1)
    assert all(torch.equal(copies[i], originals[i]) for i in range(len(copies)) if i != 3)


def test_many_copies_share_a_block_and_an_empty_one_needs_none() -> None:
    own = Shelf(1 << 10, many=10)
    made = [own.put(torch.full((3, 5), float(i))) for i in range(10)]
    assert len({one.untyped_storage().data_ptr() for one in made}) == 1
    assert own.put(torch.empty(0, 5)).shape == (0, 5)
    assert float(own.put(torch.tensor(2.5))) == 2.5


def test_rows_that_are_joined_lie_one_after_the_other_and_are_no_views() -> None:
    own = Shelf(1 << 6)
    for _ in range(3):
        rows = [torch.arange(5.0), torch.empty(0), torch.arange(40.0).reshape(8, 5)[:, 1]]
        joined = own.join(rows, sum(row.numel() for row in rows))
        expected = torch.cat(rows)
        rows[0].zero_()
        assert torch.equal(joined, expected)
