"""What a run's taps see, noted as it passes and copied a sublayer or two at a time.

A tap only notes its tensor. What is wanted of it is copied when a sublayer is over and enough waits (`settle`), all
rows in one go, and handed out when the run is over (`finish`): code that runs once between two matrix products is in
no cache and takes several times as long as in a loop, and there are hundreds of values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.errors import RunError
from mainstem.model.hooks import Site, Tap
from mainstem.model.layouts import PositionAxis, by_position, by_token
from mainstem.run.shelf import Shelf

ENOUGH, MOST_WAITING = 6, 1 << 23
"""How many values, or bytes of them, wait at most when a sublayer is over, to be copied together."""

MOST_HELD = 1.5
"""How much more memory than is wanted may be held by keeping a reference to it."""

Store = Callable[[Tensor], None]
Arrange = Callable[[Tensor], Tensor]
Part = tuple[torch.Size | None, Store]


@dataclass(eq=False, slots=True)
class _Noted:
    """A tensor that a tap saw: how it is arranged (None: by token), where that goes, its version and its site."""

    tensor: Tensor
    arrange: Arrange | None
    store: Store
    version: int
    site: Site

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
        attentions: how many attention products keep their keys and values.
    """

    def __init__(self, positions: int, destinations: Int[Tensor, "batch destination"], attentions: int) -> None:
        self.batch, self.positions = destinations.shape[0], positions
        self.destinations = destinations
        self.rows = torch.arange(self.batch, device=destinations.device)[:, None]
        self.taps: list[tuple[Site, Tap]] = []
        self._single = int(destinations) if destinations.numel() == 1 else None
        self._shelf, self._sources = Shelf(1 << 18), Shelf(1 << 24, many=2 * attentions)
        self._rows: list[_Noted] = []
        self._lasting: list[_Noted] = []
        self._whole: list[_Noted] = []
        self._taken: list[tuple[Tensor, Store]] = []
        self._joined: list[tuple[Tensor, list[int], list[Part]]] = []

    def keep(self, site: Site, store: Store) -> None:
        """Stores [batch, positions, rest] of what is at a site: by reference, or a copy of what is written in place."""
        self.taps.append((site, self._noting(site, store)))

    def keep_write(self, site: Site, store: Store) -> None:
        """Stores a write as `keep` does; the sublayer that made it is over, and what waits may be copied."""
        note = self._noting(site, store)

        def tap(leaves: list) -> None:
            waiting = [*self._rows, *self._lasting]
            if len(waiting) >= ENOUGH or sum(noted.tensor.nbytes for noted in waiting) > MOST_WAITING:
                self.settle()
            note(leaves)

        self.taps.append((site, tap))

    def keep_rows(self, site: Site, store: Store, axis: PositionAxis | None = None) -> None:
        """Stores [batch, destination, rest] of what is at a site.

        Args:
            site: the site.
            store: receives the rows.
            axis: of the positions, where they have one of their own.
        """
        arrange = None if axis is None else self._by_position(axis)
        slot, overwritten = site.slot, site.overwritten

        def tap(leaves: list) -> None:
            tensor = leaves[slot]
            self.note_rows(_copy(tensor) if overwritten else tensor, arrange, store, site)

        self.taps.append((site, tap))

    def note_rows(self, tensor: Tensor, arrange: Arrange | None, store: Store, site: Site) -> None:
        """Stores the rows at the destinations of a tensor.

        Args:
            tensor: is to be copied before it changes.
            arrange: makes it [batch, ..., positions, rest]; None where its elements are in the order of the tokens.
            store: receives the rows.
            site: where it was seen.
        """
        if tensor.is_inference():  # whether it changes cannot be told
            tensor = _copy(tensor)
        self._rows.append(_Noted(tensor, arrange, store, tensor._version, site))

    def note_lasting(self, tensor: Tensor, arrange: Arrange, store: Store, site: Site) -> None:
        """Stores what `arrange` makes of a tensor, by reference where nothing else is held and nothing writes there."""
        if _may_be_reused(tensor):
            tensor = _copy(tensor)
        self._lasting.append(_Noted(tensor, arrange, store, tensor._version, site))

    def settle(self) -> None:
        """Copies what was noted since the last time.

        Raises:
            RunError: if the model has changed some of it, as it did not in the run that discovered its structure.
        """
        with _tracked():
            self._settle()

    def _settle(self) -> None:
        for noted in (*self._lasting, *self._rows):
            noted.require_unchanged()
        for noted in self._lasting:
            assert noted.arrange is not None
            wanted = noted.arrange(noted.tensor)
            if wanted.untyped_storage().nbytes() > MOST_HELD * wanted.nbytes:
                self._taken.append((self._sources.put(wanted), noted.store))
            else:
                self._whole.append(_Noted(wanted, _as_it_is, noted.store, noted.version, noted.site))
        self._lasting.clear()
        if self._single is None:
            self._taken += [(self._indexed(self._arranged(noted)), noted.store) for noted in self._rows]
        elif self._rows:
            self._take_rows(self._single)
        self._rows.clear()

    def _take_rows(self, place: int) -> None:
        """Copies the rows of one destination of one prompt; a slice is many times cheaper than an index."""
        rows, parts, positions = [], [], self.positions
        for noted in self._rows:
            if noted.arrange is None:
                rows.append(noted.tensor.reshape(positions, -1)[place])
                parts.append((None, noted.store))
            else:
                row = noted.arrange(noted.tensor).narrow(-2, place, 1)
                rows.append(row.reshape(-1))
                parts.append((row.shape, noted.store))
        kinds = {(row.dtype, row.device) for row in rows}
        for kind in kinds:
            if len(kinds) == 1:
                members, own = rows, parts
            else:
                chosen = [i for i, row in enumerate(rows) if (row.dtype, row.device) == kind]
                members, own = [rows[i] for i in chosen], [parts[i] for i in chosen]
            sizes = [row.numel() for row in members]
            self._joined.append((self._shelf.join(members, sum(sizes)), sizes, own))

    def finish(self) -> None:
        """Stores all that was kept; the run is over, and the taps are of no more use.

        Raises:
            RunError: as `settle`.
        """
        with _tracked():
            self._finish()

    def _finish(self) -> None:
        self._settle()
        for noted in self._whole:
            noted.require_unchanged()
            noted.store(self._arranged(noted))
        for tensor, store in self._taken:
            store(tensor)
        for joined, sizes, parts in self._joined:
            for row, (shape, store) in zip(joined.view(1, 1, -1).split_with_sizes(sizes, -1), parts, strict=True):
                store(row if shape is None else row.view(shape))

    def release(self) -> None:
        """Lets go of everything: the taps and this refer to each other, and memory would wait for the collector."""
        for kept in (self._rows, self._lasting, self._whole, self._taken, self._joined, self.taps):
            kept.clear()

    def at(self, tensor: Tensor) -> Tensor:
        """[batch, ..., destination, rest]: a copy of the asked rows of [batch, ..., positions, rest]."""
        with _tracked():
            return self._indexed(tensor) if self._single is None else tensor.narrow(-2, self._single, 1).clone()

    def _indexed(self, tensor: Tensor) -> Tensor:
        rows, destinations = self.rows.to(tensor.device), self.destinations.to(tensor.device)
        return tensor.movedim(-2, 1)[rows, destinations].movedim(1, -2)

    def _arranged(self, noted: _Noted) -> Tensor:
        if noted.arrange is not None:
            return noted.arrange(noted.tensor)
        return by_token(noted.tensor, noted.site, self.batch, self.positions)

    def _by_position(self, axis: PositionAxis) -> Arrange:
        return lambda tensor: by_position(tensor, axis, self.batch, self.positions)

    def _noting(self, site: Site, store: Store) -> Tap:
        """A tap that notes what is kept by reference."""
        noted, slot, overwritten = self._whole, site.slot, site.overwritten

        def tap(leaves: list) -> None:
            tensor = leaves[slot]
            if overwritten or _may_be_reused(tensor):
                tensor = _copy(tensor)
            noted.append(_Noted(tensor, None, store, tensor._version, site))

        return tap


@contextmanager
def _tracked() -> Iterator[None]:
    """Tensors made inside have version counters, also in inference mode, and no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _copy(tensor: Tensor) -> Tensor:
    with _tracked():
        return tensor.clone()


def _may_be_reused(tensor: Tensor) -> bool:
    """Whether a tensor may lie in memory that the next run uses again: what outlives a run was written in place.

    A model that keeps a tensor of one run and writes into it in the next is not seen by this.
    """
    return tensor.is_inference() or tensor._version > 0


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
