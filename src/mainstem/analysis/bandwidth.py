"""How the stream's room is used: its effective rank after each block, and who writes each dimension's variance.

Over the tokens of a text, with C the covariance of the stream after a block and l its eigenvalues,

    participation ratio   (sum l)^2 / sum l^2
    entropy rank          exp(-sum p log p),  p = l / sum l   (Roy and Vetterli 2007, "The effective rank")

both between 1 and the number of dimensions; the first is near 1 when one direction dominates, the second counts small
ones more. n tokens give a rank of n - 1 at most, so each stands beside that of as many tokens of white noise.

The variance that a block writes of dimension i is cov(write_i, final_i) / var(final_i), where the write is the block's
change of the stream and final is the stream before the last norm: over the embedding and all blocks these shares add up
to 1 in each dimension (`unexplained` is what is missing). A share is negative where a block takes out what others
wrote. (Elhage et al. 2021 call the stream a channel of limited bandwidth.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.errors import UsageError


@dataclass(frozen=True)
class EffectiveRank:
    """How many directions a cloud of vectors fills."""

    participation: float
    entropy: float


@dataclass(frozen=True, eq=False)
class Bandwidth:
    """Of one text.

    Attributes:
        ranks: of the stream before the first block and after each.
        noise: of white noise with as many tokens and dimensions.
        shares: of each dimension's final variance, by the embedding and by each block.
        variances: of each dimension of the final stream.
        unexplained: the largest distance of the shares' sum from 1.
        tokens: how many.
    """

    ranks: tuple[EffectiveRank, ...]
    noise: EffectiveRank
    shares: Float[Tensor, "layer d_model"]
    variances: Float[Tensor, " d_model"]
    unexplained: float
    tokens: int


def effective_rank(vectors: Float[Tensor, "pos d_model"]) -> EffectiveRank:
    """Both effective ranks of vectors about their mean.

    Raises:
        UsageError: if they do not vary.
    """
    centred = vectors.double() - vectors.double().mean(0)
    values = torch.linalg.svdvals(centred).square()
    if not float(values.sum()) > 0:
        raise UsageError("The vectors do not vary, and have no effective rank", None, "Give a longer text.")
    p = values / values.sum()
    return EffectiveRank(float(1 / p.square().sum()), float(torch.special.entr(p).sum().exp()))


def bandwidth(streams: Sequence[Float[Tensor, "pos d_model"]], seed: int = 0) -> Bandwidth:
    """Ranks and shares, from the stream before the first block, after each block, the last being the final stream.

    Raises:
        UsageError: if there are fewer than three tokens, or the stream does not vary.
    """
    tokens, d_model = streams[0].shape
    if tokens < 3:
        raise UsageError(f"A variance over {tokens} tokens says nothing", None, "Give a longer text.")
    wide = [stream.double() - stream.double().mean(0) for stream in streams]
    final = wide[-1]
    variances = final.square().mean(0)
    writes = [wide[0], *(after - before for before, after in zip(wide, wide[1:], strict=False))]
    shares = torch.stack([(write * final).mean(0) for write in writes]) / variances
    noise = torch.randn(tokens, d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    defined = variances > 0
    return Bandwidth(
        ranks=tuple(effective_rank(stream) for stream in streams),
        noise=effective_rank(noise),
        shares=shares,
        variances=variances,
        unexplained=float((shares[:, defined].sum(0) - 1).abs().max()),
        tokens=tokens,
    )
