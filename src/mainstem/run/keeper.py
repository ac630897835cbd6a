"""What a run's taps see, noted as it passes and copied a sublayer or two at a time.

A tap only notes its tensor. What is wanted of it is copied when a sublayer is over and enough waits (`settle`), all
rows in one go, and handed out when the run is over (`finish`): code that runs once between two matrix products is in
no cache and takes several times as long as in a loop, and there are hundreds of values.
"""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.model.hooks import Site, Tap
from mainstem.model.layouts import PositionAxis, by_position, by_token
from mainstem.run.shelf import Shelf

ENOUGH, MOST_WAITING = 6, 1 << 23
"""How many values, or bytes of them, wait at most when a sublayer is over, to be copied together."""

MOST_HELD = 1.5
"""How much more memory than is wanted may be held by keeping a reference to it."""

Store = Callable[[Tensor], None]
Arrange = Callable[[Tensor], Tensor]
Noted = tuple[Tensor, Arrange, Store]
Part = tuple[torch.Size | None, Store]


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
        self._rows: list[Noted] = []
        self._plain: list[tuple[Tensor, Store]] = []
        self._lasting: list[Noted] = []
        self._whole: list[Noted] = []
        self._joined: list[tuple[Tensor, list[int], list[Part]]] = []

    def keep(self, site: Site, store: Store) -> None:
        """Stores [batch, positions, rest] of what is at a site, by reference."""
        self._note(site, self._whole, (self._by_token(site), store))

    def keep_rows(self, site: Site, store: Store, axis: PositionAxis | None = None) -> None:
        """Stores [batch, destination, rest] of what is at a site.

        Args:
            site: the site.
            store: receives the rows.
            axis: of the positions, where they have one of their own.
        """
        if axis is not None:
            self._note(site, self._rows, (self._by_position(axis), store))
        elif self._single is None:
            self._note(site, self._rows, (self._by_token(site), store))
        else:
            self._note(site, self._plain, (store,))

    def keep_write(self, site: Site, store: Store) -> None:
        """Stores a write as `keep` does; the sublayer that made it is over, and what waits may be copied."""
        self.keep(site, store)
        _, note = self.taps.pop()

        def tap(leaves: list) -> None:
            waiting = len(self._plain) + len(self._rows)
            if waiting >= ENOUGH or sum(noted[0].nbytes for noted in self._plain) > MOST_WAITING:
                self.settle()
            note(leaves)

        self.taps.append((site, tap))

    def note_rows(self, tensor: Tensor, arrange: Arrange, store: Store) -> None:
        """Stores the rows at the destinations of a tensor that `arrange` makes [batch, ..., positions, rest]."""
        self._rows.append((tensor, arrange, store))

    def note_lasting(self, tensor: Tensor, arrange: Arrange, store: Store) -> None:
        """Stores what `arrange` makes of a tensor: by reference, or a copy where most of its memory is not wanted."""
        self._lasting.append((tensor, arrange, store))

    def settle(self) -> None:
        """Copies what was noted since the last time."""
        for tensor, arrange, store in self._lasting:
            wanted = arrange(tensor)
            if wanted.untyped_storage().nbytes() > MOST_HELD * wanted.nbytes:
                wanted = self._sources.put(wanted)
            self._whole.append((wanted, _as_it_is, store))
        self._lasting.clear()
        if self._single is None:
            self._whole += [(self._indexed(arrange(seen)), _as_it_is, store) for seen, arrange, store in self._rows]
        else:
            self._take_rows(self._single)
        self._rows.clear()

    def _take_rows(self, place: int) -> None:
        """Copies the rows of one destination of one prompt; a slice is many times cheaper than an index."""
        positions = self.positions
        rows = [tensor.reshape(positions, -1)[place] for tensor, _ in self._plain]
        parts: list[Part] = [(None, store) for _, store in self._plain]
        self._plain.clear()
        for tensor, arrange, store in self._rows:
            row = arrange(tensor).narrow(-2, place, 1)
            rows.append(row.reshape(-1))
            parts.append((row.shape, store))
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
        """Stores all that was kept; the run is over, and the taps are of no more use."""
        self.settle()
        for tensor, arrange, store in self._whole:
            store(arrange(tensor))
        for joined, sizes, parts in self._joined:
            for row, (shape, store) in zip(joined.view(1, 1, -1).split_with_sizes(sizes, -1), parts, strict=True):
                store(row if shape is None else row.view(shape))
        self._whole.clear()
        self._joined.clear()
        self.taps.clear()  # they refer to this, and this to them: memory would wait for the garbage collector

    def at(self, tensor: Tensor) -> Tensor:
        """[batch, ..., destination, rest]: a copy of the asked rows of [batch, ..., positions, rest]."""
        if self._single is None:
            return self._indexed(tensor)
        return tensor.narrow(-2, self._single, 1).clone()

    def _indexed(self, tensor: Tensor) -> Tensor:
        rows, destinations = self.rows.to(tensor.device), self.destinations.to(tensor.device)
        return tensor.movedim(-2, 1)[rows, destinations].movedim(1, -2)

    def _by_token(self, site: Site) -> Arrange:
        return lambda tensor: by_token(tensor, site, self.batch, self.positions)

    def _by_position(self, axis: PositionAxis) -> Arrange:
        return lambda tensor: by_position(tensor, axis, self.batch, self.positions)

    def _note(self, site: Site, noted: list, more: tuple) -> None:
        """Adds a tap that notes its tensor."""
        slot, overwritten = site.slot, site.overwritten

        def tap(leaves: list) -> None:
            tensor = leaves[slot]
            noted.append((tensor.clone() if overwritten else tensor, *more))

        self.taps.append((site, tap))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
