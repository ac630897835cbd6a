"""How the axes of a tensor are made of batch, heads and positions.

Layouts are einops patterns found by trial: the few ways in which the axes of attention's operands can be composed of
batch b, heads h (or key/value groups k times g) and destinations t are enumerated, and the one is kept under which
every element is where the model's own views put it.

The recording has batch 1 and a number of positions that divides no size of the model, so an axis that holds positions
cannot be mistaken for another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Self

import torch
from einops import rearrange
from torch import Tensor

from mainstem.errors import RunError
from mainstem.model.hooks import Site


def layouts(shape: tuple[int, ...], sizes: dict[str, int]) -> Iterator[str]:
    """Patterns for axes of `shape` composed of the atoms of `sizes` in any order; batch (size 1) comes first."""
    atoms = [name for name in sizes if name != "b"]
    for order in permutations(atoms):
        pattern = _compose(shape, list(order), sizes)
        if pattern is not None:
            yield pattern


def _compose(shape: tuple[int, ...], order: list[str], sizes: dict[str, int]) -> str | None:
    """One pattern with the atoms in this order, or None if the axes' sizes do not allow it."""
    axes: list[list[str]] = []
    rest = list(order)
    for size in shape:
        axis: list[str] = []
        product = 1
        if size == 1 and [] in axes and rest and sizes[rest[0]] == 1:
            axis.append(rest.pop(0))  # a single head; the first axis of size 1 is the batch
        while product < size and rest:
            axis.append(rest.pop(0))
            product *= sizes[axis[-1]]
        if product != size:
            return None
        axes.append(axis)
    while rest and sizes[rest[0]] == 1 and axes:
        unused = [axis for axis in axes if not axis][1:]
        (unused or axes[-1:])[0].append(rest.pop(0))
    if rest:
        return None
    free = next((i for i, axis in enumerate(axes) if not axis), None)
    if free is None:
        axes[0].insert(0, "b")
    else:
        axes[free] = ["b"]
    return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in axes)


def fit_output_layout(result: Tensor, index: Tensor, sizes: dict[str, int]) -> tuple[str, Tensor] | None:
    """The layout of an attention product's result, and where its elements are in what W_O reads.

    Args:
        result: the product's result; its last axis is the coordinate j of a head's value.
        index: [positions, width] for each element of W_O's input the flat index in `result` that it is.
        sizes: sizes of "t" and of "h", or of "k" and "g".

    Returns:
        The layout of the leading axes, and [n_heads, d_head] channels of W_O's input; or None.
    """
    width = result.shape[-1]
    heads = "h" if "h" in sizes else "(k g)"
    flat = torch.arange(result.numel()).reshape(result.shape)
    for layout in layouts(tuple(result.shape[:-1]), sizes):
        inner = {k: v for k, v in sizes.items() if k in layout}
        inner.pop("b", None)
        ordered = rearrange(flat, f"{layout} j -> (b t) ({heads.strip('()')} j)", b=1, **inner)
        channels = _columns(ordered, index)
        if channels is not None:
            return layout, channels.reshape(-1, width)
    return None


def _columns(ordered: Tensor, index: Tensor) -> Tensor | None:
    """For each column of `ordered` the column of `index` that equals it at every position."""
    if ordered.shape != index.shape:
        return None
    place = {int(value): column for column, value in enumerate(index[0].tolist())}
    columns = [place.get(int(value), -1) for value in ordered[0].tolist()]
    if min(columns) < 0:
        return None
    found = torch.tensor(columns)
    return found if torch.equal(index[:, found], ordered) else None


def repeats(heads: Tensor) -> int:
    """How many neighbouring entries of axis 1 ([batch, heads, ...]) are equal copies of one key/value head."""
    count = heads.shape[1]
    for group in sorted((g for g in range(2, count + 1) if count % g == 0), reverse=True):
        split = heads.unflatten(1, (count // group, group))
        if torch.equal(split, split[:, :, :1].expand_as(split)):
            return group
    return 1


def by_token(tensor: Tensor, site: Site, batch: int, positions: int) -> Tensor:
    """What is at a site as [batch, positions, rest], expanded where the model computes it once for all rows."""
    shape = tensor.shape
    if len(shape) == 3 and shape[0] == batch and shape[1] == positions and not site.positions_first:
        return tensor
    if site.positions_first and tensor.shape[:2] == (positions, batch):
        tensor = tensor.transpose(0, 1)
    if batch > 1 and (tensor.shape[0] == 1 or tensor.shape[:-1] == (positions,)):
        return tensor.reshape(1, positions, -1).expand(batch, -1, -1)
    return tensor.reshape(batch, positions, -1)


@dataclass(frozen=True)
class PositionAxis:
    """Where a value has its positions: `index` of the axis, and the axes that had one entry in the recording.

    The recording's batch is 1, so its axis is one of `single`; the others of them have one entry in every run.
    """

    index: int
    single: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], index: int) -> Self:
        """Of a value of this shape in the recording."""
        return cls(index, tuple(axis for axis, size in enumerate(shape) if size == 1))


def by_position(tensor: Tensor, axis: PositionAxis, batch: int, positions: int) -> Tensor:
    """A run's tensor as [batch, positions, rest], where `axis` held the positions in the recording.

    Raises:
        RunError: if the rows of the batch are not on an axis of their own, nor joined with the positions.
    """
    if tensor.shape[axis.index] == positions and batch > 1:
        rows = [single for single in axis.single if tensor.shape[single] == batch]
        if rows:
            return tensor.movedim((rows[0], axis.index), (0, 1)).reshape(batch, positions, -1)
    moved = tensor.movedim(axis.index, 0)
    if batch == 1 or moved.shape[0] == batch * positions:
        return moved.reshape(batch, positions, -1)
    raise RunError(
        f"The {batch} prompts of a batch are not told apart in a value of shape {list(tensor.shape)}",
        None,
        "Run the prompts one at a time.",
    )
