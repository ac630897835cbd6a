"""Mistakes about the stream, its reads and its readout that a certificate must catch."""

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
    with_cores,
    with_nodes,
    with_terms,
    with_writes,
)

from mainstem.model.anatomy import Anatomy
from mainstem.model.graph import NormNode, SumNode, Term, behind

# --- norms --------------------------------------------------------------------------------------------------


def _norms(s: Subject, behind_root: bool) -> list[tuple[int, NormNode]]:
    """Norms on the way from writes to the last stream value, or those of reads alone."""
    used = behind(s.anatomy.graph, s.anatomy.graph.root)
    nodes = enumerate(s.anatomy.graph.nodes)
    return [(i, n) for i, n in nodes if isinstance(n, NormNode) and (i in used) == behind_root]


def _without_norm(s: Subject, behind_root: bool) -> Mutant | None:
    found = middle(_norms(s, behind_root))
    if found is None:
        return None
    place, node = found
    by = "sublayers" if behind_root else "reads"
    return Mutant(with_nodes(s.anatomy, {place: SumNode((Term(node.node),), None, node.dtype)}), by=by)


@mutation
def the_norm_of_a_read_forgotten(s: Subject) -> Mutant | None:
    return _without_norm(s, behind_root=False)


@mutation
def a_norm_in_the_stream_forgotten(s: Subject) -> Mutant | None:
    return _without_norm(s, behind_root=True)


def _without(s: Subject, behind_root: bool, what: str) -> Mutant | None:
    found = middle([(i, n) for i, n in _norms(s, behind_root) if getattr(n.norm, what) is not None])
    if found is None:
        return None
    place, node = found
    by = "sublayers" if behind_root else "reads"
    return Mutant(with_nodes(s.anatomy, {place: replace(node, norm=replace(node.norm, **{what: None}))}), by=by)


@mutation
def the_gain_of_a_reads_norm_forgotten(s: Subject) -> Mutant | None:
    return _without(s, behind_root=False, what="gain")


@mutation
def the_gain_of_a_norm_in_the_stream_forgotten(s: Subject) -> Mutant | None:
    return _without(s, behind_root=True, what="gain")


@mutation
def the_bias_of_a_reads_norm_forgotten(s: Subject) -> Mutant | None:
    return _without(s, behind_root=False, what="bias")


@mutation
def the_bias_of_a_norm_in_the_stream_forgotten(s: Subject) -> Mutant | None:
    return _without(s, behind_root=True, what="bias")


@mutation
def a_norm_not_centred(s: Subject) -> Mutant | None:
    found = middle([(i, n) for i, n in [*_norms(s, True), *_norms(s, False)] if n.norm.centred])
    if found is None:
        return None
    place, node = found
    return Mutant(with_nodes(s.anatomy, {place: replace(node, norm=replace(node.norm, centred=False))}), by="reads")


# --- factors, gates, biases, terms --------------------------------------------------------------------------


def _sums(anatomy: Anatomy) -> list[tuple[int, SumNode]]:
    return [(i, n) for i, n in enumerate(anatomy.graph.nodes) if isinstance(n, SumNode)]


def _terms(anatomy: Anatomy, wanted: Callable[[Term], bool]) -> list[tuple[int, SumNode, int]]:
    return [(i, n, k) for i, n in _sums(anatomy) for k, term in enumerate(n.terms) if wanted(term)]


@mutation
def a_multiplier_forgotten(s: Subject) -> Mutant | None:
    """A constant factor, a number or one for each channel."""

    def multiplies(term: Term) -> bool:
        return term.gate is None and bool(((torch.as_tensor(term.factor) - 1).abs() > 1e-4).any())

    found = middle(_terms(s.anatomy, multiplies))
    if found is None:
        return None
    place, node, k = found
    terms = tuple(replace(t, factor=1.0) if j == k else t for j, t in enumerate(node.terms))
    return Mutant(with_terms(s.anatomy, place, terms), by="sublayers")


@mutation
def a_gate_forgotten(s: Subject) -> Mutant | None:
    """A factor that the run computed."""
    found = middle(_terms(s.anatomy, lambda term: term.gate is not None))
    if found is None:
        return None
    place, node, k = found
    terms = tuple(replace(t, gate=None, factor=1.0) if j == k else t for j, t in enumerate(node.terms))
    return Mutant(with_terms(s.anatomy, place, terms), by="sublayers")


@mutation
def an_added_bias_forgotten(s: Subject) -> Mutant | None:
    found = middle([(i, n) for i, n in _sums(s.anatomy) if n.bias is not None])
    if found is None:
        return None
    place, node = found
    return Mutant(with_nodes(s.anatomy, {place: replace(node, bias=None)}))


@mutation
def the_bias_of_a_write_forgotten(s: Subject) -> Mutant | None:
    which = middle([i for i, w in enumerate(s.anatomy.writes) if w.bias is not None and not w.refusals])
    if which is None:
        return None
    return Mutant(with_writes(s.anatomy, lambda i, w: replace(w, bias=None) if i == which else w))


def _additions(s: Subject) -> list[tuple[int, SumNode]]:
    used = behind(s.anatomy.graph, s.anatomy.graph.root)
    return [(i, n) for i, n in _sums(s.anatomy) if len(n.terms) > 1 and i in used]


@mutation
def a_term_dropped(s: Subject) -> Mutant | None:
    found = middle(_additions(s))
    if found is None:
        return None
    place, node = found
    return Mutant(with_terms(s.anatomy, place, node.terms[:-1]))


@mutation
def a_term_counted_twice(s: Subject) -> Mutant | None:
    found = middle(_additions(s))
    if found is None:
        return None
    place, node = found
    return Mutant(with_terms(s.anatomy, place, (*node.terms, node.terms[-1])), by="sublayers")


@mutation
def a_step_before_the_output_matrix_forgotten(s: Subject) -> Mutant | None:
    if not any(core.steps for core in cores_of(s.anatomy)):
        return None
    return Mutant(with_cores(s.anatomy, lambda core: replace(core, steps=())))


# --- matrices -----------------------------------------------------------------------------------------------


def _another_layers(s: Subject, indices: list[int]) -> Mutant | None:
    """Two writes of the same shape, the first with the second's matrices."""
    writes = s.anatomy.writes
    shapes = {i: [tuple(f.shape) for f in writes[i].projection.factors] for i in indices}

    def differ(a: int, b: int) -> bool:
        pairs = zip(writes[a].projection.factors, writes[b].projection.factors, strict=True)
        return not all(torch.equal(mine, other) for mine, other in pairs)

    pairs = [(i, j) for i in indices for j in indices if i < j and shapes[i] == shapes[j] and differ(i, j)]
    if not pairs:
        return None
    a, b = pairs[0]
    wrong = replace(writes[a], projection=writes[b].projection)
    return Mutant(with_writes(s.anatomy, lambda i, w: wrong if i == a else w))


@mutation
def another_layers_output_matrix(s: Subject) -> Mutant | None:
    """W_O of another layer."""
    sites = {core.site for core in cores_of(s.anatomy)}
    return _another_layers(s, [i for i, w in enumerate(s.anatomy.writes) if w.attention and w.attention.site in sites])


@mutation
def another_layers_neurons(s: Subject) -> Mutant | None:
    """W_out of another layer."""
    return _another_layers(s, neuron_writes(s.anatomy))


# --- reads --------------------------------------------------------------------------------------------------


@mutation
def key_and_value_matrices_swapped(s: Subject) -> Mutant | None:
    """In the first sublayer where both are matrices of their own and of one shape."""
    reads = s.anatomy.reads
    for i, read in enumerate(reads):
        for j, other in enumerate(reads):
            pair = (read.roles, other.roles) == (("key",), ("value",)) and read.unit == other.unit
            if pair and read.weight.shape == other.weight.shape and not torch.equal(read.weight, other.weight):
                changed = {i: other.weight, j: read.weight}
                made = tuple(replace(r, weight=changed.get(k, r.weight)) for k, r in enumerate(reads))
                return Mutant(replace(s.anatomy, reads=made), by="reads")
    return None


@mutation
def a_read_of_another_stream_value(s: Subject) -> Mutant | None:
    """The last read, of the value that the first one reads."""
    reads = s.anatomy.reads
    if not reads or reads[-1].node == reads[0].node or reads[-1].stream_node == reads[0].stream_node:
        return None
    wrong = replace(reads[-1], node=reads[0].node)
    return Mutant(replace(s.anatomy, reads=(*reads[:-1], wrong)), by="reads")


@mutation
def the_bias_of_a_read_forgotten(s: Subject) -> Mutant | None:
    which = middle([i for i, read in enumerate(s.anatomy.reads) if read.bias is not None])
    if which is None:
        return None
    made = tuple(replace(r, bias=None) if i == which else r for i, r in enumerate(s.anatomy.reads))
    return Mutant(replace(s.anatomy, reads=made), by="reads")
