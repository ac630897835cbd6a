"""What one call of a block returned, for any number of rows and from any position on.

Which axes hold rows and positions is seen, not assumed: a second run has two rows of one token, and the axes whose
sizes follow are those. What is handed out is new memory each time, since models change it in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainstem.model.trees import leaves_of, map_leaves

PLAIN = (type(None), bool, int, float, str)
"""What a block may return besides tensors and be skipped all the same."""


@dataclass(frozen=True, eq=False)
class BlockOutput:
    """What a call returned, and for each of its tensors the axes of rows and of positions."""

    tree: Any
    axes: tuple[tuple[int | None, int | None], ...]

    def rows(self, batch: int, position: int) -> Any:
        """The same for `batch` rows, from a position on."""
        axes = iter(self.axes)

        def expanded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            rows, positions = next(axes)
            if positions is not None:
                leaf = leaf.narrow(positions, position, leaf.shape[positions] - position)
            if rows is not None:
                leaf = leaf.expand(*(batch if i == rows else size for i, size in enumerate(leaf.shape)))
            return leaf.clone()

        return map_leaves(expanded, self.tree)

    def first_rows(self, inputs: Any, batch: int, rows: int) -> Any:
        """The first rows of a call's inputs: of each tensor that has as many as the batch on the output's axis."""
        axis = next(axis for axis, _ in self.axes if axis is not None)

        def first(leaf: Any) -> Any:
            whole = not isinstance(leaf, Tensor) or leaf.dim() <= axis or leaf.shape[axis] != batch
            return leaf if whole else leaf.narrow(axis, 0, rows)

        return map_leaves(first, inputs)

    def joined(self, computed: Any, batch: int, position: int) -> Any:
        """What was computed for the first rows, and for the others the same as ever."""
        axes, recorded = iter(self.axes), iter(leaves_of(self.tree))

        def join(leaf: Any) -> Any:
            known = next(recorded)
            if not isinstance(leaf, Tensor):
                return leaf
            rows, positions = next(axes)
            if rows is None:
                return leaf
            if positions is not None:
                known = known.narrow(positions, position, known.shape[positions] - position)
            left = batch - leaf.shape[rows]
            return torch.cat([leaf, known.expand(*(left if i == rows else n for i, n in enumerate(known.shape)))], rows)

        return map_leaves(join, computed)


def block_output(tree: Any, small: Any, length: int) -> BlockOutput:
    """The axes of an output by its shapes in a run of one row of `length` tokens, and in one of two rows of one.

    Of two axes of positions, as a pattern has them, the first is that of the positions that are computed.
    """
    axes = []
    for leaf, other in zip(leaves_of(tree), leaves_of(small), strict=True):
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, PLAIN):
                raise TypeError(f"a block returns a {type(leaf).__name__}")
            continue
        sizes = list(zip(leaf.shape, other.shape, strict=True))
        rows = [i for i, pair in enumerate(sizes) if pair == (1, 2)]
        places = [i for i, pair in enumerate(sizes) if pair == (length, 1) and length > 1]
        if len(rows) > 1 or any(a != b for i, (a, b) in enumerate(sizes) if i not in rows + places):
            shown = f"{tuple(leaf.shape)} for one row and {tuple(other.shape)} for two rows of one token"
            raise ValueError(f"a block returns {shown}")
        axes.append((rows[0] if rows else None, places[0] if places else None))
    return BlockOutput(tree, tuple(axes))
