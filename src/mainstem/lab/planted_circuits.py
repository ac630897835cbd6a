"""An attention-only model with planted circuits between tokens: the ground truth for circuits read from weights.

Two layers of three heads without norms, over 24 tokens or more. The embedding writes a token's own dimension, the
unembedding reads another dimension for each token.

    L0H0    three skip trigrams (`SKIP_TRIGRAMS`), of which two share their source and so force two more
    L0H1    copies the token it looks at, whatever it is
    others  random weights of the same size
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

D_VOCAB, N_HEADS, N_LAYERS = 24, 3, 2

SKIP_TRIGRAMS = ((2, 5, 9), (2, 7, 11), (3, 8, 14))
"""(source, destination, out) of L0H0."""

FORCED = ((2, 5, 11), (2, 7, 9))
"""What the first two force."""

SIZE = 5.0
"""Of a planted entry in either circuit."""


class Attention(nn.Module):
    """Causal attention of three heads, each as wide as there are tokens, on a stream of twice the width."""

    def __init__(self, d_vocab: int) -> None:
        super().__init__()
        self.d_head, d_model = d_vocab, 2 * d_vocab
        self.query, self.key, self.value = (nn.Linear(d_model, N_HEADS * d_vocab, bias=False) for _ in range(3))
        self.output = nn.Linear(N_HEADS * d_vocab, d_model, bias=False)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the heads write."""
        maps = (self.query, self.key, self.value)
        q, k, v = (f(stream).unflatten(-1, (N_HEADS, self.d_head)).transpose(1, 2) for f in maps)
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    @torch.no_grad()
    def plant(self, head: int, qk: Float[Tensor, "token token"], ov: Float[Tensor, "token token"]) -> None:
        """Gives a head its circuits: qk [destination, source] of scores, ov [out, source] of logits."""
        d_head, token, out = self.d_head, slice(0, self.d_head), slice(self.d_head, None)
        rows = slice(head * d_head, (head + 1) * d_head)
        for linear in (self.query, self.key, self.value):
            linear.weight[rows] = 0
        self.output.weight[:, rows] = 0
        self.query.weight[rows, token] = torch.eye(d_head) * d_head**0.5
        self.key.weight[rows, token] = qk
        self.value.weight[rows, token] = torch.eye(d_head)
        self.output.weight[out, rows] = ov


class PlantedCircuits(nn.Module):
    """The model; open it with `mainstem.open(PlantedCircuits())`.

    Args:
        seed: of the other heads' weights; torch's own random state is left alone.
        d_vocab: how many tokens.
    """

    def __init__(self, seed: int = 0, d_vocab: int = D_VOCAB) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(d_vocab, 2 * d_vocab)
            self.layers = nn.ModuleList(Attention(d_vocab) for _ in range(N_LAYERS))
            self.unembedding = nn.Linear(2 * d_vocab, d_vocab, bias=False)
        with torch.no_grad():
            self.tokens.weight.copy_(torch.eye(d_vocab, 2 * d_vocab))
            self.unembedding.weight.copy_(torch.eye(2 * d_vocab)[d_vocab:])
        first = self.layers[0]
        assert isinstance(first, Attention)
        qk, ov = torch.zeros(2, d_vocab, d_vocab)
        for source, destination, out in SKIP_TRIGRAMS:
            qk[destination, source] = ov[out, source] = SIZE
        first.plant(0, qk, ov)
        first.plant(1, torch.eye(d_vocab), SIZE * torch.eye(d_vocab))
        self.eval()

    def forward(self, input_ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        """The logits."""
        stream = self.tokens(input_ids)
        for layer in self.layers:
            stream = stream + layer(stream)
        return self.unembedding(stream)
