"""Blocks that are alike, shown once: the same reads, writes and shapes, whatever the numbers in their norms.

A group's rows are those of its first block, with the block's own name and path taken off, and with the least and the
largest number over the whole group where blocks differ in numbers only.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mainstem.results.description import (
    AnatomyDescription,
    BlockRow,
    NormRow,
    ReadRow,
    ShapeRow,
    StepRow,
    StreamRow,
    WriteRow,
)


@dataclass(frozen=True)
class BlockGroup:
    """Blocks that are alike; `factors` holds for each write the coefficients over the group."""

    layers: list[int]
    paths: list[str]
    reads: list[ReadRow]
    writes: list[WriteRow]
    factors: list[list[float]]


def block_groups(anatomy: AnatomyDescription) -> list[BlockGroup]:
    """All blocks, in groups of alike ones, in the order of their first members."""
    found: dict[object, list[tuple[BlockRow, list[ReadRow], list[WriteRow]]]] = {}
    for block in anatomy.blocks:
        reads = [_local(read, block) for read in anatomy.reads if read.layer == block.layer]
        writes = [_local(write, block) for write in anatomy.writes if write.layer == block.layer]
        key = (tuple(map(_read_key, reads)), tuple(map(_write_key, writes)))
        found.setdefault(key, []).append((block, reads, writes))
    return [_group(members) for members in found.values()]


def shape_groups(shapes: Sequence[ShapeRow]) -> list[tuple[list[int], list[ShapeRow]]]:
    """The rows of a trace of shapes: those outside blocks by themselves, alike blocks together."""
    groups: list[tuple[list[int], list[ShapeRow]]] = []
    known: dict[object, int] = {}
    for layer, rows in _runs(shapes):
        if layer is None:
            groups.append(([], rows))
            continue
        local = [replace(row, unit=nameless(row.unit), tensor=nameless(row.tensor) or "", how=nameless(row.how) or "")
                 for row in rows]  # fmt: skip
        key = tuple((row.unit, row.tensor, row.how, tuple(row.axes), tuple(row.shape)) for row in local)
        if key in known:
            groups[known[key]][0].append(layer)
        else:
            known[key] = len(groups)
            groups.append(([layer], local))
    return groups


def stream_groups(anatomy: AnatomyDescription) -> list[tuple[list[str], StepRow, list[float]]]:
    """What happens to the stream itself, steps of one kind at one place of the blocks together, with their numbers."""
    found: dict[object, list[StreamRow]] = {}
    for row in anatomy.stream:
        found.setdefault((nameless(row.unit), _step_key(row.step)), []).append(row)
    groups = []
    for rows in found.values():
        factors = sorted(row.step.factor for row in rows if row.step.factor is not None)
        groups.append(([row.unit for row in rows], _wide_step([row.step for row in rows]), factors))
    return groups


def units_text(units: Sequence[str]) -> str:
    """L0.attn; L0.attn, L1.attn; L0.attn, L1.attn … L11.attn (12)."""
    return ", ".join(units) if len(units) <= 3 else f"{units[0]}, {units[1]} … {units[-1]} ({len(units)})"


def layers_text(layers: Sequence[int]) -> str:
    """L0 … L29; L0, L2, L4; L0 … L3, L8."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(
        f"L{run[0]}" if len(run) == 1 else f"L{run[0]}, L{run[1]}" if len(run) == 2 else f"L{run[0]} … L{run[-1]}"
        for run in runs
    )


def paths_text(paths: Sequence[str]) -> str:
    """layers.0 … layers.29, shortened to what the first and the last do not share."""
    distinct = list(dict.fromkeys(paths))
    if len(distinct) == 1:
        return distinct[0]
    return f"{distinct[0]} … {distinct[-1].rpartition('.')[2]}"


def nameless(text: str | None) -> str | None:
    """An address or a sentence with its block's number taken off: L5.attn becomes attn."""
    return None if text is None else re.sub(r"\bL\d+\.", "", text)


def _runs(shapes: Iterable[ShapeRow]) -> list[tuple[int | None, list[ShapeRow]]]:
    runs: list[tuple[int | None, list[ShapeRow]]] = []
    for row in shapes:
        if runs and runs[-1][0] == row.layer:
            runs[-1][1].append(row)
        else:
            runs.append((row.layer, [row]))
    return runs


def _local(row, block: BlockRow):
    return replace(row, unit=nameless(row.unit), module=row.module.removeprefix(f"{block.module}."))


def _read_key(read: ReadRow) -> object:
    return (read.unit, tuple(read.roles), read.module, tuple(read.matrix), read.bias, _norm_key(read.norm),
            tuple(map(_step_key, read.factors)), _norm_key(read.head_norm))  # fmt: skip


def _write_key(write: WriteRow) -> object:
    return (write.unit, write.module, str(write.matrix), write.bias, tuple(map(_step_key, write.tail)), write.heads,
            write.neurons, write.shared_expert, write.experts, tuple(write.refused.items()))  # fmt: skip


def _norm_key(norm: NormRow | None) -> object:
    return None if norm is None else (norm.kind, norm.eps, norm.gain is None, norm.bias)


def _step_key(step: StepRow) -> object:
    return (step.kind, _norm_key(step.norm), step.gate is not None, step.dimensions is not None)


def _group(members: list[tuple[BlockRow, list[ReadRow], list[WriteRow]]]) -> BlockGroup:
    blocks = [block for block, _, _ in members]
    reads = [_wide_read([own[i] for _, own, _ in members]) for i in range(len(members[0][1]))]
    writes = [_wide_write([own[i] for _, _, own in members]) for i in range(len(members[0][2]))]
    factors = [sorted(own[i].coefficient for _, _, own in members) for i in range(len(members[0][2]))]
    return BlockGroup([b.layer for b in blocks], [b.module for b in blocks], reads, writes, factors)


def _wide_read(rows: list[ReadRow]) -> ReadRow:
    norms = [row.norm for row in rows if row.norm is not None]
    heads = [row.head_norm for row in rows if row.head_norm is not None]
    factors = [_wide_step([row.factors[i] for row in rows]) for i in range(len(rows[0].factors))]
    return replace(rows[0], norm=_wide_norm(norms), head_norm=_wide_norm(heads), factors=factors)


def _wide_write(rows: list[WriteRow]) -> WriteRow:
    return replace(rows[0], tail=[_wide_step([row.tail[i] for row in rows]) for i in range(len(rows[0].tail))])


def _wide_step(steps: list[StepRow]) -> StepRow:
    norms = [step.norm for step in steps if step.norm is not None]
    return replace(steps[0], norm=_wide_norm(norms), dimensions=_wide(steps, lambda step: step.dimensions))


def _wide_norm(norms: list[NormRow]) -> NormRow | None:
    return replace(norms[0], gain=_wide(norms, lambda norm: norm.gain)) if norms else None


def _wide(rows: list, get: Callable[..., list[float] | None]) -> list[float] | None:
    """The least and the largest number over several ranges."""
    numbers = [number for row in rows for number in get(row) or []]
    return [min(numbers), max(numbers)] if numbers else None
