"""What attention receives or computes for single heads, changed: the head's result is computed again.

The kernel computes all heads at once, and heads may share keys and values. So the taps look at what it receives, make
the changes for each head that has any, compute that head's pattern (in float32 at least) and result, and put the rows
of the result that differ in the place of the kernel's. All other heads, and rows before the first change, keep the
kernel's bits. Edits of one head are made in the order: query, key, value, pattern.

Positions of queries and patterns are destinations; those of keys and values are sources, earlier passes included.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.changes import New, Pass, Places
from mainstem.model.anatomy import AttentionCore
from mainstem.model.hooks import Site, Tap
from mainstem.model.views import heads_first, pattern_rows, query_rows, result_rows
from mainstem.points import HeadKind


@dataclass(frozen=True, eq=False)
class HeadChange:
    """What becomes of one head's query, key, value or pattern; `source`: of one column of the pattern alone."""

    core: AttentionCore
    head: int
    what: HeadKind
    new: New
    positions: Places = None
    row: int | None = None
    source: int | None = None


@dataclass(eq=False)
class Operands:
    """What one attention call received, heads first.

    Attributes:
        query: [batch, n_heads, pos, d_head]; None where the model computes the pattern itself.
        key: [batch, heads, source, d_head] or None.
        value: [batch, heads, source, d_value].
        mask: [batch, 1 or n_heads, pos, source], boolean or added to the scores; or None.
        pattern: [batch, n_heads, pos, source] where the model computes it itself.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    mask: Tensor | None
    pattern: Tensor | None
    scale: float
    causal: bool

    def of(self, what: HeadKind, row: int, head: int, n_heads: int) -> Tensor:
        """One head's own: [pos or source, entry]."""
        tensor = {"query": self.query, "key": self.key, "value": self.value, "pattern": self.pattern}[what]
        if tensor is None and what == "pattern":
            query, key = self.of("query", row, head, n_heads), self.of("key", row, head, n_heads)
            return self.weights(query, key, row, head)
        assert tensor is not None
        return tensor[row, head // (n_heads // tensor.shape[1])]

    def weights(self, query: Tensor, key: Tensor, row: int, head: int) -> Float[Tensor, "pos source"]:
        """The pattern of one head, in float32 at least."""
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = self.masked(query.to(wide) @ key.to(wide).T * self.scale, row, head)
        blind = (scores == -torch.inf).all(-1, keepdim=True)  # a padded position sees nothing
        return scores.softmax(-1).masked_fill(blind, 0.0)

    def masked(self, scores: Float[Tensor, "pos source"], row: int, head: int) -> Float[Tensor, "pos source"]:
        """The scores of one head with the mask put on."""
        if self.mask is not None:
            mask = self.mask[row, head if self.mask.shape[1] > 1 else 0][..., : scores.shape[-1]]
            return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores)
        if self.causal:
            after = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu(1)
            return scores.masked_fill(after, -torch.inf)
        return scores


def received(core: AttentionCore, leaves: list, batch: int, positions: int) -> Operands:
    """The operands of a call from the leaves of its arguments."""
    return operands_of(core, {name: leaves[slot] for name, slot in core.slots.items()}, batch, positions)


def operands_of(core: AttentionCore, arguments: Mapping[str, Any], batch: int, positions: int) -> Operands:
    """The operands of a call from its arguments by name."""
    value = heads_first(arguments["value"], core.layouts["value"], core.sizes, batch)
    if not core.fused:
        pattern = pattern_rows(arguments["pattern"], core.layouts["pattern"], core.sizes, batch)
        return Operands(None, None, value, None, pattern, 1.0, False)
    query = query_rows(_by_head(arguments["query"], core, positions), core.layouts["query"], core.sizes, batch)
    key = heads_first(arguments["key"], core.layouts["key"], core.sizes, batch)
    mask, causal = arguments.get("attn_mask"), arguments.get("is_causal")
    if isinstance(mask, Tensor):
        middle = mask.shape[1:] if mask.dim() == 4 else (1, *mask.shape[-2:])
        mask = mask.expand(batch, *middle)[:, :, :positions]
    scale = core.scaling if core.scaling is not None else query.shape[-1] ** -0.5
    return Operands(query, key, value, mask, None, scale, bool(causal) if causal is not None else core.causal)


def _by_head(tensor: Tensor, core: AttentionCore, positions: int) -> Tensor:
    """A query or result whose heads of one group were passed as positions, as is done where there is one position."""
    group = core.n_heads // core.n_keys
    packed = positions == 1 and group > 1 and tensor.dim() == 4 and tensor.shape[1:3] == (core.n_keys, group)
    return tensor.reshape(tensor.shape[0], core.n_heads, 1, -1) if core.fused and packed else tensor


def head_taps(changes: Iterable[HeadChange], now: Pass) -> list[tuple[Site, Tap]]:
    """Taps that make the changes."""
    by_core: dict[Site, list[HeadChange]] = {}
    for change in changes:
        by_core.setdefault(change.core.site, []).append(change)
    taps: list[tuple[Site, Tap]] = []
    for site, own in by_core.items():
        held: list[Operands] = []
        taps.append((site, _watching(own[0].core, held, now)))
        taps.append((own[0].core.result_site, _replacing(own, held, now)))
    return taps


def _watching(core: AttentionCore, held: list[Operands], now: Pass) -> Tap:
    def tap(leaves) -> None:
        held[:] = [received(core, leaves, now.batch, now.positions)]

    return tap


def _replacing(changes: list[HeadChange], held: list[Operands], now: Pass) -> Tap:
    core = changes[0].core

    def tap(leaves):
        operands, result = held.pop(), leaves[0]
        index = torch.arange(result.numel(), device=result.device).reshape(result.shape)
        index = result_rows(_by_head(index, core, now.positions), core.layouts["result"], core.sizes, now.batch)
        out = result.clone(memory_format=torch.contiguous_format)
        flat = out.view(-1)
        for row in range(now.batch):
            own = [change for change in changes if row in now.rows(change.row)]
            for head in dict.fromkeys(change.head for change in own):
                made = _head(operands, [c for c in own if c.head == head], row, now, core.n_heads)
                if made is not None:
                    rows, values = made
                    flat[index[row, head, rows]] = values.to(flat)
        return [out, *leaves[1:]]

    return tap


def _head(
    operands: Operands, changes: list[HeadChange], row: int, now: Pass, n_heads: int
) -> tuple[Tensor, Float[Tensor, "pos d_value"]] | None:
    """The rows of one head's result that the changes touch, and what becomes of them; None if they touch none."""
    head = changes[0].head
    sources = Pass(now.batch, operands.value.shape[2], 0, now.padding, now.prompt)
    own = {what: [c for c in changes if c.what == what] for what in ("query", "key", "value", "pattern")}
    touched = torch.zeros(now.positions, dtype=torch.bool, device=operands.value.device)
    before = after = operands.of("pattern", row, head, n_heads)
    value, seen = _changed(operands.of("value", row, head, n_heads), own["value"], row, sources)
    if own["query"] or own["key"]:
        query, rows = _changed(operands.of("query", row, head, n_heads), own["query"], row, now)
        key, others = _changed(operands.of("key", row, head, n_heads), own["key"], row, sources)
        after = operands.weights(query, key, row, head)
        touched[rows.to(touched.device)] = True
        seen = torch.cat([seen, others])
    touched |= (before[:, seen] != 0).any(-1) | (after[:, seen] != 0).any(-1)
    if own["pattern"]:
        after, rows = _changed_pattern(after, own["pattern"], row, now)
        touched[rows.to(touched.device)] = True
    rows = touched.nonzero().flatten()
    return (rows, after[rows] @ value.to(after)) if len(rows) else None


def _changed(old: Tensor, changes: list[HeadChange], row: int, now: Pass) -> tuple[Tensor, Tensor]:
    """The new values, and the indices of those that changed."""
    out, touched = old.clone(), []
    for change in changes:
        places, indices = now.find(row, change.positions)
        if len(places):
            out[indices.to(out.device)] = change.new(out[indices.to(out.device)], places).to(out)
            touched.append(indices)
    return out, torch.cat(touched) if touched else torch.empty(0, dtype=torch.long)


def _changed_pattern(old: Tensor, changes: list[HeadChange], row: int, now: Pass) -> tuple[Tensor, Tensor]:
    """The same for rows of a pattern, whose entries are sources without padding."""
    padding = now.padding[row] if now.padding else 0
    out, touched = old.clone(), []
    for change in changes:
        places, indices = now.find(row, change.positions)
        first = padding + (change.source or 0)
        columns = slice(first, None if change.source is None else first + 1)
        if len(places):
            there = out[indices.to(out.device), columns]
            out[indices.to(out.device), columns] = _fitted(change.new(there, places), there)
            touched.append(indices)
    return out, torch.cat(touched) if touched else torch.empty(0, dtype=torch.long)


def _fitted(new: Tensor, old: Tensor) -> Tensor:
    """Rows of another run's pattern, which may know fewer sources or more, cut or filled with 0."""
    if new.shape[-1] < old.shape[-1]:
        new = torch.nn.functional.pad(new, (0, old.shape[-1] - new.shape[-1]))
    return new[..., : old.shape[-1]].to(old)


def head_values(
    core: AttentionCore, wanted: Mapping[tuple[int, HeadKind], list[Tensor]], now: Pass
) -> list[tuple[Site, Tap]]:
    """Taps that keep what heads receive or compute: for each row [pos, entry], without padding."""

    def tap(leaves) -> None:
        operands = received(core, leaves, now.batch, now.positions)
        for (head, what), kept in wanted.items():
            for row in range(now.batch):
                padding = now.padding[row] if now.padding else 0
                found = operands.of(what, row, head, core.n_heads)[padding:]
                kept.append((found[:, padding:] if what == "pattern" else found).detach().clone())

    return [(core.site, tap)]
