"""Values of a running model that become others: the low level of every edit, ablation and patch.

A `Change` names a site, positions and entries of what is there, and the function that makes the new from the old. All
changes of one forward pass are made by taps (`change_taps`): a value that nothing is changed in stays the tensor that
it was, and gradients flow through those that are. Positions count a row's own tokens, without padding, and go on
through a generation: `Pass` says which of them the forward pass that runs now holds.

Changes of one site are made in the order in which they are given.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import EditError
from mainstem.model.hooks import Site, Tap

New = Callable[[Float[Tensor, "pos entry"], Int[Tensor, " pos"]], Tensor]
"""From the old values and their positions to the new values, of the same shape."""


Places = Sequence[int] | Literal["prompt", "generated"] | None
"""Positions: numbers, negative ones counted from the prompt's end; all that were given or generated; None for all."""


@dataclass
class Pass:
    """The forward pass that runs now.

    Attributes:
        batch: how many rows it has.
        positions: how many positions of each row, padding included.
        offset: how many positions, padding included, came in earlier passes of the same generation.
        padding: how many positions of each row are padding, in front; none if empty.
        prompt: how many positions the prompt has, padding included; what comes after them was generated.
    """

    batch: int
    positions: int
    offset: int = 0
    padding: Sequence[int] = ()
    prompt: int | None = None

    def rows(self, row: int | None) -> Sequence[int]:
        """The rows that a change of `row` holds for: all for None.

        Raises:
            EditError: if there is no such row.
        """
        if row is None:
            return range(self.batch)
        if not 0 <= row < self.batch:
            raise EditError(f"There is no row {row} to edit", f"a batch of {self.batch}", "Rows count from 0.")
        return (row,)

    def find(self, row: int, wanted: Places) -> tuple[Int[Tensor, " pos"], Int[Tensor, " pos"]]:
        """Those of the wanted positions of a row that are in this pass: as positions, and as indices here."""
        padding = self.padding[row] if self.padding else 0
        first = self.offset - padding
        start, stop = max(first, 0), first + self.positions
        length = (self.offset + self.positions if self.prompt is None else self.prompt) - padding
        if wanted is None or isinstance(wanted, str):
            if wanted == "prompt":
                stop = min(stop, length)
            elif wanted == "generated":
                start = max(start, length)
            found = torch.arange(start, max(start, stop))
        else:
            places = [place if place >= 0 else length + place for place in wanted]
            found = torch.tensor([p for p in places if start <= p < stop], dtype=torch.long)
        return found, found - first


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of one value.

    Attributes:
        site: where it is.
        new: makes the new values.
        positions: at which positions of the row.
        entries: which entries of the last axis; None for all.
        row: which row of the batch; None for every row.
    """

    site: Site
    new: New
    positions: Places = None
    entries: Int[Tensor, " entry"] | None = None
    row: int | None = None


def set_to(value: Float[Tensor, "#pos #entry"] | float) -> New:
    """The old values are dropped for `value`, the same at every position."""
    return lambda old, places: torch.zeros_like(old) + torch.as_tensor(value).to(old)


def set_by_position(values: Float[Tensor, "pos entry"]) -> New:
    """Position p gets row p of `values`."""
    return lambda old, places: values.to(old)[places.to(old.device)]


def change_taps(changes: Iterable[Change], now: Pass) -> list[tuple[Site, Tap]]:
    """Taps that make the changes, one for each site, in the order in which sites are first named.

    Args:
        changes: in the order in which they are made.
        now: the pass that runs; where there are several, it is updated before each.
    """
    by_site: dict[Site, list[Change]] = {}
    for change in changes:
        by_site.setdefault(change.site, []).append(change)
    return [(site, _tap(site, own, now)) for site, own in by_site.items()]


def _tap(site: Site, changes: list[Change], now: Pass) -> Tap:
    def tap(leaves):
        here = [(change, row, *now.find(row, change.positions)) for change in changes for row in now.rows(change.row)]
        here = [made for made in here if len(made[2])]
        if not here:
            return None
        out, tokens = copied_by_token(leaves[site.slot], site, now)
        for change, row, places, indices in here:
            indices = indices.to(tokens.device)
            where: tuple = (row, indices)
            if change.entries is not None:
                where = (row, indices[:, None], change.entries.to(tokens.device))
            tokens[where] = change.new(tokens[where], places).to(tokens)
        new = list(leaves)
        new[site.slot] = out
        return new

    return tap


def copied_by_token(tensor: Tensor, site: Site, now: Pass) -> tuple[Tensor, Float[Tensor, "batch pos entry"]]:
    """A copy of what is at a site, in its own arrangement, and a view of it by row and position.

    What the model computes once for all rows of a batch becomes one for each row.
    """
    batch, positions = now.batch, now.positions
    if batch > 1 and tensor.shape[:-1] == (positions,):
        tensor = tensor[None]
    if batch > 1 and tensor.shape[0] == 1:
        tensor = tensor.expand(batch, *tensor.shape[1:])
    out = tensor.clone(memory_format=torch.contiguous_format)
    if site.positions_first and out.shape[:2] == (positions, batch):
        return out, out.transpose(0, 1).flatten(2)
    return out, out.view(batch, positions, -1)
