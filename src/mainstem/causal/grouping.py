"""Which runs become rows of one batch, where each begins at its own block and position.

A batch begins where the earliest of its rows does, so rows that begin later compute some positions for nothing, and,
where they cannot come late, some blocks; in small batches each call's own cost (reading the weights) is spent on few
rows. Runs are put on a plane of (first block, first position), which is cut into equal tiles; of a few tile sizes the
one is taken that a simple account finds cheapest:

    cost of a batch = blocks computed x CALL_TOKENS + the sum over its rows of blocks x positions computed
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

CALL_TOKENS = 32
"""What calling a block costs besides its tokens, in tokens: as measured on the default model, 8 ms and 0.23 ms a token.
Only the sizes of batches depend on it."""


@dataclass(frozen=True, order=True)
class Start:
    """The first block and the first position that a run computes."""

    position: int
    block: int


@dataclass(frozen=True)
class Batch:
    """Runs, by number, that are rows of one batch, in the order of their first blocks, and where it begins."""

    start: Start
    runs: tuple[int, ...]


def batches(
    starts: Mapping[int, Start], blocks: int, positions: int, largest: int, resumes: bool, by_suffix: bool, late: bool
) -> list[Batch]:
    """Every run once, in batches of at most `largest` rows, those that begin at one position together.

    Args:
        starts: where each run may begin.
        blocks: how many the model has.
        positions: how many the prompt has.
        largest: the most rows of a batch.
        resumes: whether runs can begin at a later block.
        by_suffix: whether they can begin at a later position.
        late: whether a row can begin at a later block than its batch.
    """
    usable = {
        run: Start(start.position if by_suffix else 0, start.block if resumes else 0) for run, start in starts.items()
    }
    sizes = [(deep, wide) for deep in _sizes(blocks) for wide in _sizes(positions)]
    made = [_tiled(usable, deep, wide, largest) for deep, wide in sizes]

    def cost(batch: Batch) -> int:
        first, length = batch.start.block, positions - batch.start.position
        begins = [first, *(usable[run].block if late else first for run in batch.runs)]  # with one unchanged row
        return (blocks + 1 - first) * CALL_TOKENS + length * sum(blocks + 1 - begin for begin in begins)

    return min(made, key=lambda tiles: sum(cost(batch) for batch in tiles))


def _sizes(count: int) -> Iterator[int]:
    size = 1
    while size < count:
        yield size
        size = size * 3 // 2 if size > 1 else 2
    yield count + 1


def _tiled(starts: Mapping[int, Start], deep: int, wide: int, largest: int) -> list[Batch]:
    tiles: dict[tuple[int, int], list[int]] = defaultdict(list)
    for run, start in sorted(starts.items(), key=lambda item: (item[1].block, item[1].position)):
        tiles[start.position // wide, start.block // deep].append(run)
    return [
        Batch(_earliest([starts[run] for run in chunk]), tuple(chunk))
        for _, runs in sorted(tiles.items())
        for chunk in (runs[i : i + largest] for i in range(0, len(runs), largest))
    ]


def _earliest(starts: Sequence[Start]) -> Start:
    return Start(min(start.position for start in starts), min(start.block for start in starts))
