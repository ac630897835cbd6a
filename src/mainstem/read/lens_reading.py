"""Reading the logit lens of one destination into plain rows: likeliest tokens and chosen tokens' course.

The states and their logits come from `mainstem.analysis.lens`; the sum certificate of the sublayers stands beside
them, and the last state is compared with the model's own logits.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mainstem.analysis import warnings as warn
from mainstem.analysis.lens import Lens, before_softmax_course, lens
from mainstem.analysis.readout import NormConvention, check_norm
from mainstem.errors import UsageError
from mainstem.read.unit_reading import UnitReader
from mainstem.results.description import CourseRow, LensCertificate, LensReading, LikelyToken, NamedToken, StateRow
from mainstem.targets import parse_token

if TYPE_CHECKING:
    from mainstem.analysis.decompose import Decomposition
    from mainstem.tracing import Trace


def read_lens(
    trace: "Trace",
    tokens: Sequence[str] = (),
    position: int = -1,
    norm: NormConvention = "recompute",
    top: int = 5,
    row: int = 0,
    units: Sequence[str] = (),
) -> LensReading:
    """The logit lens at one destination as plain rows.

    Args:
        trace: the run.
        tokens: whose course to follow: literal text or `id:N`; by default the model's own prediction.
        position: the destination, negative from the end.
        norm: `recompute` (each state as the model would read it) or `frozen` (the final state's scale for all).
        top: how many of the likeliest tokens of each state to list.
        row: which prompt of a batch.
        units: addresses of units whose promoted and suppressed tokens, with a null, and sigmoids to read.

    Raises:
        UsageError and its kinds: if an argument is wrong; CertificateError as in `Trace.decompose`.
    """
    check_norm(norm)
    if top < 1:
        raise UsageError("Nothing to list", None, "Give --top of at least 1.")
    model = trace.model
    sublayers = trace.decompose("sublayers", position, row)
    states = lens(sublayers, norm)
    logits = trace.logits(position, row)
    ids = _ids(trace, tokens, logits)
    reader = UnitReader(trace, top, position, row)
    return LensReading(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in _warnings(trace, sublayers, states, row)],
        model=model.summary,
        prompt={"text": trace.text, "tokens": trace.tokens(row), "ids": trace.ids(row)},
        position=sublayers.position,
        norm=norm,
        tokens=[NamedToken(model.token(token), token) for token in ids],
        certificate=_certificate(sublayers, states, logits),
        states=_states(trace, sublayers, states, ids, top),
        units=[reader.read(unit, ids) for unit in dict.fromkeys(units)],
    )


def _ids(trace: "Trace", tokens: Sequence[str], logits: torch.Tensor) -> list[int]:
    if not tokens:
        return [int(logits.argmax())]
    model = trace.model
    size = model.anatomy.sizes.d_vocab
    return list(dict.fromkeys(parse_token(text, model.tokenizer, size) for text in tokens))


def _certificate(sublayers: "Decomposition", states: Lens, logits: torch.Tensor) -> LensCertificate:
    made = sublayers.certificate
    assert made is not None
    own = logits.double().log_softmax(-1)
    difference = (states.log_probabilities[-1].double() - own).abs().max()
    return LensCertificate(made.relative_error, made.tolerance, made.holds, made.parts, float(difference))


def _states(trace: "Trace", sublayers: "Decomposition", states: Lens, ids: list[int], top: int) -> list[StateRow]:
    chosen = torch.tensor(ids, device=states.logits.device)
    course = states.course(chosen)
    before = None
    if trace.model.anatomy.readout.opaque is None:
        before = before_softmax_course(sublayers, chosen)
    values, indices = states.top(top)
    entropy = states.entropy().tolist()
    name = trace.model.token
    rows = []
    for i, unit in enumerate(states.units):
        likely = [
            LikelyToken(name(token), token, value)
            for value, token in zip(values[i].tolist(), indices[i].tolist(), strict=True)
        ]
        followed = [
            CourseRow(
                token=name(token),
                id=token,
                before_softmax=None if before is None else float(before[i, j]),
                logit=float(course.logits[i, j]),
                log_probability=float(course.log_probabilities[i, j]),
                rank=int(course.ranks[i, j]),
                probability=math.exp(float(course.log_probabilities[i, j])),
            )
            for j, token in enumerate(ids)
        ]
        rows.append(StateRow(str(unit), entropy[i], likely, followed))
    return rows


def _warnings(trace: "Trace", sublayers: "Decomposition", states: Lens, row: int) -> list[warn.Warning]:
    tokenizer = trace.model.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    begins = bos is not None and trace.ids(row)[0] == bos
    found = [w for w in warn.sink_warnings(sublayers, [], begins) if w.code == "first-token"]
    found += warn.tied_warning(sublayers)
    found += warn.lens_warning(states)
    found += warn.chat_warning(bool(getattr(tokenizer, "chat_template", None)), trace.chat)
    return found
