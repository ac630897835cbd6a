"""One pass over a text, in which every point of the stream is shown to what measures it, and nothing is kept.

`watch` runs the model window by window and shows each point's vectors to what measures them (`Watcher`): sums in
`mainstem.analysis`, whose size does not depend on the text. Each token is counted once, however windows overlap. The
first position of a window is shown apart, because in many models it is a sink with values like no other's.

Points of a kind are shown several at a time. The first use of any code after the model's products costs ten times as
much as the next, because they have driven it out of the processor's caches; so a point's vectors are copied as they go
by, which costs about one pass over them, and what is done is done for several in one go. When the last point of a batch
has gone by, its run is over: nobody asked for its logits.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.peaks import Tokens
from mainstem.causal.stream_points import StreamPoint, tap_at
from mainstem.errors import NotFiniteError
from mainstem.model.hooks import tapped
from mainstem.run.windows import Windows

TOGETHER = 8 << 20
"""Bytes of vectors of one kind that are held to be shown together."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The counted tokens of one batch of windows, those at the first position of a window in front.

    Attributes:
        shape: (batch, pos) of the run.
        index: [token] where they are in the batch made flat.
        firsts: how many of them are at a window's first position.
        ids: [token] the tokens.
        places: [token] where they are in the text.
    """

    shape: tuple[int, int]
    index: Int[Tensor, " token"]
    firsts: int
    ids: Int[Tensor, " token"]
    places: Int[Tensor, " token"]

    @cached_property
    def tokens(self) -> Tokens:
        """Where they are from."""
        return Tokens(self.ids, self.places, self.index // self.shape[1], self.index % self.shape[1])

    @classmethod
    def of(cls, windows: Windows, rows: slice, before: int) -> "Rows":
        """Those of some windows; `before` is how many tokens earlier windows had."""
        fresh, ids = windows.fresh(rows), windows.ids[rows]
        order = torch.arange(fresh.numel())
        counted = order[fresh.flatten()]
        places = before + torch.arange(len(counted))
        first = counted % windows.length == 0
        sorting = torch.cat([first.nonzero()[:, 0], (~first).nonzero()[:, 0]])
        index = counted[sorting]
        return cls(tuple(ids.shape), index, int(first.sum()), ids.flatten()[index], places[sorting])  # type: ignore[arg-type]

    def of_run(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "token d_model"]:
        """The rows of a value of the run; no copy where they are all of it."""
        flat = x.flatten(0, 1)
        if len(self.index) == len(flat) and self.firsts <= 1:
            return flat
        return flat[self.index.to(flat.device)]


class Scratch:
    """Memory that is used again and again: fresh memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self.held = torch.empty(0)

    def like(self, x: Tensor) -> Tensor:
        """Memory of the shape, dtype and device of `x`, with anything in it."""
        if (self.held.dtype, self.held.device) != (x.dtype, x.device) or self.held.numel() < x.numel():
            self.held = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
        return self.held[: x.numel()].view(x.shape)


@dataclass(frozen=True, eq=False)
class Seen:
    """The vectors of some points of one kind in one batch, and what several watchers take from them.

    Attributes:
        x: the vectors of the counted tokens, those at first positions of windows in front; float32 at least.
        rows: the tokens.
        scratch: memory to work in, shared by all that look on.
    """

    x: Float[Tensor, "point token d_model"]
    rows: Rows
    scratch: Scratch = field(default_factory=Scratch)

    @property
    def firsts(self) -> Float[Tensor, "point token d_model"]:
        """Those at the first position of a window."""
        return self.x[:, : self.rows.firsts]

    @property
    def rest(self) -> Float[Tensor, "point token d_model"]:
        """The others."""
        return self.x[:, self.rows.firsts :]

    @cached_property
    def magnitudes_of_rest(self) -> Float[Tensor, "point d_model"]:
        """Each coordinate's largest magnitude among the others; there has to be one."""
        return torch.maximum(self.rest.amax(1), -self.rest.amin(1))

    @cached_property
    def magnitudes(self) -> Float[Tensor, "point d_model"]:
        """Each coordinate's largest magnitude among all."""
        parts = [self.firsts.abs().amax(1)] if self.firsts.numel() else []
        parts += [self.magnitudes_of_rest] if self.rest.numel() else []
        return torch.stack(parts).amax(0)


class Watcher(Protocol):
    """What measures points of the stream."""

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """The vectors of some points in one batch, all of one kind and width; each point once in a batch."""
        ...


Forward = Callable[[Int[Tensor, "batch pos"]], Any]


class _Stack:
    """Vectors of points of one kind and width, in the order in which they went by, until they are shown."""

    def __init__(self, x: Float[Tensor, "token d_model"]) -> None:
        """Room for vectors like these."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        many = max(1, TOGETHER // (x.numel() * dtype.itemsize))
        self.memory = torch.empty(many, *x.shape, dtype=dtype, device=x.device)
        self.numbers: list[int] = []

    def add(self, number: int, x: Float[Tensor, "token d_model"]) -> bool:
        """Copies one point's; whether that was the last for which there is room."""
        self.memory[len(self.numbers)].copy_(x)
        self.numbers.append(number)
        return len(self.numbers) == len(self.memory)


class _Over(Exception):  # noqa: N818 (no error: the run has shown what was wanted)
    """Every point has been seen."""


class _Batch:
    """One batch as it goes by."""

    def __init__(self, points: Sequence[StreamPoint], watchers: Sequence[Watcher]) -> None:
        self.points, self.watchers = points, watchers
        self.rows: Rows | None = None
        self.scratch = Scratch()
        self.stacks: dict[tuple, _Stack] = {}
        self.order: list[int] = []
        self.wrong: set[int] = set()

    def see(self, number: int, x: Float[Tensor, "batch pos d_model"]) -> None:
        """One point's vectors, as the run has them."""
        assert self.rows is not None
        mine = self.rows.of_run(x)
        key = self.points[number].kind, mine.shape, mine.dtype, mine.device
        if key not in self.stacks:
            self.stacks[key] = _Stack(mine)
        self.order.append(number)
        if self.stacks[key].add(number, mine):
            self.show(self.stacks[key])
        if len(self.order) == len(self.points):
            raise _Over

    def show(self, stack: _Stack) -> None:
        """Shows a stack to all that look on, and empties it."""
        assert self.rows is not None
        numbers = stack.numbers.copy()
        stack.numbers.clear()
        if not numbers or not self.watchers:
            return
        seen = Seen(stack.memory[: len(numbers)], self.rows, self.scratch)
        self.wrong.update(numbers[row] for row in (~seen.magnitudes.isfinite().all(1)).nonzero()[:, 0].tolist())
        for watcher in self.watchers:
            watcher.see(numbers, seen)

    def run(self, rows: Rows, forward: Callable[[], Any]) -> None:
        """Runs one."""
        if self.rows is None or len(rows.index) != len(self.rows.index):
            self.stacks.clear()  # other shapes
        self.rows = rows
        self.order.clear()
        with suppress(_Over):
            forward()
        for stack in self.stacks.values():
            self.show(stack)
        if self.wrong:
            first = next(number for number in self.order if number in self.wrong)
            raise NotFiniteError("A value of the stream is not finite", self.points[first].name)


@torch.no_grad()
def watch(
    module: torch.nn.Module,
    forward: Forward,
    points: Sequence[StreamPoint],
    windows: Windows,
    watchers: Sequence[Watcher],
    batch: int = 1,
    report: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Runs a text and shows every point of every batch to every watcher.

    Args:
        module: the model; it is left as it was.
        forward: a forward pass of it.
        points: what is watched.
        windows: the text.
        watchers: what measures; the memory is theirs.
        batch: windows that run together.
        report: called after each batch with the number of tokens done.

    Raises:
        NotFiniteError: something is no finite number; names the first such point of the run.
    """
    going, done = _Batch(points, watchers), 0

    def tap(number: int, point: StreamPoint):
        return tap_at(point, lambda x: going.see(number, x), lambda: going.rows.shape if going.rows else (0, 0))

    with tapped(module, [tap(number, point) for number, point in enumerate(points)]):
        for rows in windows.batches(batch):
            counted = Rows.of(windows, rows, done)
            going.run(counted, lambda ids=windows.ids[rows]: forward(ids))
            done += len(counted.index)
            report(done)
