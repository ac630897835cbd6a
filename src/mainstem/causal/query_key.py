"""Queries and keys patched through the softmax itself (AtP*, Kramar et al. 2024, section 3.1.1).

Where attention is saturated the gradient of its pattern with respect to queries and keys is nearly 0, though another
query would move all of it. So the pattern is recomputed with the patched query or key, a -> a', and only what comes
after it is taken to first order: (a' - a) . d metric / d a, with d metric / d a = d metric / d result . v.

A key enters one score of each later query's row. With p its weight there and d the change of its score, the row becomes
p' = p e^d / (1 - p + p e^d) at the key and shrinks by 1 / (1 - p + p e^d) elsewhere, so that all single keys together
cost no more than one pattern. Patching all positions of a key head at once takes the whole new pattern.

Limits: attention that is fused (scaled dot-product attention), where query and key are seen. Cost: the patterns of one
layer at a time, in float64.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.causal.head_changes import result_site
from mainstem.causal.patch_places import argument_site
from mainstem.causal.tracked import Tracked
from mainstem.model.anatomy import AttentionCore
from mainstem.model.hooks import Site
from mainstem.model.views import heads_first, query_rows, result_rows

Heads = Float[Tensor, "n_heads pos d_head"]
Effects = tuple[Float[Tensor, "pos unit"], Float[Tensor, " unit"]]
"""Of each position alone, and of all positions at once."""


def attention_sites(core: AttentionCore) -> list[Site]:
    """What a run must keep of one attention call."""
    names = ("query", "key", "value", "attn_mask", "is_causal")
    return [*(argument_site(core, name) for name in names if name in core.slots), result_site(core)]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one fused attention call received, each query head with the key and value that it reads, float64.

    Attributes:
        query: scaled.
        mask: added to the scores, broadcast over heads.
    """

    query: Heads
    key: Heads
    value: Heads
    mask: Float[Tensor, "_ pos source"]

    @property
    def scores(self) -> Float[Tensor, "n_heads pos source"]:
        """Before the softmax."""
        return self.query @ self.key.mT + self.mask


def attention_call(run: Tracked, core: AttentionCore) -> AttentionCall:
    """The attention call of a run without padding."""

    def argument(name: str) -> Heads:
        arrange = query_rows if name == "query" else heads_first
        found = arrange(run.values[argument_site(core, name)], core.layouts[name], core.sizes, 1)[0]
        return found.detach().double().repeat_interleave(core.n_heads // found.shape[0], 0)

    query, key = argument("query"), argument("key")
    scale = core.scaling if core.scaling is not None else query.shape[-1] ** -0.5
    return AttentionCall(query * scale, key, argument("value"), _mask(run, core, query.shape[1]).to(query.device))


def _mask(run: Tracked, core: AttentionCore, positions: int) -> Tensor:
    mask = run.values.get(argument_site(core, "attn_mask")) if "attn_mask" in core.slots else None
    if isinstance(mask, Tensor):
        rows = mask.reshape(-1, *mask.shape[-2:])
        if mask.dtype != torch.bool:
            return rows.double()
        return torch.zeros_like(rows, dtype=torch.float64).masked_fill(~rows, -torch.inf)
    causal = run.values.get(argument_site(core, "is_causal")) if "is_causal" in core.slots else None
    after = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    used = core.causal if causal is None else bool(causal)
    return torch.zeros(1, positions, positions, dtype=torch.float64).masked_fill(after & used, -torch.inf)


def pattern_gradient(
    call: AttentionCall, at_result: Tensor, core: AttentionCore
) -> Float[Tensor, "n_heads pos source"]:
    """d metric / d pattern from the gradient at attention's result."""
    rows = result_rows(at_result, core.layouts["result"], core.sizes, 1)[0].double()
    return rows @ call.value.mT


def query_effects(base: AttentionCall, donor: AttentionCall, slope: Float[Tensor, "n_heads pos source"]) -> Effects:
    """Of each head's query: the new pattern row against the old, to first order in what follows."""
    new = (donor.query @ base.key.mT + base.mask).softmax(-1)
    found = ((new - base.scores.softmax(-1)) * slope).sum(-1).T
    return found, found.sum(0)


def key_effects(
    base: AttentionCall, donor: AttentionCall, slope: Float[Tensor, "n_heads pos source"], n_keys: int
) -> Effects:
    """Of each key head's keys, through all the heads and destinations that read them."""
    old = base.scores.softmax(-1)
    change = base.query @ (donor.key - base.key).mT
    raised = old.log() + change
    log_sum = torch.logaddexp(torch.log1p(-old), raised)
    shrink = (-log_sum).exp().clamp_max(torch.finfo(torch.float64).max)
    others = (old * slope).sum(-1, keepdim=True) - old * slope
    single = ((raised - log_sum).exp() - old) * slope + (shrink - 1) * others
    new = (base.query @ donor.key.mT + base.mask).softmax(-1)
    together = ((new - old) * slope).sum((1, 2))
    by_key = single.sum(1).unflatten(0, (n_keys, -1)).sum(1).T
    return by_key, together.unflatten(0, (n_keys, -1)).sum(1)
