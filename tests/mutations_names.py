"""Mistakes about which sublayer is which, and about the readout, that a certificate must catch."""

from collections.abc import Mapping
from dataclasses import replace

from mutants import Mutant, Subject, middle, mutation, with_writes

from mainstem.model.anatomy import Readout
from mainstem.units import Unit

# --- names of sublayers -------------------------------------------------------------------------------------


def _renamed(s: Subject, names: Mapping[Unit, Unit]) -> Mutant:
    """Writes, reads and owners under other names."""
    anatomy = with_writes(s.anatomy, lambda i, w: replace(w, unit=names.get(w.unit, w.unit)))
    reads = tuple(replace(r, unit=names.get(r.unit, r.unit)) for r in anatomy.reads)
    owners = tuple(None if o is None else names.get(o, o) for o in anatomy.owners)
    return Mutant(replace(anatomy, reads=reads, owners=owners), by="labels")


@mutation
def attention_and_mlp_called_by_each_others_name(s: Subject) -> Mutant | None:
    units = s.anatomy.sublayers()
    layer = middle([u.layer for u in units if u.place == "attn" and Unit.write(u.layer or 0, "mlp") in units])
    if layer is None:
        return None
    a, b = Unit.write(layer, "attn"), Unit.write(layer, "mlp")
    return _renamed(s, {a: b, b: a})


@mutation
def two_layers_called_by_each_others_name(s: Subject) -> Mutant | None:
    """Both sublayers of the first and the last block, in writes alone."""
    last = s.anatomy.sizes.n_layers - 1
    moved = {0: last, last: 0}
    if last < 1:
        return None

    def name(unit: Unit) -> Unit:
        return unit if unit.layer is None else replace(unit, layer=moved.get(unit.layer, unit.layer))

    return Mutant(with_writes(s.anatomy, lambda i, w: replace(w, unit=name(w.unit))), by="labels")


@mutation
def embeddings_called_by_each_others_name(s: Subject) -> Mutant | None:
    units = s.anatomy.sublayers()
    a, b = Unit.embedding(), Unit.embedding("pos")
    return _renamed(s, {a: b, b: a}) if a in units and b in units else None


# --- the readout --------------------------------------------------------------------------------------------


def _with_readout(s: Subject, **changes) -> Mutant:
    return Mutant(replace(s.anatomy, readout=replace(s.anatomy.readout, **changes)), by="reads")


def _readout(s: Subject) -> Readout | None:
    return s.anatomy.readout if s.anatomy.readout.opaque is None else None


@mutation
def the_final_norms_gain_forgotten(s: Subject) -> Mutant | None:
    readout = _readout(s)
    if readout is None or readout.norm is None or readout.norm.gain is None:
        return None
    return _with_readout(s, norm=replace(readout.norm, gain=None))


@mutation
def the_final_norm_forgotten(s: Subject) -> Mutant | None:
    readout = _readout(s)
    return None if readout is None or readout.norm is None else _with_readout(s, norm=None)


@mutation
def the_final_norms_bias_forgotten(s: Subject) -> Mutant | None:
    readout = _readout(s)
    if readout is None or readout.norm is None or readout.norm.bias is None:
        return None
    return _with_readout(s, norm=replace(readout.norm, bias=None))


@mutation
def the_unembeddings_bias_forgotten(s: Subject) -> Mutant | None:
    readout = _readout(s)
    return None if readout is None or readout.bias is None else _with_readout(s, bias=None)


@mutation
def the_logits_scale_forgotten(s: Subject) -> Mutant | None:
    readout = _readout(s)
    return None if readout is None or readout.scale == 1.0 else _with_readout(s, scale=1.0)


@mutation
def the_logits_softcap_forgotten(s: Subject) -> Mutant | None:
    readout = _readout(s)
    return None if readout is None or readout.softcap is None else _with_readout(s, softcap=None)


@mutation
def the_unembeddings_rows_shifted(s: Subject) -> Mutant | None:
    """Every token under its neighbour's name."""
    readout = _readout(s)
    return None if readout is None else _with_readout(s, unembedding=readout.unembedding.roll(1, 0))
