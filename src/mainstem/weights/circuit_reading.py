"""The circuits of one head between tokens, read into plain rows.

Tables and searches are in `mainstem.analysis.head_circuits`. The table of embeddings is found by what it does: the
weight of the module that made the embedding's write, times a number, has to give that write in a run.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mainstem.analysis import warnings as warn
from mainstem.analysis.head_circuits import HeadCircuits, SkipTrigrams, head_circuits
from mainstem.analysis.token_vectors import Embedded
from mainstem.analysis.turned_tables import RATE, level
from mainstem.analysis.vocabulary_table import TopEntries, VocabularyTable
from mainstem.causal.reference import reference_text
from mainstem.errors import ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.model.discovery import probe_ids
from mainstem.model.hooks import Site, tapped
from mainstem.results.circuits import (
    AskedRow,
    CircuitReading,
    Copying,
    EntryRow,
    NamedRatio,
    TableSummary,
    TrigramRow,
)
from mainstem.results.reading import CheckSummary
from mainstem.targets import parse_token
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

EMBEDDINGS = ("plain", "normed")
"""Embeddings as they come out of the embedding, or each at its own scale of the norm that the head reads through."""

COPIED = 10
SINK_TOKENS = 32
SLACK = 1e-3


def read_circuits(
    model: "Model",
    head: Unit | str,
    skip_trigram: Sequence[str] = (),
    *,
    offset: int = 0,
    embedding: str = "plain",
    top: int = 10,
) -> CircuitReading:
    """QK and OV circuits of a head in the vocabulary, copying, and skip trigrams.

    Args:
        model: the model.
        head: its address.
        skip_trigram: source, destination and output to be looked up, as text of one token or `id:7042`.
        offset: destination minus source, for rotary embedding.
        embedding: one of `EMBEDDINGS`.
        top: how many of everything to list.

    Raises:
        UnitError: if the model has no such head. ChoiceError, UsageError, TokenError, PositionError: if an argument is
            wrong, or a circuit is zero everywhere.
        LevelRefusedError: if the head's weights, the embedding or the readout cannot be read.
        CertificateError: if the factored weights are not those of the model.
    """
    if embedding not in EMBEDDINGS:
        raise ChoiceError("kind of embedding", embedding, EMBEDDINGS)
    if len(skip_trigram) not in (0, 3) or whole_number("top", top) < 1:
        raise UsageError("A skip trigram is a source, a destination and an output", None, "Give all three of them.")
    unit = Unit.parse(head) if isinstance(head, str) else head
    if unit.kind != "head":
        raise UnitError(f"{unit} is no head", None, "Circuits are those of one head, such as L9H8.")
    circuits = circuits_of(model, unit, offset, embedding)
    factors = model.weights_check
    circuits.require_some()
    tables = (circuits.qk, circuits.ov)
    entries = [table.top(top) for table in tables]
    summaries = [_summary(table, found) for table, found in zip(tables, entries, strict=True)]
    return CircuitReading(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in _warnings(model, unit, summaries)],
        model=model.summary,
        head=str(unit),
        offset=offset,
        embedding=embedding,
        qk=summaries[0],
        ov=summaries[1],
        entries=[
            row
            for name, table, found in zip(("qk", "ov"), tables, entries, strict=True)
            for row in _entries(model, name, table, found)
        ],
        copying=_copying(circuits),
        trigrams=[_trigram(model, found) for found in circuits.skip_trigrams(top)],
        asked=_asked(model, circuits, skip_trigram),
        factors=CheckSummary(**asdict(factors)),
        notes=_notes(model, unit),
    )


def circuits_of(model: "Model", head: Unit | str, offset: int = 0, embedding: str = "plain") -> HeadCircuits:
    """The tables themselves, as factors; arguments and errors as `read_circuits`."""
    weights = model.weights
    qk, ov = weights.qk(head, offset), weights.ov(head)
    rows = token_embedding(model)
    if embedding == "normed":
        unit = Unit.parse(head) if isinstance(head, str) else head
        read = next(read for read in model.anatomy.reads if read.unit == unit.sublayer and "value" in read.roles)
        rows = rows if read.norm is None else rows.scaled(read.norm.scale)
    return head_circuits(qk, ov, rows, model.anatomy.readout)


def token_embedding(model: "Model") -> Embedded:
    """Each token's vector as the embedding writes it.

    Raises:
        LevelRefusedError: if it is no table of the module that writes it, times a number.
    """
    write = next(write for write in model.anatomy.writes if str(write.unit) == "embed")
    ids = probe_ids(model.module)[0].tolist()
    tables: list[Any] = [getattr(model.module.get_submodule(write.module), "weight", None)]
    looked_up = Site(write.module, write.site.call, "arguments", 1, "embedding")  # made of the module's own, perhaps
    with tapped(model.module, [(looked_up, lambda leaves: tables.extend(leaves[1:2]))]):
        written = model.trace(ids).write(write.unit).double()
    reason = f"{write.module or 'the model'} holds no table of vectors of the stream"
    for table in tables:
        if isinstance(table, Tensor) and table.dim() == 2 and table.shape[1] == written.shape[1]:
            found = _factor(table.detach(), ids, written)
            if found is not None:
                factors = torch.full((len(table),), found, dtype=torch.float64, device=table.device)
                return Embedded(table.detach(), factors)
            reason = "what it writes is more than a row of a table times a number"
    raise LevelRefusedError("Circuits need a vector for each token", "embed", reason)


def _factor(table: Tensor, ids: list[int], written: Tensor) -> float | None:
    """The number that rows of the table are written times; None if they are not."""
    rows = table[torch.tensor(ids, device=table.device)].double()
    factor = float((rows * written).sum() / rows.pow(2).sum())
    if not float((factor * rows - written).norm()) <= SLACK * float(written.norm()):
        return None
    return 1.0 if abs(factor - 1) <= SLACK else factor


def _summary(table: VocabularyTable, found: TopEntries) -> TableSummary:
    strengths = table.balanced.columns.pow(2).sum(0).pow(2)
    share = float(strengths.max() / strengths.sum())
    return TableSummary(table.size, level(table) / table.size, RATE, found.slack, found.computed, share)


def _entries(model: "Model", name: str, table: VocabularyTable, found: TopEntries) -> list[EntryRow]:
    rows = zip(found.rows.tolist(), found.columns.tolist(), found.values.tolist(), strict=True)
    return [
        EntryRow(name, model.token(row), row, model.token(column), column, value, value / table.size)
        for row, column, value in rows
    ]


def _copying(circuits: HeadCircuits) -> Copying:
    ranks = circuits.own_ranks()
    among = float((ranks <= COPIED).double().mean())
    return Copying(circuits.copying, len(ranks), among, COPIED, float(ranks.median()), COPIED / len(circuits.ov.rows))


def _trigram(model: "Model", found: SkipTrigrams) -> TrigramRow:
    def named(tokens: tuple[tuple[int, float], ...]) -> list[NamedRatio]:
        return [NamedRatio(model.token(token), token, ratio) for token, ratio in tokens]

    return TrigramRow(
        model.token(found.source), found.source, found.score, named(found.destinations), named(found.outs)
    )


def _asked(model: "Model", circuits: HeadCircuits, texts: Sequence[str]) -> AskedRow | None:
    if not texts:
        return None
    sizes = (len(circuits.qk.columns), len(circuits.qk.rows), len(circuits.ov.rows))
    source, destination, out = (
        parse_token(text, model.tokenizer, size) for text, size in zip(texts, sizes, strict=True)
    )
    qk, ov = circuits.qk, circuits.ov
    reads, says = qk.row(destination) / qk.size, ov.column(source) / ov.size
    return AskedRow(
        source=model.token(source),
        destination=model.token(destination),
        out=model.token(out),
        qk=float(reads[source]),
        ov=float(says[out]),
        source_rank=int((reads > reads[source]).sum()) + 1,
        out_rank=int((says > says[out]).sum()) + 1,
    )


def _warnings(model: "Model", head: Unit, summaries: Sequence[TableSummary]) -> list[warn.Warning]:
    found = warn.tied_tables_warning(model.anatomy.tied)
    for name, summary in zip(("QK", "OV"), summaries, strict=True):
        found += warn.one_dimension_warning(name, summary.one_direction)
    return found + warn.head_sink_warning(_first_share(model, head))


def _first_share(model: "Model", head: Unit) -> float:
    """What a head gives to the first position of a text, on average over the later half of the positions."""
    if model.tokenizer is None:
        ids = probe_ids(model.module)[0].tolist()
    else:
        ids = model.encode(reference_text())[:SINK_TOKENS]
    positions = range(len(ids) // 2, len(ids))
    trace = model.trace(ids, positions=positions)
    index = next(i for i in model.anatomy.writes_of(head.sublayer) if model.anatomy.writes[i].attention is not None)
    core = model.anatomy.writes[index].attention
    assert core is not None and head.head_index is not None
    rows = [trace.run.moment(position).attention[core.site].pattern[head.head_index] for position in positions]
    return sum(float(row[0]) for row in rows) / len(rows)


def _notes(model: "Model", head: Unit) -> list[str]:
    notes = [
        "Scales of norms are left out, and so are biases; QK entries are above the mean source, OV entries above the "
        "mean output; ratios are in units of the table's root mean square.",
        "Every destination of a source goes with every output of it: a head factors, so two skip trigrams force those "
        "with their destinations exchanged.",
    ]
    if head.layer:
        notes.append(
            f"{head} reads what {head.layer} earlier blocks wrote, too: the tables are those of the direct path from "
            "the embedding to the head and from the head to the logits."
        )
    return notes + list(model.weights.approximations)
