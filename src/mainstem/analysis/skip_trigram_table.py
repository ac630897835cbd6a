"""What a model of one attention layer predicts after `[source] ... [destination]`, from its circuits alone.

Without norms, positions and MLPs the logits at a destination are (Elhage et al. 2021, "one-layer attention-only
transformers")

    logits = W_U W_E destination + sum over heads, over sources of A W_U W_OV W_E source

with A the softmax of W_E^T W_QK W_E over the tokens of the context. Here the context is a source, other tokens, as
often as they are said to be there, and the destination itself. A skip trigram's increase is the probability of its
output with the source there, minus that with something that means nothing in its place.

Cost: tables of d_vocab^3 numbers; for small vocabularies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.head_circuits import HeadCircuits


@dataclass(frozen=True, eq=False)
class SkipTrigramTable:
    """What every source does at every destination, [source, destination, output].

    Attributes:
        heads: what the heads add to the logits, above what they add without the source, and above the mean output.
        increase: how much likelier the source makes the output.
    """

    heads: Float[Tensor, "d_vocab d_vocab d_vocab"]
    increase: Float[Tensor, "d_vocab d_vocab d_vocab"]

    def largest(self, count: int) -> list[tuple[tuple[int, int, int], float]]:
        """The skip trigrams of the largest increase, as (source, destination, output)."""
        found = self.increase.flatten().topk(count)
        places = torch.stack(torch.unravel_index(found.indices, self.increase.shape), 1).tolist()
        return [((s, d, o), value) for (s, d, o), value in zip(places, found.values.tolist(), strict=True)]


def skip_trigram_table(
    direct: Float[Tensor, "d_vocab d_vocab"],
    circuits: Sequence[HeadCircuits],
    others: Float[Tensor, " d_vocab"],
    instead: Float[Tensor, " d_vocab"],
) -> SkipTrigramTable:
    """The table of a model, in one context.

    Args:
        direct: W_U W_E as destination x output.
        circuits: of each head.
        others: how often each token is in the context, source and destination left out.
        instead: what stands in the source's place where it is not there: parts of tokens that add up to 1.
    """
    added = torch.zeros(len(direct), len(direct), len(direct), dtype=torch.float64)
    absent = torch.zeros(len(direct), len(direct), dtype=torch.float64)
    for head in circuits:
        gives = (head.qk.rows @ head.qk.columns.mT).double()  # destination x source
        weight = (gives - gives.amax(1, keepdim=True)).exp()
        says = (head.ov.columns @ head.ov.rows.mT).double()  # source x output
        total, written = weight.diagonal() + weight @ others.double(), weight.diagonal()[:, None] * says
        written = written + (weight * others) @ says
        added += (weight.mT[:, :, None] * says[:, None] + written) / (weight.mT + total)[:, :, None]
        absent += ((weight * instead) @ says + written) / (weight @ instead.double() + total)[:, None]
    heads = added - absent
    return SkipTrigramTable(
        heads=heads - heads.mean(-1, keepdim=True),
        increase=(direct.double() + added).softmax(-1) - (direct.double() + absent).softmax(-1),
    )


def mean_table(tables: Sequence[SkipTrigramTable], left_out: Sequence[int]) -> SkipTrigramTable:
    """The mean over contexts; each leaves out the rows of one source, which is in that context anyway."""

    def mean(values: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(values))
        stacked[torch.arange(len(stacked)), torch.tensor(left_out)] = torch.nan
        return stacked.nanmean(0)

    return SkipTrigramTable(mean([table.heads for table in tables]), mean([table.increase for table in tables]))
