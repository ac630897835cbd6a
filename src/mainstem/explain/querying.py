"""Queries put together: the shares of earlier units in a value unit's key, and what those read as.

Each step is one call into the analysis; nothing is computed here that is not computed there.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mainstem.analysis.attribution import promoted
from mainstem.analysis.decompose import decompose
from mainstem.analysis.keys import HeadReading, evaluated, through_head
from mainstem.analysis.queries import TOTALS, Query, Shares, query_totals, read_vectors, shares_of, written
from mainstem.causal.query_check import QueryCheck, check_queries
from mainstem.errors import ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.explain.unit_keys import key_of, with_source
from mainstem.intervene.intervening import require_whole_edits
from mainstem.model.graph import maps_to_root
from mainstem.results.explanation import Queries, QueryRow, QueryTotals
from mainstem.run.inputs import base_arguments
from mainstem.targets import Target
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.tracing import Trace

SHOWN_TOKENS = 5
WRITERS = ("sublayer", "head", "attention_subvalue", "attention_neuron", "ffn_neuron", "expert_neuron")
"""The kinds of unit that a check can take away."""


def queries(
    trace: "Trace",
    unit: Unit | str,
    level: str = "units",
    top: int = 10,
    position: int = -1,
    side: str = "value",
    target: str | Sequence[str] | Target | None = None,
    negative: bool = False,
    row: int = 0,
) -> Queries:
    """Which earlier units activate a value unit.

    Args:
        trace: the run.
        unit: an FFN neuron (L24N1005), an attention subvalue (L23H4@3) or an attention neuron of one source
            (L9H8.17@3).
        level: how far the stream that the unit reads is taken apart; as for `Trace.decompose`.
        top: how many earlier units to list, the largest shares first.
        position: the destination, negative from the end.
        side: of attention: `value`, what the source's value adds (for a subvalue: to the target's logit, directly), or
            the `query` or `key` side of the pattern's score, the other side as it is.
        target: what a subvalue's direct effect is on; by default the model's own prediction.
        negative: list the shares against the quantity instead.
        row: which prompt of a batch.

    Raises:
        UnitError: if the unit is no value unit of the model.
        LevelRefusedError: if it has no key, or an earlier sublayer cannot be split to the level.
        CertificateError: if the shares do not add up to what the model computed.
    """
    if top < 1:
        raise UsageError("Nothing to list", f"top {top}", "Ask for at least one.")
    wanted = Unit.parse(unit) if isinstance(unit, str) else unit
    key, reading = key_of(trace, wanted, position, side, target, row)
    shares = shares_of(key, level)
    shares.require()
    return _as_data(trace, shares, reading, shares.top(top, negative), position, row)


def _as_data(
    trace: "Trace", shares: Shares, reading: HeadReading | None, found: list[Query], position: int, row: int
) -> Queries:
    key = shares.key
    return Queries(
        of=str(key.unit),
        kind=key.unit.kind,
        side=key.side,
        quantity=key.quantity,
        level=shares.level,
        position=trace.inputs.place(position, row),
        reads=key.moment.position,
        observed=key.observed,
        positives=shares.positives,
        negatives=shares.negatives,
        net=shares.net,
        constant=shares.constant,
        relative_error=shares.relative_error,
        tolerance=shares.tolerance / shares.size,
        holds=shares.holds,
        rows=_rows(trace, shares, reading, found, row),
    )


def _rows(trace: "Trace", shares: Shares, reading: HeadReading | None, found: list[Query], row: int) -> list[QueryRow]:
    if not found:
        return []
    key = shares.key
    if reading is not None and key.side == "value":
        tail = maps_to_root(key.moment.anatomy.graph, evaluated(reading.here), reading.here.gates)[
            key.moment.anatomy.write_nodes[reading.operands.write]
        ]
        out = through_head(reading, read_vectors(found))
        vectors, seen, through = (out if tail is None else tail(out[None])[0]), reading.here, str(_head(key.unit))
    else:
        vectors, seen, through = written(shares, found), key.moment, None
    up, down = promoted(decompose(seen, "sublayers"), vectors, SHOWN_TOKENS)
    names, tokens = trace.model.token, trace.tokens(row)
    return [
        QueryRow(
            unit=str(query.unit),
            kind=query.group.kind,
            of=str(key.unit),
            share=query.share,
            coefficient=query.coefficient,
            promotes=[names(int(t)) for t in up[i]],
            suppresses=[names(int(t)) for t in down[i]],
            through=through,
            source=tokens[query.unit.source] if query.unit.source is not None else None,
        )
        for i, query in enumerate(found)
    ]


def _head(unit: Unit) -> Unit:
    return replace(unit, source=None, neuron=None)


def queries_of(
    trace: "Trace", units: Sequence[Unit], count: int, position: int, target: Target, row: int
) -> tuple[list[Queries], list[dict[str, str]]]:
    """The queries of several value units, and for those that have no key the reason.

    An attention neuron that is summed over sources is asked about at the source that gives it most.
    """
    found: list[Queries] = []
    refused: list[dict[str, str]] = []
    asked = [with_source(trace, unit, position, row) for unit in units]
    trace.run.keep([unit.source for unit in asked if unit.source is not None], row)
    for unit in asked:
        try:
            found.append(queries(trace, unit, "units", count, position, "value", target, row=row))
        except (UnitError, LevelRefusedError) as error:
            refused.append({"unit": str(unit), "reason": error.description})
    return found, refused


def check(
    trace: "Trace",
    unit: Unit | str,
    count: int = 10,
    level: str = "units",
    position: int = -1,
    side: str = "value",
    target: str | Sequence[str] | Target | None = None,
    kinds: Sequence[str] = WRITERS,
    draws: int = 10,
    row: int = 0,
) -> QueryCheck:
    """Takes the queries of a value unit away in a real run, and norm-matched random units of the same sublayers.

    Args:
        trace: the run.
        unit: as for `queries`.
        count: how many of its queries, the largest shares first.
        level: as for `queries`.
        position: as for `queries`.
        side: as for `queries`.
        target: as for `queries`.
        kinds: which kinds of unit to take away.
        draws: how many controls.
        row: which prompt of a batch.

    Raises:
        UsageError: if no unit of these kinds speaks for the value unit; further those of `queries`.
    """
    wanted = Unit.parse(unit) if isinstance(unit, str) else unit
    key, reading = key_of(trace, wanted, position, side, target, row)
    shares = shares_of(key, level)
    shares.require()
    chosen = shares.top(count, kinds=kinds)
    if not chosen:
        raise UsageError(f"Nothing of these kinds activates {wanted}", ", ".join(kinds), "Name other kinds.")
    ids = trace.inputs.ids[row : row + 1, trace.inputs.padding[row] :]
    trace.run.require_same_edits()
    require_whole_edits(trace.model)
    module, anatomy = trace.model.module, trace.model.anatomy
    destination, seed = trace.inputs.place(position, row), trace.model.seed
    return check_queries(
        module, anatomy, ids, destination, shares, chosen, reading, draws, seed, **base_arguments(module)
    )


def totals(
    trace: "Trace",
    values: Sequence[tuple[Unit | str, float]],
    over: str = "layers",
    top: int = 10,
    position: int = -1,
    target: str | Sequence[str] | Target | None = None,
    row: int = 0,
) -> QueryTotals:
    """Query layers, heads or neurons: each earlier unit's ratio of a value's key, times the value's increase, summed.

    Args:
        trace: the run.
        values: value units and their log-probability increases, in nats, as `explain` lists them; an attention neuron
            that is summed over sources is asked about at the source that gives it most.
        over: `layers`, `heads` or `neurons`.
        top: how many to list.
        position: as for `queries`.
        target: as for `queries`.
        row: as for `queries`.

    Raises:
        ChoiceError: if `over` is none of these.
        CertificateError: if the shares of a value do not add up.
    """
    if over not in TOTALS:
        raise ChoiceError("sum of queries", over, tuple(TOTALS))
    parsed = [(Unit.parse(unit) if isinstance(unit, str) else unit, increase) for unit, increase in values]
    units = [(with_source(trace, unit, position, row), increase) for unit, increase in parsed]
    trace.run.keep([unit.source for unit, _ in units if unit.source is not None], row)
    made: list[tuple[Shares, float]] = []
    refused: dict[str, str] = {}
    for unit, increase in units:
        try:
            key, _ = key_of(trace, unit, position, "value", target, row)
        except LevelRefusedError as error:
            refused[str(unit)] = error.description
            continue
        shares = shares_of(key, TOTALS[over])
        shares.require()
        made.append((shares, increase))
    found, left_out = query_totals(made, over, top)
    return QueryTotals(
        over=over,
        rows=[{"unit": str(t.unit), "position": t.position, "score": t.score} for t in found],
        values=[str(shares.key.unit) for shares, _ in made],
        left_out=[str(unit) for unit in left_out],
        refused=refused,
    )
