"""Putting an explanation together: target, layers, values, account, certificates, warnings.

Each step is one call into the analysis; nothing is computed here that is not computed there.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mainstem.analysis import warnings as warn
from mainstem.analysis.attribution import Scored, attribute, functional, nats, promoted
from mainstem.analysis.certificate import Check, check_reads
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.increase import increases
from mainstem.analysis.lens import Lens, lens
from mainstem.analysis.ranking import KIND_LEVELS, Ranking, rank
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.recomputed import direct_recomputed
from mainstem.analysis.scores import RULES, check_score
from mainstem.errors import ChoiceError, LevelRefusedError, UsageError
from mainstem.explanation import Certificate, CheckSummary, Explanation, LayerRow, Token, ValueRow
from mainstem.querying import queries_of
from mainstem.scoring import existing_kinds, measured_levels, require_kinds
from mainstem.targeting import chosen_target
from mainstem.targets import Target
from mainstem.units import Unit
from mainstem.verifying import verify_trace

if TYPE_CHECKING:
    from mainstem.session import Trace

DEFAULT_KINDS = ("attention_subvalue", "ffn_neuron", "expert_neuron")
SHOWN_TOKENS = 5
FAR = 1000
"""From this rank on a note says that the target is far from being predicted."""


def explain(
    trace: "Trace",
    target: str | Sequence[str] | Target | None = None,
    against: str | Sequence[str] = (),
    position: int = -1,
    score: str = "increase",
    norm: NormConvention = "frozen",
    kinds: Sequence[str] = DEFAULT_KINDS,
    negative: bool = False,
    exhaustive: bool = False,
    top: int = 10,
    queries: int = 0,
    ablate: Mapping[str, int] | None = None,
    everywhere: bool = False,
    row: int = 0,
) -> Explanation:
    """Who wrote a prediction into the stream.

    Args:
        trace: the run.
        target: literal text or `id:N`, several for a set; by default the model's own prediction.
        against: rivals: then the target's logit minus the mean of theirs is explained.
        position: the destination, negative from the end.
        score: what values are ranked by: `increase` (log-probability increase, exact by search), or any other of
            `mainstem.analysis.scores.RANKINGS`, which that module defines.
        norm: `frozen` or `recompute`; `additive` is defined under `frozen` only.
        kinds: which units to list: sublayer, head, attention_subvalue, attention_neuron, ffn_neuron, expert_neuron;
            by default subvalues and neurons, or sublayers where the model has neither.
        negative: list the units that speak against the target.
        exhaustive: score every unit instead of those that the bounds cannot exclude; for checking, and slow.
        top: how many.
        queries: how many earlier units to list for each of them, those that activate it (see `mainstem.querying`).
        ablate: for a causal verdict, how many units to take out, as in {"ffn": 25, "attention": 75}.
        everywhere: take them out at all positions, not at the destination alone.
        row: which prompt of a batch.

    Raises:
        UsageError and its kinds: if an argument is wrong; LevelRefusedError, CertificateError as in `Trace.decompose`.
    """
    check_options(score, norm, kinds, top, negative, queries)
    if tuple(kinds) == DEFAULT_KINDS and not set(kinds) & set(existing_kinds(trace.model.anatomy)):
        kinds = ("sublayer",)  # nobody asked for what is not there
    require_kinds(trace.model.anatomy, kinds)
    decompositions = _decompositions(trace, kinds, position, row)
    main = decompositions["units"]
    wanted = chosen_target(trace, target, against, position, row)
    check_score(score, norm, negative, bool(wanted.against))
    given, notes = None, _notes(trace, wanted, position, row)
    if RULES[score].measured:
        given, more = measured_levels(trace, decompositions, wanted, score, set(kinds), row)
        notes += more
    ranking = rank(decompositions, wanted, score, norm, set(kinds), negative, exhaustive, top, given)
    certificate = _certificate(trace, main, check_reads(decompositions["sublayers"]), wanted, row)
    states = lens(decompositions["sublayers"])
    layers = _layers(trace, states, decompositions["sublayers"], wanted)
    token, rivals = _tokens(trace, wanted, position, row)
    found = _warnings(trace, main, ranking, states, row)
    values = [part.unit for part in ranking.values] if queries else []
    asked, refused = queries_of(trace, values, queries, position, wanted, row)
    anatomy, loaded = trace.model.anatomy, trace.model.loaded
    return Explanation(
        provenance=trace.model.provenance(),
        warnings=[w.as_dict() for w in found],
        model={
            "name": loaded.name,
            "n_layers": anatomy.sizes.n_layers,
            "d_model": anatomy.sizes.d_model,
            "dtype": loaded.dtype,
        },
        prompt={"text": trace.text, "tokens": trace.tokens(row), "ids": trace.ids(row)},
        position=main.position,
        target=token,
        against=rivals,
        norm=norm,
        score=score,
        certificate=certificate,
        layers=layers,
        values=_values(trace, decompositions, ranking, wanted, norm, row),
        kinds=list(kinds),
        account=_account(decompositions["sublayers"], wanted),
        search=ranking.search,
        notes=notes,
        queries=[one for made in asked for one in made.rows],
        query_sums=[made.sums() for made in asked],
        query_refusals=refused,
        verification=None
        if ablate is None
        else verify_trace(trace, wanted, ablate, score, norm, position, everywhere, row=row),
    )


def check_options(
    score: str, norm: str, kinds: Sequence[str], top: int, negative: bool = False, queries: int = 0
) -> None:
    """Refuses options of `explain` that are wrong whatever the model.

    Raises:
        ChoiceError, UsageError: an unknown word, nothing to list, or a score that is not defined so.
    """
    check_score(score, norm, negative)
    for kind in kinds:
        if kind not in KIND_LEVELS:
            raise ChoiceError("kind", kind, tuple(KIND_LEVELS))
    if not kinds or top < 1:
        raise UsageError("Nothing to list", None, "Name at least one kind, and --top of at least 1.")
    if queries < 0:
        raise UsageError("A number of queries below zero", str(queries), "Ask for 0, or for some.")


def _decompositions(trace: "Trace", kinds: Sequence[str], position: int, row: int) -> dict[str, Decomposition]:
    levels = dict.fromkeys(["sublayers", "units", *(KIND_LEVELS[kind] for kind in kinds)])
    return {level: trace.decompose(level, position, row) for level in levels}  # type: ignore[arg-type]


def _certificate(trace: "Trace", main: Decomposition, reads: Check, target: Target, row: int) -> Certificate:
    made = main.certificate
    assert made is not None
    labels = trace.model.labels
    worth = nats(main, made.remainder, target)
    return Certificate(
        level=main.level,
        position=main.position,
        relative_error=made.relative_error,
        max_relative_error=max(made.relative_error, float(trace.stream_errors(row).max())),
        tolerance=made.tolerance,
        holds=made.holds,
        parts=made.parts,
        nats=None if math.isnan(worth) else abs(worth),
        worst_dimension=made.worst_dimension,
        labels=CheckSummary(labels.checked, labels.worst, labels.tolerance, labels.holds, labels.where),
        reads=CheckSummary(reads.checked, reads.worst, reads.tolerance, reads.holds, reads.where),
        failed=made.failed,
    )


def _layers(trace: "Trace", states: Lens, sublayers: Decomposition, target: Target) -> list[LayerRow]:
    ids = torch.tensor(target.ids, device=states.logits.device)
    course = states.log_probabilities[:, ids].double().logsumexp(-1)
    direct: dict[str, float] = defaultdict(float)
    try:
        made = attribute(sublayers, target)
        for group, scores in zip(sublayers.groups, made.scores, strict=True):
            if group.kind in ("sublayer", "embedding"):
                direct[str(group.units[0])] += float(scores.sum())
    except LevelRefusedError:
        direct = {}  # type: ignore[assignment]
    _, likeliest = states.top(1)
    rows, before = [], 0.0
    for i, unit in enumerate(states.units):
        value = float(course[i])
        name = str(unit)
        rows.append(LayerRow(name, value, value - before, direct.get(name), [trace.model.token(int(likeliest[i, 0]))]))
        before = value
    return rows


def _tokens(trace: "Trace", target: Target, position: int, row: int) -> tuple[Token, list[Token]]:
    log_p = trace.logits(position, row).double().log_softmax(-1)

    def describe(ids: Sequence[int], text: str) -> Token:
        value = float(log_p[list(ids)].logsumexp(0))
        rank = int((log_p > log_p[list(ids)].max()).sum()) + 1
        return Token(text, ids[0], math.exp(value), value, rank)

    rivals = [describe([token], trace.model.token(token)) for token in target.against]
    text = " | ".join(trace.model.token(token) for token in target.ids)
    return describe(target.ids, text), rivals


def _values(trace: "Trace", decompositions, ranking: Ranking, target: Target, norm: NormConvention, row: int):
    ranked = ranking.values
    if not ranked:
        return []
    main = decompositions["units"]
    vectors = torch.stack([part.vector() for part in ranked])
    up, down = promoted(main, vectors, SHOWN_TOKENS)
    increase: dict[int, float] = {}
    for decomposition in decompositions.values():
        own = [i for i, part in enumerate(ranked) if any(part.group is g for g in decomposition.groups)]
        found = increases(decomposition, [ranked[i] for i in own], target, norm)
        increase |= dict(zip(own, found, strict=True))
    shares = {score: functional(main, target, score) for score in ("direct", "additive")}
    recomputed = _recomputed(decompositions, ranked, target) if norm == "recompute" else {}
    tokens = trace.tokens(row)
    rows = []
    for i, part in enumerate(ranked):
        source = part.unit.source
        promotes, suppresses = up[i], down[i]
        rows.append(
            ValueRow(
                unit=str(part.unit),
                kind=part.group.kind,
                coefficient=part.coefficient,
                increase=increase.get(i),
                additive=float(vectors[i] @ shares["additive"].direction),
                direct=float(vectors[i] @ shares["direct"].direction) if norm == "frozen" else recomputed[part.unit],
                bound=ranking.bounds.get(part.unit),
                kl=ranking.gaps.get(part.unit),
                promotes=[trace.model.token(int(t)) for t in promotes],
                suppresses=[trace.model.token(int(t)) for t in suppresses],
                source=tokens[source] if source is not None else None,
                score=part.score,
            )
        )
    return rows


def _account(sublayers: Decomposition, target: Target) -> dict[str, float]:
    """The target's logit by kind of writer; the entries sum to `total`."""
    made = attribute(sublayers, target)
    sums: dict[str, float] = defaultdict(float)
    for group, scores in zip(sublayers.groups, made.scores, strict=True):
        kind = group.kind
        if kind == "sublayer":
            kind = str(group.units[0]).partition(".")[2].rstrip("23456789")
        sums[kind] += float(scores.sum())
    sums["readout"] = sum(made.functional.constants.values())
    return {**sums, "unexplained": made.unexplained, "total": made.functional.total}


def _recomputed(decompositions, ranked: list[Scored], target: Target) -> dict[Unit, float]:
    """z_t(x + v) - z_t(x) of the listed units."""
    found: dict[Unit, float] = {}
    for decomposition in decompositions.values():
        own = [part for part in ranked if any(part.group is g for g in decomposition.groups)]
        if own:
            scores = direct_recomputed(decomposition, target).scores
            by_group = {id(g): s for g, s in zip(decomposition.groups, scores, strict=True)}
            found |= {part.unit: float(by_group[id(part.group)][part.index]) for part in own}
    return found


def _notes(trace: "Trace", target: Target, position: int, row: int) -> list[str]:
    """Where another spelling of the target is ten times likelier, and a target that the model hardly considers."""
    log_p = trace.logits(position, row).double().log_softmax(-1)
    notes = []
    if target.alternative is not None and len(target.ids) == 1:
        other = log_p[target.alternative]
        if float(other - log_p[target.ids[0]]) >= math.log(10):
            notes.append(
                f"{target.alternative_text!r} is another token and has probability {float(other.exp()):.3g}; "
                f"{target.text!r} was taken literally."
            )
    rank_ = int((log_p > log_p[list(target.ids)].max()).sum()) + 1
    if rank_ > FAR:
        notes.append(
            f"the target is the model's {rank_:,}th choice of {len(log_p):,}: what wrote it is no prediction's account."
        )
    return notes


def _warnings(trace: "Trace", main: Decomposition, ranking: Ranking, states: Lens, row: int):
    tokenizer = trace.model.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    begins = bos is not None and trace.ids(row)[0] == bos
    found = warn.sink_warnings(main, ranking.values, begins)
    found += warn.tied_warning(main)
    for made in ranking.attributions:
        found += warn.cancel_warning(made)
    found += warn.lens_warning(states)
    found += warn.chat_warning(bool(getattr(tokenizer, "chat_template", None)), trace.chat)
    return list({w.code: w for w in found}.values())
