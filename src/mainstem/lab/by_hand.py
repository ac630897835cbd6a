"""What models share whose weights are set by hand: embeddings, blocks without norms, and the unembedding.

Weights are made without torch's own initialisation, which would draw random numbers; whoever builds such a model fills
every one of them.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class ByHand(nn.Module):
    """A causal language model of some blocks; each takes the stream and gives the stream after it.

    Args:
        d_vocab: how many tokens.
        context: how many positions at most.
        d_model: the width of the stream.
        blocks: in their order.
    """

    def __init__(self, d_vocab: int, context: int, d_model: int, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = embedding(d_vocab, d_model), embedding(context, d_model)
        self.blocks, self.unembedding = nn.ModuleList(blocks), linear(d_model, d_vocab)

    def forward(self, input_ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        """The logits."""
        stream = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            stream = block(stream)
        return self.unembedding(stream)


def attended(
    stream: Float[Tensor, "batch pos d_model"], maps: Sequence[nn.Linear], d_head: int
) -> Float[Tensor, "batch pos d_in"]:
    """What causal attention gives to the output matrix, from the query, key and value matrices of all heads."""
    q, k, v = (f(stream).unflatten(-1, (-1, d_head)).transpose(1, 2) for f in maps)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def linear(d_in: int, d_out: int) -> nn.Linear:
    """A product with a matrix still to be filled."""
    return nn.Linear(d_in, d_out, bias=False, device="meta").to_empty(device="cpu")


def embedding(rows: int, d_model: int) -> nn.Embedding:
    """A table still to be filled."""
    return nn.Embedding(rows, d_model, device="meta").to_empty(device="cpu")


def draw(weight: Tensor, size: float, generator: torch.Generator) -> None:
    """Fills a weight with Gaussian numbers of a size."""
    weight.copy_(size * torch.randn(weight.shape, generator=generator))
