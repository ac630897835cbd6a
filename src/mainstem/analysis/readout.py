"""Reading the stream: from stream values to logits, and the direction of the stream that a logit reads.

Two norm conventions, always named: `recompute` gives every vector its own scale, as the model would; `frozen` uses the
scale of the final stream value of the destination for every vector, so that contributions are linear and add up.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import ChoiceError, LevelRefusedError
from mainstem.model.anatomy import Readout
from mainstem.targets import Target

NormConvention = Literal["frozen", "recompute"]
NORMS: tuple[str, ...] = get_args(NormConvention)
CHUNK = 64
VOCABULARY_CHUNK = 8192


def check_norm(norm: str) -> None:
    """ChoiceError if `norm` is no convention."""
    if norm not in NORMS:
        raise ChoiceError("norm", norm, NORMS)


def require_linear(readout: Readout) -> None:
    """LevelRefusedError where logits are no linear function of the normed stream, so nothing adds up to them."""
    if readout.opaque is not None:
        raise LevelRefusedError(
            "Contributions to a logit need a readout that is a norm and an unembedding",
            "the readout",
            reason=readout.opaque,
            remedy="Use the logit lens, which runs the model's own readout, or decompose the stream itself.",
        )


def working_dtype(readout: Readout) -> torch.dtype:
    """float32, or float64 where the model's own unembedding is that wide."""
    return torch.float64 if readout.unembedding.dtype == torch.float64 else torch.float32


def frozen_scale(readout: Readout, final: Float[Tensor, " d_model"]) -> Float[Tensor, " 1"]:
    """The final norm's scale at the destination, float64; 1 where there is no norm."""
    if readout.norm is None:
        return torch.ones(1, dtype=torch.float64, device=final.device)
    return readout.norm.scale(final.double())


def normed(
    readout: Readout, states: Float[Tensor, "... d_model"], scale: Tensor | None, vectors: bool = False
) -> Float[Tensor, "... d_in"]:
    """Stream values (or, with `vectors`, contributions: no bias) as the unembedding reads them, float64."""
    x = states.double()
    if readout.norm is not None:
        x = readout.norm.linear(x, readout.norm.scale(x) if scale is None else scale)
        if readout.norm.bias is not None and not vectors:
            x = x + readout.norm.bias.double()
    return x if readout.before is None else readout.before(x)


def logits_of(
    readout: Readout, states: Float[Tensor, "unit d_model"], scale: Tensor | None = None
) -> Float[Tensor, "unit d_vocab"]:
    """The logits that the readout gives to stream values, each normed with its own scale or with `scale`.

    Computed in float32 (float64 for float64 models), in chunks of rows.
    """
    if readout.opaque is not None:
        return _opaque_logits(readout, states)
    dtype = working_dtype(readout)
    x = normed(readout, states, scale).to(dtype)
    return softcapped(readout, before_softmax_of(readout, x))


def before_softmax_of(readout: Readout, x: Float[Tensor, "unit d_in"]) -> Float[Tensor, "unit d_vocab"]:
    """`before_softmax` of any number of rows, in chunks."""
    if len(x) <= CHUNK:
        return before_softmax(readout, x)
    return torch.cat([before_softmax(readout, rows) for rows in x.split(CHUNK)])


def before_softmax(
    readout: Readout, x: Float[Tensor, "unit d_in"], tokens: slice | Tensor = slice(None)
) -> Float[Tensor, "unit _"]:
    """Scale, unembedding and its bias for rows that are already normed, for all tokens or some; no softcap."""
    weight = readout.unembedding[tokens]
    if weight.dtype == x.dtype:
        out = x @ weight.T
    else:  # a piece at a time: the unembedding is the largest matrix there is
        out = torch.cat([x @ rows.to(x.dtype).T for rows in weight.split(VOCABULARY_CHUNK)], -1)
    if readout.scale != 1.0:
        out = out * readout.scale
    return out if readout.bias is None else out + readout.bias[tokens].to(out)


def expected_rows(readout: Readout, weights: Float[Tensor, "unit d_vocab"]) -> Float[Tensor, "unit d_in"]:
    """Sums of the unembedding's rows, weighted: what a distribution over tokens expects of W_U."""
    weight = readout.unembedding
    if weight.dtype == weights.dtype:
        return weights @ weight
    pieces = zip(weights.split(VOCABULARY_CHUNK, -1), weight.split(VOCABULARY_CHUNK), strict=True)
    return torch.stack([piece @ rows.to(piece.dtype) for piece, rows in pieces]).sum(0)


def softcapped(readout: Readout, u: Tensor) -> Tensor:
    """cap * tanh(u / cap) where the model caps its logits."""
    return u if readout.softcap is None else readout.softcap * torch.tanh(u / readout.softcap)


def log_probability(logits: Float[Tensor, "unit d_vocab"], target: Target) -> Float[Tensor, " unit"]:
    """log of the target's probability, summed over a set; with rivals, that minus the mean of theirs: log-odds."""
    ids = list(target.ids)
    if target.against:  # the normalisation cancels
        return logits[:, ids].logsumexp(-1) - logits[:, list(target.against)].mean(-1)
    return logits.log_softmax(-1)[:, ids].logsumexp(-1)  # several times faster than torch's logsumexp of all


@torch.no_grad()
def _opaque_logits(readout: Readout, states: Float[Tensor, "unit d_model"]) -> Float[Tensor, "unit d_vocab"]:
    """Through the model's own recorded operations, as many rows at a time as were recorded."""
    if readout.program is None:
        raise LevelRefusedError("The readout cannot be run on its own", "the readout", reason=readout.opaque)
    count, out = readout.recorded_positions, []
    for start in range(0, len(states), count):
        rows = states[start : start + count]
        padded = torch.cat([rows, rows[-1:].expand(count - len(rows), -1)]) if len(rows) < count else rows
        logits = readout.program(padded.reshape(readout.program_shape))
        out.append(logits.reshape(count, -1)[: len(rows)])
    return torch.cat(out)


def token_direction(
    readout: Readout, weights: Float[Tensor, "... d_in"], scale: Float[Tensor, " 1"]
) -> Float[Tensor, "... d_model"]:
    """The stream direction (or several) whose inner product with a part is its effect on weights . (what W_U reads).

    With `weights` = a row of W_U this is the direct logit attribution of that token, before a softcap:
    logit contribution = scale * s_F * W_U[t] . (gain * centre(v)).
    """
    w = weights.double()
    if readout.before is not None:
        for factor in reversed(readout.before.factors):
            w = w @ factor.double() if factor.dim() == 2 else w * factor.double()
    if readout.norm is not None:
        if readout.norm.gain is not None:
            w = w * readout.norm.gain.double()
        w = readout.norm.centre(w)
    return w * scale.double() * readout.scale


def token_rows(readout: Readout, ids: Int[Tensor, " top"]) -> Float[Tensor, "top d_in"]:
    """Rows of the unembedding, float64."""
    return readout.unembedding[ids].double()
