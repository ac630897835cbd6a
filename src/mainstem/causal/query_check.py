"""Whether the queries named for a value unit activate it: their writes are taken away in a real run.

What each named unit writes is subtracted at the position that the value unit reads, all at once, where its sublayer
writes; the model runs on, so that norms take their new scale and everything in between reacts. The quantity of the key
(activation, pre-activation, direct effect with the head's pattern and the final norm's scale as they were, or score)
is read off again. Beside it stand controls: as many random units of the same sublayers, scaled to the same norms.

Cost: one batch of 2 + draws rows. Limits: a share is a first step under a frozen norm, and a removal also acts through
later units, so the two need not agree.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.keys import HeadReading, Key
from mainstem.analysis.neuron_keys import neuron_of
from mainstem.analysis.parts import Group
from mainstem.analysis.queries import Query, Shares
from mainstem.errors import NotChosenError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap
from mainstem.run.capture import Captured, capture
from mainstem.run.moment import moment
from mainstem.units import Unit

Removal = tuple[int, Float[Tensor, " d_model"]]
"""The number of a write, and what is subtracted from it."""


@dataclass(frozen=True, eq=False)
class QueryCheck:
    """What became of a value unit when its queries were taken away, in the key's quantity.

    Attributes:
        share: the sum of the queries' shares.
        before, after: the quantity with and without them.
        controls: for each draw before minus after.
    """

    unit: Unit
    side: str
    quantity: str
    queries: tuple[Unit, ...]
    share: float
    before: float
    after: float
    controls: tuple[float, ...]

    @property
    def change(self) -> float:
        """Before minus after: what the queries gave."""
        return self.before - self.after

    @property
    def control(self) -> float:
        """The mean of the controls, 0 without any."""
        return fmean(self.controls) if self.controls else 0.0

    @property
    def holds(self) -> bool:
        """Whether at least half of the share was lost, less than that to the mean control, and to none as much."""
        sign = 1 if self.share >= 0 else -1
        least, change = abs(self.share) / 2, sign * self.change
        return change >= least and sign * self.control < least and all(sign * one < change for one in self.controls)


@torch.no_grad()
def check_queries(
    model: torch.nn.Module,
    anatomy: Anatomy,
    input_ids: Int[Tensor, "1 pos"],
    destination: int,
    shares: Shares,
    queries: Sequence[Query],
    reading: HeadReading | None = None,
    draws: int = 10,
    seed: int = 0,
    **forward: Any,
) -> QueryCheck:
    """Takes the queries' writes away at the position that the key reads.

    Args:
        model: the module.
        anatomy: its anatomy.
        input_ids: one prompt, without padding.
        destination: the position whose value unit it is.
        shares: of the value unit's key.
        queries: the units to take away, from `shares`.
        reading: of the head, for an attention value or a pattern.
        draws: how many controls.
        seed: of the controls.
        forward: further arguments of the forward call.

    Raises:
        UsageError: if a query is no write, such as a bias that a norm adds.
    """
    generator = torch.Generator().manual_seed(seed)
    sets = [[], _removals(anatomy, queries)]
    sets += [_removals(anatomy, queries, generator) for _ in range(draws)]
    ids = input_ids.expand(len(sets), -1).contiguous()
    last = torch.full((len(sets), 1), destination, device=ids.device)
    edits = _edits(anatomy, sets, shares.key.moment.position)
    run = capture(model, anatomy, ids, last, edits=edits, **forward)
    seen = [_quantity(anatomy, run, row, shares.key, reading) for row in range(len(sets))]
    return QueryCheck(
        unit=shares.key.unit,
        side=shares.key.side,
        quantity=shares.key.quantity,
        queries=tuple(query.unit for query in queries),
        share=sum(query.share for query in queries),
        before=seen[0],
        after=seen[1],
        controls=tuple(seen[0] - value for value in seen[2:]),
    )


def _removals(anatomy: Anatomy, queries: Sequence[Query], generator: torch.Generator | None = None) -> list[Removal]:
    """What is subtracted: the queries' own writes, or those of random units of their groups at the same norms."""
    writes = {node: i for i, node in enumerate(anatomy.write_nodes)}
    own: dict[int, set[int]] = defaultdict(set)
    for query in queries:
        own[id(query.group)].add(query.index)
    found: list[Removal] = []
    for query in queries:
        if query.group.node not in writes:
            raise UsageError(f"{query.unit} is no write of a unit", None, "Take away heads, subvalues or neurons.")
        for piece in query.group.pieces:
            vector = piece.raw(torch.tensor([query.index], device=piece.coefficients.device))[0]
            if generator is not None:
                vector = _control(piece, own[id(query.group)], vector, generator)
            found.append((writes[piece.node], vector))
    return found


def _control(group: Group, own: set[int], vector: Tensor, generator: torch.Generator) -> Tensor:
    """Another unit's write at the norm of `vector`; a random direction where the sublayer has no other unit."""
    count = len(group)
    other = torch.randn(len(vector), generator=generator, dtype=torch.float64).to(vector.device)
    if count > len(own):
        while (index := int(torch.randint(count, (1,), generator=generator))) in own:
            pass
        written = group.raw(torch.tensor([index], device=vector.device))[0]
        other = written if float(written.norm()) > 0 else other
    return other * (vector.norm() / other.norm())


def _edits(anatomy: Anatomy, sets: Sequence[Sequence[Removal]], position: int) -> list[tuple[Site, Tap]]:
    """Taps that subtract each set's vectors in its row of the batch."""
    by_write: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for row, removals in enumerate(sets):
        for write, vector in removals:
            by_write[write].append((row, vector))
    return [
        (anatomy.writes[write].site, _subtracting(anatomy.writes[write].site, found, len(sets), position))
        for write, found in by_write.items()
    ]


def _subtracting(site: Site, found: list[tuple[int, Tensor]], batch: int, position: int) -> Tap:
    def tap(leaves: list[Any]) -> list[Any]:
        tensor = leaves[site.slot]
        if tensor.numel() % batch or tensor.shape[0] == 1:
            raise UsageError("This model computes a write once for all rows of a batch", str(site), "Leave it out.")
        index = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        places = (index.transpose(0, 1) if site.positions_first else index).reshape(batch, -1, tensor.shape[-1])
        out = tensor.clone(memory_format=torch.contiguous_format)
        for row, vector in found:
            out.view(-1)[places[row, position]] -= vector.to(out)
        return [out if i == site.slot else leaf for i, leaf in enumerate(leaves)]

    return tap


def _quantity(anatomy: Anatomy, run: Captured, row: int, key: Key, reading: HeadReading | None) -> float:
    """The key's quantity in one row of a run."""
    made = moment(anatomy, run, row, 0, 0)
    if reading is None:
        try:
            return neuron_of(made, key.unit).quantity[1]
        except NotChosenError:
            return 0.0  # without its queries the router passes its expert by
    core = anatomy.writes[reading.operands.write].attention
    assert core is not None
    if key.side == "value":
        changed = replace(reading, heads=replace(reading.heads, value=made.attention[core.site].value))
        assert key.weights is not None
        return float(key.weights @ changed.value)
    received = run.attention[core.site]
    if received.query is None or received.key is None:
        raise UsageError("The pattern's query and key were not seen", str(key.unit), "Check the value side.")
    n_heads, n_keys = received.query.shape[1], received.key.shape[1]
    query = received.query[row, reading.head, 0].double()
    return float(query @ received.key[row, reading.head * n_keys // n_heads, reading.source].double()) * float(
        reading.operands.scaling
    )
