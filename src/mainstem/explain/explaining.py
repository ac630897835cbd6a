"""Putting an explanation together: target, layers, values, account, certificates, warnings.

Each step is one call into the analysis; nothing is computed here that is not computed there.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.analysis import warnings as warn
from mainstem.analysis.attribution import nats
from mainstem.analysis.certificate import Check, check_reads
from mainstem.analysis.lens import lens
from mainstem.analysis.ranking import KIND_LEVELS, Ranking, Request, rank_steps
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.scores import RULES, check_score
from mainstem.errors import ChoiceError, UsageError
from mainstem.explain.querying import queries_of
from mainstem.explain.rows import account, layer_rows, value_rows
from mainstem.explain.scoring import existing_kinds, measured_levels, require_kinds
from mainstem.explain.steps import Step, steps_of
from mainstem.explain.targeting import chosen_target
from mainstem.explain.unit_keys import input_key, input_note, input_target, named_unit
from mainstem.explain.verifying import require_tokens, verify_trace
from mainstem.results.explanation import Certificate, Explanation, Token
from mainstem.results.reading import CheckSummary
from mainstem.targets import Target
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.tracing import Trace

DEFAULT_KINDS = ("attention_subvalue", "ffn_neuron", "expert_neuron")
FAR = 1000
"""From this rank on a note says that the target is far from being predicted."""


def explain(
    trace: "Trace",
    target: str | Sequence[str] | Target | None = None,
    against: str | Sequence[str] = (),
    continuation: str | Sequence[int] | None = None,
    direction: str | Path | Unit | Sequence[float] | Tensor | None = None,
    position: int = -1,
    score: str | None = None,
    norm: NormConvention = "frozen",
    kinds: Sequence[str] = DEFAULT_KINDS,
    negative: bool = False,
    exhaustive: bool = False,
    measure: bool = False,
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
        against: rivals: then the target's log-odds against the mean of theirs is explained.
        continuation: text of any length, or token ids, instead of `target`: its summed log-probability, teacher-forced.
        direction: d_model numbers, a `.safetensors` file or the address of a unit that reads one (L27N846, L23H4@3;
            see `Trace.direction`), instead of `target`: the inner product with the stream.
        position: the destination, negative from the end.
        score: what values are ranked by: `increase` (log-probability increase, exact by search; the default), or any
            other of `mainstem.analysis.scores.RANKINGS`, which that module defines; for a direction `direct`.
        norm: `frozen` or `recompute`; `additive` is defined under `frozen` only.
        kinds: which units to list: sublayer, head, attention_subvalue, attention_neuron, ffn_neuron, expert_neuron;
            by default subvalues and neurons, or sublayers where the model has neither.
        negative: list the units that speak against the target.
        exhaustive: score every unit instead of those that the bounds cannot exclude; for checking, and slow.
        measure: first measure how far each neuron can move each logit, if that was not done for this model; searches
            for negative units use it from then on (see `Model.reach`).
        top: how many.
        queries: how many earlier units to list for each of them, those that activate it (see
        `mainstem.explain.querying`).
        ablate: for a causal verdict, how many units to take out, as in {"ffn": 25, "attention": 75}.
        everywhere: take them out at all positions, not at the destination alone.
        row: which prompt of a batch.

    Raises:
        UsageError and its kinds: if an argument is wrong; LevelRefusedError, CertificateError as in `Trace.decompose`.
    """
    check_options(score or "increase", norm, kinds, top, negative, queries)
    if tuple(kinds) == DEFAULT_KINDS and not set(kinds) & set(existing_kinds(trace.model.anatomy)):
        kinds = ("sublayer",)  # nobody asked for what is not there
    require_kinds(trace.model.anatomy, kinds)
    unit = named_unit(direction)
    key = None if unit is None else input_key(trace, unit, position, row)
    along = direction if key is None else key.in_stream()
    wanted = chosen_target(trace, target, against, position, row, continuation, along)  # type: ignore[arg-type]
    wanted = wanted if key is None else input_target(key)
    _check_target(wanted, norm, queries, ablate)
    score = score or ("direct" if wanted.direction else "increase")
    check_score(score, norm, negative, bool(wanted.against))
    request = Request(score, norm, frozenset(kinds), negative, exhaustive, top)
    levels = dict.fromkeys(["sublayers", "units", *(KIND_LEVELS[kind] for kind in kinds)])
    steps = steps_of(trace, wanted, position, row, levels)
    ranking, notes = _ranked(trace, steps, request, measure)
    notes += [] if key is None else [input_note(key)]
    values = [part.unit for part in ranking.values] if queries else []
    asked, refused = queries_of(trace, values, queries, position, wanted, row)
    return Explanation(
        provenance=trace.model.provenance(),
        warnings=[w.as_dict() for w in _warnings(trace, steps, ranking)],
        model=trace.model.summary,
        prompt={"text": trace.text, "tokens": trace.tokens(row), "ids": trace.ids(row)},
        position=steps[0].main.position,
        target=_whole_token(wanted, steps),
        against=[_token(steps[0], [rival], trace.model.token(rival)) for rival in wanted.against],
        norm=norm,
        score=score,
        certificate=_certificate(trace, steps),
        layers=layer_rows(steps),
        values=value_rows(steps, ranking, norm),
        kinds=list(kinds),
        account=account(steps),
        search=ranking.search,
        notes=[note for step in steps for note in _notes(step)] + notes,
        queries=[one for made in asked for one in made.rows],
        query_sums=[made.sums() for made in asked],
        query_refusals=refused,
        verification=None
        if ablate is None
        else verify_trace(trace, wanted, ablate, score, norm, position, everywhere, row=row),
        target_kind=wanted.kind,
        steps=[_token(step, step.target.ids) for step in steps] if wanted.continuation else [],
    )


def _ranked(trace: "Trace", steps: Sequence[Step], request: Request, measure: bool) -> tuple[Ranking, list[str]]:
    """The ranking, after what has to be measured for it on the model, and notes on that."""
    given, notes = None, []
    if RULES[request.score].measured and not steps[0].target.direction:
        given = []
        for step in steps:
            own, more = measured_levels(
                step.trace, step.decompositions, step.target, request.score, set(request.kinds), step.row
            )
            given.append(own)
            notes += more
    reach = trace.model.reach(measure) if measure or (request.negative and request.score == "increase") else None
    return rank_steps([(step.decompositions, step.target) for step in steps], request, given, reach), notes


def _check_target(target: Target, norm: str, queries: int, ablate: Mapping[str, int] | None) -> None:
    """Refuses what a continuation or a direction cannot be asked for."""
    if target.direction and norm == "recompute":
        what = "A direction is read before the final norm, which has no part in it"
        raise UsageError(what, "--norm recompute", "Leave out --norm.")
    if ablate is not None:
        require_tokens(target)
    if queries and target.continuation:
        what = "Queries are asked of units at one destination, and a continuation has one for each of its tokens"
        raise UsageError(what, "--queries", "Name a token, or ask a trace of the longer prompt: `Trace.queries`.")


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


def _certificate(trace: "Trace", steps: Sequence[Step]) -> Certificate:
    """The certificates of all steps: the worst of each."""
    made = [(step.main.certificate, step) for step in steps]
    known = [(certificate, step) for certificate, step in made if certificate is not None]
    worst, at = max(known, key=lambda pair: pair[0].relative_error)
    labels = trace.model.labels
    worth = [nats(step.main, c.remainder, step.target) for c, step in known]
    largest = float(steps[-1].trace.stream_errors(steps[-1].row).max())
    return Certificate(
        level=at.main.level,
        position=at.main.position,
        relative_error=worst.relative_error,
        max_relative_error=max(worst.relative_error, largest),
        tolerance=worst.tolerance,
        holds=all(c.holds for c, _ in known),
        parts=worst.parts,
        nats=None if any(map(math.isnan, worth)) else sum(map(abs, worth)),
        worst_dimension=worst.worst_dimension,
        labels=CheckSummary(labels.checked, labels.worst, labels.tolerance, labels.holds, labels.where),
        reads=_reads([check_reads(step.sublayers) for step in steps]),
        failed=worst.failed,
    )


def _reads(checks: Sequence[Check]) -> CheckSummary:
    failed = [check for check in checks if not check.holds]
    worst = max(failed or checks, key=lambda check: check.worst)
    return CheckSummary(sum(c.checked for c in checks), worst.worst, worst.tolerance, not failed, worst.where)


def _whole_token(target: Target, steps: Sequence[Step]) -> Token:
    """The target as one entry, whatever its kind."""
    if target.direction:
        return Token(target.text, None, None, None, None)
    model = steps[0].trace.model
    if not target.continuation:
        return _token(steps[0], target.ids, " | ".join(model.token(token) for token in target.ids))
    each = [_token(step, step.target.ids) for step in steps]
    value = sum(token.log_probability or 0.0 for token in each)
    return Token(target.text, each[0].id, math.exp(value), value, max(token.rank or 1 for token in each))


def _token(step: Step, ids: Sequence[int], text: str | None = None) -> Token:
    log_p = step.trace.logits(step.position, step.row).double().log_softmax(-1)
    value = float(log_p[list(ids)].logsumexp(0))
    rank = int((log_p > log_p[list(ids)].max()).sum()) + 1
    return Token(text or step.trace.model.token(ids[0]), ids[0], math.exp(value), value, rank)


def _notes(step: Step) -> list[str]:
    """Where another spelling of the target is ten times likelier, and a target that the model hardly considers."""
    target = step.target
    if not target.ids:
        return []
    log_p = step.trace.logits(step.position, step.row).double().log_softmax(-1)
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


def _warnings(trace: "Trace", steps: Sequence[Step], ranking: Ranking):
    first = steps[0]
    tokenizer = trace.model.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    begins = bos is not None and first.trace.ids(first.row)[0] == bos
    found = warn.sink_warnings(first.main, ranking.values, begins)
    found += warn.tied_warning(first.main)
    found += warn.null_warning(first.main, ranking.values, trace.model.seed)
    for made in ranking.attributions:
        found += warn.cancel_warning(made)
    if first.target.ids:
        found += warn.lens_warning(lens(first.sublayers))
    found += warn.chat_warning(bool(getattr(tokenizer, "chat_template", None)), trace.chat)
    return list({w.code: w for w in found}.values())
