"""Queries times keys, where the model computes attention itself: the operands' layouts, and the factor that follows.

Between the product of queries and keys and the pattern a model scales, masks, perhaps caps, and takes the softmax. The
scale is asked of that piece by running it: in a row of the pattern, log p_s - log p_s' changes by the scale times the
change of score_s - score_s', whatever is added as a mask, a bias of distance or a sink.

Cost: three runs of the piece on the recorded prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.anatomy import AttentionCore
from mainstem.model.attention import UnsplittableError, axes_of, einsum_terms
from mainstem.model.program import Program, extract
from mainstem.model.recording import Call, Value
from mainstem.model.views import pattern_rows

SMALL, LARGE = 1e-3, 10.0
EXACT = 1e-5


@dataclass(frozen=True)
class ScoreFactor:
    """What query . key is multiplied with before the softmax; `refusal` says why it is not known.

    `capped` says that large scores are bent, so that the factor is that of small ones.
    """

    value: float
    capped: bool
    refusal: str | None = None


def score_factor(pattern: Value, scores: Value, core: AttentionCore) -> ScoreFactor:
    """The factor between a recorded product of queries and keys and the pattern made from it."""
    program = extract(pattern, [scores])
    unknown = ScoreFactor(1.0, False, "how the pattern follows from queries and keys is not understood")
    if program is None or scores.shape != pattern.shape:
        return unknown
    try:
        small, large = (_fitted(program.in_float64, scores, core, size) for size in (SMALL, LARGE))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return unknown
    if small is None:
        return unknown
    capped = large is None or abs(large - small) > EXACT * abs(small)
    return ScoreFactor(small, capped)


def _fitted(program: Program, scores: Value, core: AttentionCore, size: float) -> float | None:
    """The factor told from scores of one size; None if no factor explains the pattern's change."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(scores.shape, generator=generator, dtype=torch.float64).to(scores.tensor.device) * size

    def last_rows(tensor: Tensor) -> Tensor:
        return pattern_rows(tensor, core.layouts["pattern"], core.sizes, 1)[0][:, -1]

    before, after = last_rows(program(torch.zeros_like(probe))), last_rows(program(probe))
    seen = (before > 0).all(0) & (after > 0).all(0)
    if int(seen.sum()) < 2:
        return None
    change = (after[:, seen] / before[:, seen]).log()
    given = last_rows(probe)[:, seen]
    change, given = change - change[:, :1], given - given[:, :1]
    factor = float((change * given).sum() / given.pow(2).sum())
    slack = (EXACT + 10 * size if size == SMALL else EXACT) * abs(factor) * float(given.norm())
    return factor if float((change - factor * given).norm()) <= slack else None


def side_layouts(call: Call, core: AttentionCore) -> dict[str, str]:
    """The einops layouts of query and key in their product, over the pattern's axes and d; empty if not understood."""
    axes = axes_of(core.layouts["pattern"])
    query, key = call.active_operands()
    scores = call.outputs[0]
    if len(axes) != len(scores.shape):
        return {}
    if call.name == "einsum":
        try:
            terms, output = einsum_terms(call)
        except UnsplittableError:
            return {}
        names = dict(zip(output, axes, strict=True))
        summed = [c for c in terms[query.id] if c not in output]
        if len(summed) != 1:
            return {}
        names[summed[0]] = "d"
        return {role: " ".join(names[c] for c in terms[v.id]) for role, v in (("query", query), ("key", key))}
    if axes[-2:] != ["t", "s"]:
        return {}
    return {"query": _batched(query, axes, ["t", "d"]), "key": _batched(key, axes, ["d", "s"])}


def _batched(value: Value, axes: list[str], last: list[str]) -> str:
    own = axes[:-2][len(axes) - len(value.shape) :] if len(value.shape) > 2 else []
    named = ["1" if size == 1 and name != "b" else name for name, size in zip(own, value.shape, strict=False)]
    return " ".join([*named, *last])
