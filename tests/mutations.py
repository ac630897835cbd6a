"""Mistakes about heads, sources, neurons and experts that a certificate must catch.

See `mutants` for the words. Each is made where it is hardest to see: at one place of the model where a sum is
compared, everywhere where only sampled labels can tell. A mutation that would change nothing (a gain of 1, an
activation of 0) gives None.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from mutants import (
    Mutant,
    Subject,
    cores_of,
    middle,
    mutation,
    neuron_writes,
    swapped,
    with_cores,
    with_heads,
    with_matrix,
    with_writes,
)
from torch import Tensor

from mainstem.analysis import decompose as decomposing
from mainstem.analysis.parts import UnitGrid
from mainstem.model import experts
from mainstem.model.expert_rows import ExpertRows
from mainstem.model.experts import ExpertParts
from mainstem.run import capture as capturing
from mainstem.run.moment import HeadRun, Moment

# --- heads --------------------------------------------------------------------------------------------------


@mutation
def two_heads_swapped(s: Subject) -> Mutant | None:
    """Two rows of the map from heads to W_O's input."""
    if not any(core.n_heads > 1 for core in cores_of(s.anatomy)):
        return None
    return Mutant(
        with_cores(
            s.anatomy,
            lambda c: c if c.n_heads < 2 else replace(c, channels=c.channels[swapped(c.n_heads, 0, c.n_heads - 1)]),
        )
    )


@mutation
def two_coordinates_swapped(s: Subject) -> Mutant | None:
    """Coordinates 0 of the first and 1 of the last head."""

    def change(channels: Tensor) -> Tensor:
        flat = channels.reshape(-1).clone()
        other = (channels.shape[0] - 1) * channels.shape[1] + 1
        return flat[swapped(len(flat), 0, other)].reshape(channels.shape)

    if not any(core.channels.shape[1] > 1 for core in cores_of(s.anatomy)):
        return None
    return Mutant(with_cores(s.anatomy, lambda c: replace(c, channels=change(c.channels))))


@mutation
def wrong_key_value_head(s: Subject) -> Mutant | None:
    """Every head reads the next key/value head."""
    if not any(h.value.shape[0] > 1 for h in s.moment.attention.values()):
        return None
    return Mutant(s.anatomy, with_heads(lambda h: replace(h, value=h.value.roll(1, 0))))


@mutation
def key_value_heads_interleaved(s: Subject) -> Mutant | None:
    """Head h reads key/value head h mod n in place of h // group."""

    def change(heads: HeadRun) -> HeadRun:
        n_heads, n_kv = heads.pattern.shape[0], heads.value.shape[0]
        return replace(heads, value=heads.value[torch.arange(n_heads) % n_kv])

    if not any(1 < h.value.shape[0] < h.pattern.shape[0] for h in s.moment.attention.values()):
        return None
    return Mutant(s.anatomy, with_heads(change))


# --- sources and destinations -------------------------------------------------------------------------------


@mutation
def values_shifted_by_one_source(s: Subject) -> Mutant | None:
    if not cores_of(s.anatomy):
        return None
    return Mutant(s.anatomy, with_heads(lambda h: replace(h, value=h.value.roll(1, 1))))


@mutation
def sources_called_by_their_neighbour(s: Subject) -> Mutant | None:
    """Pattern and values shifted together: every sum is right, and every address wrong."""
    if not cores_of(s.anatomy):
        return None
    return Mutant(
        s.anatomy,
        with_heads(lambda h: replace(h, value=h.value.roll(1, 1), pattern=h.pattern.roll(1, 1))),
        by="labels",
    )


@mutation
def a_source_dropped(s: Subject) -> Mutant | None:
    """The source with the largest weight of one head of one sublayer."""
    core = middle(cores_of(s.anatomy))
    if core is None:
        return None

    def change(m: Moment) -> Moment:
        heads = m.attention[core.site]
        pattern = heads.pattern.clone()
        pattern[0, int(pattern[0].argmax())] = 0
        return replace(m, attention={**m.attention, core.site: replace(heads, pattern=pattern)})

    return Mutant(s.anatomy, change)


@mutation
def pattern_of_the_position_before(s: Subject) -> Mutant | None:
    """The destination shifted by one in attention alone."""
    if not cores_of(s.anatomy):
        return None
    earlier = s.earlier
    return Mutant(
        s.anatomy,
        lambda m: replace(
            m,
            attention={k: replace(h, pattern=earlier.attention[k].pattern) for k, h in m.attention.items()},
        ),
    )


@mutation
def a_write_of_the_position_before(s: Subject) -> Mutant | None:
    index = len(s.anatomy.writes) - 1
    earlier = s.earlier

    def change(m: Moment) -> Moment:
        writes = [earlier.writes[i] if i == index else w for i, w in enumerate(m.writes)]
        sources = {i: earlier.sources[i] if i == index else z for i, z in m.sources.items()}
        return replace(m, writes=writes, sources=sources)

    return Mutant(s.anatomy, change)


# --- neurons ------------------------------------------------------------------------------------------------


def _live_neurons(s: Subject, index: int) -> Tensor:
    """The neurons of a write, the largest first."""
    write = s.anatomy.writes[index]
    assert write.projection is not None
    columns = write.projection.columns(slice(None)).double().norm(dim=0)
    return (columns * s.moment.sources[index].double().abs()).argsort(descending=True)


@mutation
def a_neuron_dropped(s: Subject) -> Mutant | None:
    index = middle(neuron_writes(s.anatomy))
    if index is None:
        return None
    neuron = int(_live_neurons(s, index)[0])

    def change(matrix: Tensor) -> Tensor:
        matrix = matrix.clone()
        matrix[:, neuron] = 0
        return matrix

    return Mutant(with_writes(s.anatomy, lambda i, w: with_matrix(w, change) if i == index else w))


@mutation
def two_neurons_columns_swapped(s: Subject) -> Mutant | None:
    index = middle(neuron_writes(s.anatomy))
    if index is None:
        return None
    a, b = _live_neurons(s, index)[:2].tolist()

    def change(matrix: Tensor) -> Tensor:
        return matrix[:, swapped(matrix.shape[1], a, b)]

    return Mutant(with_writes(s.anatomy, lambda i, w: with_matrix(w, change) if i == index else w))


@mutation
def neurons_called_by_their_neighbour(s: Subject) -> Mutant | None:
    """Activations and columns shifted together: every sum is right, and every address wrong."""
    wrong = set(neuron_writes(s.anatomy))
    if not wrong:
        return None
    anatomy = with_writes(s.anatomy, lambda i, w: with_matrix(w, lambda m: m.roll(1, 1)) if i in wrong else w)
    return Mutant(
        anatomy,
        lambda m: replace(m, sources={i: z.roll(1, -1) if i in wrong else z for i, z in m.sources.items()}),
        by="labels",
    )


# --- addresses ----------------------------------------------------------------------------------------------


@mutation
def addresses_shifted_by_one(s: Subject) -> Mutant | None:
    """Every part of a grid of units under the next one's address."""
    if not cores_of(s.anatomy) and not neuron_writes(s.anatomy):
        return None

    def wrong(size: int, make) -> UnitGrid:
        return UnitGrid(size, lambda i: make((i + 1) % size))

    return Mutant(s.anatomy, None, "labels", ((decomposing, "UnitGrid", wrong),))


@mutation
def heads_addresses_reversed(s: Subject) -> Mutant | None:
    """Parts of the level of heads under each other's address."""
    if s.anatomy.refusals("heads") or not any(core.n_heads > 1 for core in cores_of(s.anatomy)):
        return None
    original = decomposing._vectors

    def wrong(units, kind, *args, **kwargs):
        return original(list(reversed(units)), kind, *args, **kwargs)

    return Mutant(s.anatomy, None, "labels", ((decomposing, "_vectors", wrong),))


# --- experts ------------------------------------------------------------------------------------------------


def _with_experts(m: Moment, change: Callable[[ExpertRows], ExpertRows]) -> Moment:
    parts = {
        name: ExpertParts(tuple(change(rows) for rows in made.rows), made.constant) for name, made in m.experts.items()
    }
    return replace(m, experts=parts)


def _stacked(s: Subject) -> bool:
    return any(
        rows.matrix.dim() == 3 and rows.matrix.shape[0] > 1 for p in s.moment.experts.values() for rows in p.rows
    )


@mutation
def wrong_experts_matrix(s: Subject) -> Mutant | None:
    """Each row's product taken with the next expert's matrix."""
    if not _stacked(s):
        return None
    return Mutant(
        s.anatomy,
        lambda m: _with_experts(m, lambda r: replace(r, matrix=r.matrix.roll(1, 0)) if r.matrix.dim() == 3 else r),
    )


@mutation
def experts_called_by_their_neighbour(s: Subject) -> Mutant | None:
    """Numbers and matrices shifted together: every sum is right, and every address wrong."""
    count = s.anatomy.sizes.n_experts
    if not s.moment.experts or not count or count < 2:
        return None

    def change(rows: ExpertRows) -> ExpertRows:
        matrix = rows.matrix.roll(1, 0) if rows.matrix.dim() == 3 else rows.matrix
        return replace(rows, expert=(rows.expert + 1) % count, matrix=matrix)

    original = experts.expert_parts

    def wrong(*args, **kwargs) -> ExpertParts:
        made = original(*args, **kwargs)
        return ExpertParts(tuple(change(rows) for rows in made.rows), made.constant)

    patches = ((capturing, "expert_parts", wrong), (experts, "expert_parts", wrong))
    return Mutant(s.anatomy, None, "labels", patches, run=True)


@mutation
def an_experts_neurons_shifted(s: Subject) -> Mutant | None:
    """Activations of every expert shifted by one neuron."""
    if not s.moment.experts:
        return None
    return Mutant(s.anatomy, lambda m: _with_experts(m, lambda r: replace(r, hidden=r.hidden.roll(1, -1))))


@mutation
def an_experts_weight_forgotten(s: Subject) -> Mutant | None:
    def change(rows: ExpertRows) -> ExpertRows:
        return replace(rows, weight=(rows.weight != 0).double())

    weights = [r.weight for p in s.moment.experts.values() for r in p.rows]
    if not any(((w != 0) & ((w - 1).abs() > 0.01)).any() for w in weights):
        return None
    return Mutant(s.anatomy, lambda m: _with_experts(m, change))
