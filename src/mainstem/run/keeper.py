"""What a run's taps see, noted as it passes and copied a few sublayers at a time.

A tap only notes its tensor. What is wanted of it is copied when a sublayer is over and enough waits (`settle`), all in
one go, and handed out when the run is over (`finish`): code that runs once between two matrix products is in no cache
and takes several times as long as in a loop, and there are hundreds of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.errors import RunError
from mainstem.model.hooks import Site, Tap
from mainstem.model.layouts import PositionAxis, by_position, by_token
from mainstem.run.shelf import Shelf

ENOUGH, MOST_WAITING = 24, 1 << 23
"""How many values, or bytes of what is wanted of them, wait at most when a sublayer is over, to be copied together."""

BLOCKS_OF_ROWS, BLOCKS_OF_WHOLES = 1 << 20, 1 << 24
"""Bytes of the largest blocks in which copies lie beside each other."""

LARGE = 1 << 20
"""Bytes from which a write is kept by reference; smaller ones are copied into memory that is used again."""

MOST_HELD = 1.5
"""How much more memory than is wanted may be held by keeping a reference to it."""

Store = Callable[[Tensor], None]
Arrange = Callable[[Tensor], Tensor]
Kind = tuple[torch.dtype, torch.device]
Pieces = tuple[list[Tensor], list[torch.Size | None], list[Store]]
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Noted:
    """A tensor that a tap saw: how it is arranged, where that goes, its version, its site, whether all is wanted."""

    tensor: Tensor
    arrange: Arrange
    store: Store
    version: int
    site: Site
    whole: bool

    def require_unchanged(self) -> None:
        """Raises RunError if the tensor was changed in place since it was seen."""
        if self.tensor._version != self.version:
            raise RunError(
                "The model changed a value in place after it was seen, as it did not when its structure was discovered",
                str(self.site),
                "Discover the structure again in the state in which the model runs now.",
            )


class Keeper:
    """Taps that keep what they see, whole or at the asked destinations.

    Args:
        positions: of the run, padding included.
        destinations: for each row of the batch the positions whose rows are wanted.
    """

    def __init__(self, positions: int, destinations: Int[Tensor, "batch destination"]) -> None:
        self.batch, self.positions = destinations.shape[0], positions
        self.destinations = destinations
        self.rows = torch.arange(self.batch, device=destinations.device)[:, None]
        self.taps: list[tuple[Site, Tap]] = []
        self._single = int(destinations) if destinations.numel() == 1 else None
        self._row_shelf, self._shelf = Shelf(BLOCKS_OF_ROWS), Shelf(BLOCKS_OF_WHOLES)
        self._waiting: list[_Noted] = []
        self._referred: list[_Noted] = []
        self._copies: list[tuple[Tensor, Store]] = []
        self._joined: list[tuple[Tensor, list[int], list[torch.Size | None], list[Store]]] = []

    def keep(self, site: Site, store: Store, last: bool = False) -> None:
        """Stores [batch, positions, rest] of what is at a site: by reference, or a copy of what is written in place.

        Args:
            site: the site.
            store: receives the value when the run is over.
            last: whether nothing more is kept; what waits is then copied, so that little is held beside the logits.
        """
        arrange, slot, overwritten = self._by_token(site), site.slot, site.overwritten

        def tap(leaves: list) -> None:
            if last:
                self.settle()
            tensor = leaves[slot]
            self._refer(copy_of(tensor) if overwritten else tensor, arrange, store, site)

        self.taps.append((site, tap))

    def keep_write(self, site: Site, store: Store, passed: Callable[[], None]) -> None:
        """Stores a write, a copy if it is small; the sublayer that made it is over, and what waits may be copied.

        Args:
            site: the site.
            store: receives the write when the run is over.
            passed: is called when the write is seen.
        """
        arrange, slot, overwritten = self._by_token(site), site.slot, site.overwritten
        waiting = self._waiting

        def tap(leaves: list) -> None:
            passed()
            if len(waiting) >= ENOUGH or sum([noted.tensor.nbytes for noted in waiting]) > MOST_WAITING:
                self.settle()
            tensor = copy_of(leaves[slot]) if overwritten else leaves[slot]
            if tensor.nbytes < LARGE:
                self._wait(tensor, arrange, store, site, True)
            else:
                self._refer(tensor, arrange, store, site)

        self.taps.append((site, tap))

    def keep_rows(self, site: Site, store: Store, axis: PositionAxis | None = None) -> None:
        """Stores [batch, destination, rest] of what is at a site.

        Args:
            site: the site.
            store: receives the rows.
            axis: of the positions, where they have one of their own.
        """
        arrange = self._by_token(site) if axis is None else self._by_position(axis)
        slot, overwritten = site.slot, site.overwritten

        def tap(leaves: list) -> None:
            tensor = leaves[slot]
            self._wait(copy_of(tensor) if overwritten else tensor, arrange, store, site, False)

        self.taps.append((site, tap))

    def note_rows(self, tensor: Tensor, arrange: Arrange, store: Store, site: Site) -> None:
        """Stores the rows at the destinations of a tensor.

        Args:
            tensor: is to be copied before it changes.
            arrange: makes it [batch, ..., positions, rest].
            store: receives the rows.
            site: where it was seen.
        """
        self._wait(tensor, arrange, store, site, False)

    def note_lasting(self, tensor: Tensor, arrange: Arrange, store: Store, site: Site) -> None:
        """Stores what `arrange` makes of a tensor, by reference where nothing else is held and nothing writes there."""
        wanted = arrange(tensor)
        if wanted.untyped_storage().nbytes() > MOST_HELD * wanted.nbytes:
            self._wait(wanted, _as_it_is, store, site, True)
        else:
            self._refer(wanted, _as_it_is, store, site)

    def _wait(self, tensor: Tensor, arrange: Arrange, store: Store, site: Site, whole: bool) -> None:
        if tensor.is_inference():  # whether it changes cannot be told
            tensor = copy_of(tensor)
        self._waiting.append(_Noted(tensor, arrange, store, tensor._version, site, whole))

    def _refer(self, tensor: Tensor, arrange: Arrange, store: Store, site: Site) -> None:
        if _may_be_reused(tensor):
            tensor = copy_of(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        self._referred.append(_Noted(tensor, arrange, store, tensor._version, site, True))

    def settle(self) -> None:
        """Copies what was noted since the last time.

        Raises:
            RunError: if the model has changed some of it, as it did not in the run that discovered its structure.
        """
        _tracked(self._settle)

    def _settle(self) -> None:
        """Copies what is whole and contiguous in one call for each dtype and device, and so what is one row."""
        single = self._single
        wholes: dict[Kind, Pieces] = {}
        rows: dict[Kind, Pieces] = {}
        for noted in self._waiting:
            noted.require_unchanged()
            wanted, store = noted.arrange(noted.tensor), noted.store
            if noted.whole:
                if not wanted.is_contiguous():
                    self._copies.append((self._put(wanted), store))
                    continue
                kinds, row, shape = wholes, wanted.view(1, -1), wanted.shape
            elif single is None:
                self._copies.append((self._indexed(wanted), store))
                continue
            elif wanted.dim() == 3:
                kinds, row, shape = rows, wanted.select(1, single), None
            else:
                row = wanted.narrow(-2, single, 1)
                kinds, row, shape = rows, row.reshape(1, -1), row.shape
            pieces, shapes, stores = kinds.setdefault((row.dtype, row.device), ([], [], []))
            pieces.append(row)
            shapes.append(shape)
            stores.append(store)
        self._waiting.clear()
        for shelf, kinds in ((self._shelf, wholes), (self._row_shelf, rows)):
            for pieces, shapes, stores in kinds.values():
                self._joined.append((*shelf.join(pieces), shapes, stores))

    def _put(self, wanted: Tensor) -> Tensor:
        """A copy; of what is the same memory for all rows of the batch only one."""
        if wanted.shape[0] > 1 and wanted.stride(0) == 0:
            return self._shelf.put(wanted[:1]).expand_as(wanted)
        return self._shelf.put(wanted)

    def finish(self) -> None:
        """Stores all that was kept; the run is over, and the taps are of no more use.

        Raises:
            RunError: as `settle`.
        """
        _tracked(self._finish)

    def _finish(self) -> None:
        self._settle()
        for noted in self._referred:
            noted.require_unchanged()
            noted.store(noted.arrange(noted.tensor))
        for tensor, store in self._copies:
            store(tensor)
        for joined, sizes, shapes, stores in self._joined:
            for row, shape, store in zip(joined.split_with_sizes(sizes, -1), shapes, stores, strict=True):
                store(row if shape is None else row.view(shape))

    def release(self) -> None:
        """Lets go of everything: the taps and this refer to each other, and memory would wait for the collector."""
        for kept in (self._waiting, self._referred, self._copies, self._joined, self.taps):
            kept.clear()

    def at(self, tensor: Tensor) -> Tensor:
        """[batch, ..., destination, rest]: a copy of the asked rows of [batch, ..., positions, rest]."""
        return _tracked(self._rows_of, tensor)

    def _rows_of(self, tensor: Tensor) -> Tensor:
        return self._indexed(tensor) if self._single is None else tensor.narrow(-2, self._single, 1).clone()

    def _indexed(self, tensor: Tensor) -> Tensor:
        rows, destinations = self.rows.to(tensor.device), self.destinations.to(tensor.device)
        return tensor.movedim(-2, 1)[rows, destinations].movedim(1, -2)

    def _by_token(self, site: Site) -> Arrange:
        return partial(by_token, site=site, batch=self.batch, positions=self.positions)

    def _by_position(self, axis: PositionAxis) -> Arrange:
        return partial(by_position, axis=axis, batch=self.batch, positions=self.positions)


def _tracked(compute: Callable[..., Result], *arguments) -> Result:
    """What is computed where tensors have version counters, also in a caller's inference mode, and no gradients."""
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        return compute(*arguments)
    with torch.inference_mode(False), torch.no_grad():
        return compute(*arguments)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy whose changes can be told, without gradients."""
    return _tracked(tensor.clone)


def _may_be_reused(tensor: Tensor) -> bool:
    """Whether a tensor may lie in memory that the next run uses again: what outlives a run was written in place.

    A model that keeps a tensor of one run and writes into it in the next is not seen by this.
    """
    return tensor.is_inference() or tensor._version > 0


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
