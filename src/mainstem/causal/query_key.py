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

from mainstem.causal.head_changes import operands_of
from mainstem.causal.tracked import Tracked
from mainstem.model.anatomy import AttentionCore
from mainstem.model.hooks import Site
from mainstem.model.views import result_rows

Heads = Float[Tensor, "n_heads pos d_head"]
Effects = tuple[Float[Tensor, "pos unit"], Float[Tensor, " unit"]]
"""Of each position alone, and of all positions at once."""


def attention_sites(core: AttentionCore) -> list[Site]:
    """What a run must keep of one attention call."""
    return [*_arguments(core).values(), core.result_site]


def _arguments(core: AttentionCore) -> dict[str, Site]:
    names = ("query", "key", "value", "attn_mask", "is_causal")
    return {name: core.argument_site(name) for name in names if name in core.slots}


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


def attention_call(run: Tracked, core: AttentionCore, positions: int) -> AttentionCall:
    """The attention call of a run of one prompt without padding."""
    arguments = {name: run.values[site] for name, site in _arguments(core).items()}
    given = operands_of(core, arguments, 1, positions)

    def by_head(operand: Tensor | None) -> Heads:
        assert operand is not None
        return operand[0].detach().double().repeat_interleave(core.n_heads // operand.shape[1], 0)

    query, key, value = (by_head(operand) for operand in (given.query, given.key, given.value))
    nothing = query.new_zeros(query.shape[1], key.shape[1])
    heads = range(1 if given.mask is None else given.mask.shape[1])
    mask = torch.stack([given.masked(nothing, 0, head) for head in heads])
    return AttentionCall(query * given.scale, key, value, mask)


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
