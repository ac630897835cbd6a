"""What a model of one attention layer predicts after `[source] ... [destination]`, from its circuits alone.

Without norms, positions and MLPs the logits at a destination are (Elhage et al. 2021, "one-layer attention-only
transformers")

    logits = W_U W_E destination + sum over heads, over sources of A W_U W_OV W_E source

with A the softmax of W_E^T W_QK W_E over the tokens of the context. Here the context is one source, `others` tokens of
a background, at their mean, and the destination itself. A skip trigram's increase is the probability of its output
with the source there, minus that with one more background token in its place.

Cost: tables of d_vocab^3 numbers; for small vocabularies.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.head_circuits import HeadCircuits


@dataclass(frozen=True, eq=False)
class SkipTrigramTable:
    """Predictions after every source and destination.

    Attributes:
        heads: what the heads add to the logits, above what they add where another background token stands for the
            source, and above the mean output.
        with_source: the probability of each output.
        without: the same with one more background token for the source.
    """

    heads: Float[Tensor, "d_vocab d_vocab d_vocab"]
    with_source: Float[Tensor, "d_vocab d_vocab d_vocab"]
    without: Float[Tensor, "d_vocab d_vocab"]

    @property
    def increase(self) -> Float[Tensor, "d_vocab d_vocab d_vocab"]:
        """[source, destination, output] how much likelier the source makes the output."""
        return self.with_source - self.without

    def largest(self, count: int) -> list[tuple[tuple[int, int, int], float]]:
        """The skip trigrams of the largest increase, as (source, destination, output)."""
        found = self.increase.flatten().topk(count)
        places = torch.stack(torch.unravel_index(found.indices, self.increase.shape), 1).tolist()
        return [((s, d, o), value) for (s, d, o), value in zip(places, found.values.tolist(), strict=True)]


def skip_trigram_table(
    direct: Float[Tensor, "d_vocab d_vocab"],
    circuits: list[HeadCircuits],
    background: Float[Tensor, " d_vocab"],
    others: int,
) -> SkipTrigramTable:
    """The table of a model.

    Args:
        direct: W_U W_E as destination x output.
        circuits: of each head.
        background: how likely each token is to be one of the others.
        others: how many there are beside source and destination.
    """
    added = torch.zeros(len(direct), len(direct), len(direct), dtype=torch.float64)
    absent = torch.zeros(len(direct), len(direct), dtype=torch.float64)
    for head in circuits:
        gives = (head.qk.rows @ head.qk.columns.mT).double()  # destination x source
        weight = (gives - gives.amax(1, keepdim=True)).exp()
        says = (head.ov.columns @ head.ov.rows.mT).double()  # source x output
        itself = weight.diagonal()[:, None] * says
        around = (weight * background) @ says
        total, each = weight.diagonal(), weight @ background.double()
        absent += (itself + (others + 1) * around) / (total + (others + 1) * each)[:, None]
        present = weight.mT[:, :, None] * says[:, None] + (itself + others * around)
        added += present / (weight.mT + total + others * each)[:, :, None]
    heads = added - absent
    logits = direct.double() + absent
    return SkipTrigramTable(
        heads=heads - heads.mean(-1, keepdim=True),
        with_source=(direct.double() + added).softmax(-1),
        without=logits.softmax(-1),
    )
