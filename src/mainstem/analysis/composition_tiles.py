"""Compositions of all pairs from readers and writers that come in tiles, so that no more than two are held at once.

A side is something that can be gone through several times and gives a `Stack` each time it is asked: the whole of it,
where that fits into memory, or tiles of some sublayers that are made anew. Readers are gone through twice, writers once
and once more for each tile of readers. Numbers are the same but for the order of sums in float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.composition import Spectra, Stack, shared_directions, squared, squared_without


@dataclass(eq=False)
class Side:
    """What is kept of a side's stacks: spectra as they are and without the shared directions, and what lies in those.

    Attributes:
        inside: how much of all rows' squared norms is along each direction; each unit has norm 1.
    """

    stacks: list[Spectra] = field(default_factory=list)
    left: list[Spectra] = field(default_factory=list)
    inside: Float[Tensor, " direction"] | float = 0.0

    def add(self, made: Stack, directions: Float[Tensor, "d_model direction"]) -> None:
        """Adds a stack."""
        self.stacks.append(Spectra(made.units, made.d_model, made.norms, made.fourth))
        self.left.append(made.without(directions))
        self.inside = self.inside + (made.rows @ directions.to(made.rows)).pow(2).sum((0, 1))


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of two sides.

    Attributes:
        whole, left: readers and writers, as they are and without the shared directions.
        found, rest: the squared compositions, likewise.
        directions: the shared ones.
        inside: the mean over all units of how much of a unit is along each.
    """

    whole: tuple[Spectra, Spectra]
    left: tuple[Spectra, Spectra]
    found: Float[Tensor, "reader writer"]
    rest: Float[Tensor, "reader writer"]
    directions: Float[Tensor, "d_model direction"]
    inside: Float[Tensor, " direction"]


def all_pairs(readers: Iterable[Stack], writers: Iterable[Stack]) -> Pairs:
    """The squared compositions of all pairs, with and without the directions that both sides share."""
    directions = shared_directions(chain(writers, readers))
    sides = Side(), Side()
    found, rest = [], []
    for reader in readers:
        sides[0].add(reader, directions)
        row = []
        for writer in writers:
            if not found:
                sides[1].add(writer, directions)
            squares = squared(reader, writer)
            row.append((squares, squared_without(squares, reader, writer, directions)))
            del writer  # before the next is made
        found.append(torch.cat([one for one, _ in row], 1))
        rest.append(torch.cat([one for _, one in row], 1))
        del reader
    whole, left = (_joined(sides[0].stacks), _joined(sides[1].stacks)), (_joined(sides[0].left), _joined(sides[1].left))
    inside = torch.as_tensor(sides[1].inside + sides[0].inside) / sum(len(side.units) for side in whole)
    return Pairs(whole, left, torch.cat(found), torch.cat(rest), directions, inside)


def _joined(parts: list[Spectra]) -> Spectra:
    units = tuple(unit for part in parts for unit in part.units)
    norms, fourth = torch.cat([part.norms for part in parts]), torch.cat([part.fourth for part in parts])
    return Spectra(units, parts[0].d_model, norms, fourth)
