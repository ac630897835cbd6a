"""One destination of one run: the slice of a capture that a decomposition needs, without padding, with its patterns.

A pattern row is softmax(q . k * scale + mask) over the sources, computed in float64 from the query and key that
attention really received (after rotary embedding and query/key norms), or the row that the model computed itself.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.model.anatomy import Anatomy, AttentionCore, ExpertSite
from mainstem.model.expert_reads import ReadRows
from mainstem.model.expert_rows import ExpertRows
from mainstem.model.experts import ExpertParts
from mainstem.model.graph import Gate
from mainstem.model.hooks import Site
from mainstem.run.capture import AttentionRun, Captured


@dataclass(frozen=True, eq=False)
class HeadRun:
    """Attention at one destination.

    Attributes:
        pattern: [n_heads, source] float64, the weights that the destination gives to the sources.
        value: [n_key_value_heads, source, d_value] in the model's dtype.
        multiplier: [width] float64, the factor of each channel between attention's result and W_O's input.
        uncertainty: [n_heads] relative error to expect of the recomputed pattern.
        gates: values of the gated steps between attention's result and W_O, float64.
    """

    core: AttentionCore
    pattern: Float[Tensor, "n_heads source"]
    value: Float[Tensor, "n_key_value_heads source d_value"]
    multiplier: Float[Tensor, " d_in"]
    uncertainty: Float[Tensor, " n_heads"]
    gates: dict[Site, Tensor]

    def result(self) -> Float[Tensor, "n_heads d_value"]:
        """Each head's result before W_O: sum over sources of pattern x value."""
        return self.summed(self.value.double())

    def summed(self, values: Float[Tensor, "n_key_value_heads source d_value"]) -> Float[Tensor, "n_heads d_value"]:
        """Sums over sources of pattern x values, float64; values are not repeated for each head that reads them."""
        pattern = self.pattern.reshape(values.shape[0], -1, self.pattern.shape[1])
        return torch.einsum("khs,ksj->khj", pattern, values).flatten(0, 1)

    def entering(self) -> Float[Tensor, " d_in"]:
        """What W_O reads, computed from pattern and values."""
        z = torch.zeros_like(self.multiplier)
        z[self.core.channels.to(z.device).reshape(-1)] = self.result().reshape(-1)
        return z * self.multiplier

    def group(self) -> Int[Tensor, " n_heads"]:
        """Which key/value head each head reads."""
        n_heads, n_kv = self.pattern.shape[0], self.value.shape[0]
        return torch.arange(n_heads, device=self.value.device) // (n_heads // n_kv)


@dataclass(frozen=True, eq=False)
class Moment:
    """What a run left at one destination; every tensor is of one position, sources count from the first real token."""

    anatomy: Anatomy
    position: int
    n_sources: int
    writes: list[Float[Tensor, "1 d_model"]]
    gates: dict[Gate, Tensor]
    sources: dict[int, Float[Tensor, " d_in"]]
    attention: dict[Site, HeadRun]
    experts: dict[str, ExpertParts]
    expert_reads: dict[ExpertSite, list[ReadRows]]
    reads: list[Tensor]
    block_inputs: list[Float[Tensor, " d_model"]]
    stream: Float[Tensor, " d_model"]
    logits: Float[Tensor, " d_vocab"]


def moment(anatomy: Anatomy, captured: Captured, row: int, place: int, padding: int) -> Moment:
    """The moment at destination number `place` of batch row `row`, whose first `padding` positions are no tokens."""
    index = int(captured.destinations[row, place])
    attention = {
        site: _head_run(core, captured.attention[site], row, place, padding, index)
        for site, core in {w.attention.site: w.attention for w in anatomy.writes if w.attention is not None}.items()
    }
    sources = {}
    for i, write in enumerate(anatomy.writes):
        if write.source is not None:
            sources[i] = captured.sources[i][row, place]
        elif write.attention is not None:
            sources[i] = attention[write.attention.site].entering().to(write.dtype)
    return Moment(
        anatomy=anatomy,
        position=index - padding,
        n_sources=captured.writes[0].shape[1] - padding,
        writes=[write[row, index][None] for write in captured.writes],
        gates={gate: value[row, index][None] for gate, value in captured.gates.items()},
        sources=sources,
        attention=attention,
        experts={site.path + f"#{site.call}": _place(parts[row], place) for site, parts in captured.experts.items()},
        expert_reads={
            site: [one.at(torch.tensor([place], device=one.position.device)) for one in made[row]]
            for site, made in captured.expert_reads.items()
        },
        reads=[read[row, place] for read in captured.reads],
        block_inputs=[block[row, place] for block in captured.block_inputs],
        stream=captured.stream[row, index],
        logits=captured.logits[row, place],
    )


def _place(parts: ExpertParts, place: int) -> ExpertParts:
    rows = tuple(
        ExpertRows(r.expert, r.hidden, r.weight[place : place + 1], r.matrix, r.transposed, r.bias) for r in parts.rows
    )
    return ExpertParts(rows, parts.constant[place : place + 1])


def _head_run(core: AttentionCore, run: AttentionRun, row: int, place: int, padding: int, index: int) -> HeadRun:
    assert run.value is not None
    value = run.value[row, :, padding:]
    if run.pattern is not None:
        pattern = run.pattern[row, :, place, padding:].double()
        uncertainty = torch.full((pattern.shape[0],), torch.finfo(run.pattern.dtype).eps, dtype=torch.float64)
    else:
        pattern, uncertainty = _recomputed(run, row, place, padding, index)
    uncertainty = uncertainty.to(pattern.device)
    gates = {site: gate[row, place].double() for site, gate in run.gates.items()}
    bare = HeadRun(core, pattern, value, torch.empty(0, dtype=torch.float64), uncertainty, gates)
    return replace(bare, multiplier=channel_factors(core, gates, bare.result()))


def _recomputed(run: AttentionRun, row: int, place: int, padding: int, index: int) -> tuple[Tensor, Tensor]:
    """The pattern row of the fused kernel, and the relative error that its own precision allows."""
    assert run.query is not None and run.key is not None
    query, key = run.query[row, :, place].double(), run.key[row, :, padding:].double()
    scale = run.scaling if run.scaling is not None else query.shape[-1] ** -0.5
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    scores = torch.einsum("hd,hsd->hs", query, key) * scale
    if run.mask is not None:
        mask = run.mask[row, :, place, padding:]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    elif run.causal:
        after = torch.arange(scores.shape[-1], device=scores.device) > index - padding
        scores = scores.masked_fill(after, -torch.inf)
    unit = torch.finfo(run.query.dtype).eps
    inner = min(unit, torch.finfo(torch.float32).eps)  # kernels accumulate half precisions in float32
    size = query.norm(dim=-1) * key.norm(dim=-1).amax(-1) * abs(scale)
    return scores.softmax(-1), inner * (4 + size) + unit


def channel_factors(core: AttentionCore, gates: dict[Site, Tensor], result: Tensor) -> Tensor:
    """The factor of each channel from attention's result [n_heads, d_value] to W_O's input, norms at its scale."""
    width = core.channels.numel()
    channels = core.channels.to(result.device)
    current = torch.zeros(width, dtype=torch.float64, device=result.device)
    current[channels.reshape(-1)] = result.reshape(-1)
    factor = torch.ones_like(current)
    for step in core.steps:
        here = torch.ones_like(current)
        if step.gate_site is not None and step.columns is not None:
            here = gates[step.gate_site][step.columns.to(result.device)]
        if step.groups is not None:
            groups = step.groups.to(result.device)
            squares = torch.zeros(int(groups.max()) + 1, dtype=torch.float64, device=result.device)
            count = torch.bincount(groups).double()
            squares = squares.index_add(0, groups, (current * factor).pow(2)) / count
            here = (squares + step.eps).rsqrt()[groups]
        if step.factor is not None:
            here = here * step.factor.to(here)
        factor = factor * here
    return factor
