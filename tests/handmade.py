"""Small causal language models that no library knows, each with one awkward structure of the residual stream.

They stand for the families that nobody here has seen. `ALL["in_place"]()` gives a model in evaluation mode
with random weights: 200 tokens, d_model 64, 4 query heads over 2 key/value heads of 16, d_mlp 96, 3 layers.
Each is called with `input_ids` and an optional `attention_mask`, and gives an object with `.logits`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import randomise, seeded

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, LAYERS, CONTEXT = 200, 64, 4, 2, 16, 96, 3, 128


@dataclass
class Output:
    """What a model gives back: logits (batch, length, vocabulary)."""

    logits: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Attention(nn.Module):
    """Grouped-query attention, written out: softmax over scores plus a mask, then the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k = self.key(x).view(batch, length, GROUPS, HEAD).transpose(1, 2).repeat_interleave(HEADS // GROUPS, 1)
        v = self.value(x).view(batch, length, GROUPS, HEAD).transpose(1, 2).repeat_interleave(HEADS // GROUPS, 1)
        pattern = (q @ k.transpose(-1, -2) / math.sqrt(HEAD) + mask).softmax(-1)
        return self.out((pattern @ v).transpose(1, 2).reshape(batch, length, HEADS * HEAD))


class FusedAttention(nn.Module):
    """Attention as two tensors and four contractions, with a learned sink for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HEADS, HEAD, WIDTH))
        self.out = nn.Parameter(torch.randn(HEADS, HEAD, WIDTH) / HEADS**0.5)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = torch.einsum("bpd,chkd->cbhpk", x, self.qkv).unbind(0)
        scores = torch.einsum("bhqk,bhsk->bhqs", q, k) / math.sqrt(HEAD) + mask
        sinks = self.sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
        pattern = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("bhqs,bhsk,hkd->bqd", pattern, v, self.out)


class MLP(nn.Module):
    """Gated feed-forward layer with an output bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The plain pre-norm block; the models below change `forward`."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention, self.mlp = attention(), MLP()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Embeddings of tokens and positions, blocks, a final norm, an untied head; those below change a part."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> Output:
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        length = input_ids.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril() & seen[:, None].bool()
        mask = torch.zeros_like(allowed, dtype=self.tokens.weight.dtype).masked_fill(~allowed, -1e9)[:, None]
        x = self.embed(input_ids, (seen.cumsum(-1) - 1).clamp(min=0))
        return Output(self.unembed(self.run(x, mask)))

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(positions)

    def run(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


# --- blocks -------------------------------------------------------------------------------------------------


class InPlaceBlock(Block):
    """Both additions change the stream in place, and nothing is returned that was not given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x += self.attention(self.norm1(x), mask)
        x.add_(self.mlp(self.norm2(x)))
        return x


class GatedBlock(Block):
    """Each write passes a learned gain per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate1, self.gate2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.gate1 * self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x)) * self.gate2


class SubtractingBlock(Block):
    """The stream decays, and the writes are subtracted: one behind a learned scalar, one a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = 0.9 * x - torch.tanh(self.scale) * self.attention(self.norm1(x), mask)
        return torch.sub(x, self.mlp(self.norm2(x)), alpha=0.37)


class ParallelBlock(Block):
    """Attention and MLP read the same normed stream, and are added at once."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm2

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        read = self.norm1(x)
        return self.attention(read, mask) + self.mlp(read) + x


class InlineNormBlock(Block):
    """The norms are written out: a layer norm before attention, a root mean square before the MLP."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        read = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.norm1.gain + 0.1
        x = x + self.attention(read, mask)
        return x + self.mlp(x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5) * self.norm2.gain)


class DirectCallBlock(Block):
    """Every part is called through its `forward`, so that hooks on modules see nothing."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention.forward(self.norm1.forward(x), mask)
        return x + self.mlp.forward(self.norm2.forward(x))


class PostNormBlock(Block):
    """The norms come after the additions, as in the first GPT: every block renormalises the stream."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


# --- models -------------------------------------------------------------------------------------------------


class InlineNormModel(Model):
    """No norm is a module's work, the last one included."""

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.5) * self.norm.gain)


class NarrowEmbeddingModel(Model):
    """Embeddings of width 40, projected up to the stream and down again before the tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 40)
        self.up, self.down = nn.Linear(40, WIDTH, bias=False), nn.Linear(WIDTH, 40, bias=False)
        del self.head

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.up(self.tokens(ids)) + self.positions(positions)

    def unembed(self, x: Tensor) -> Tensor:
        return self.down(self.norm(x)) @ self.tokens.weight.T


class SharedModel(Model):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__(layers=1)

    def run(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = self.blocks[0](x, mask)
        return x


class AttributesModel(Model):
    """Blocks are attributes with names of their own, and are called through `forward`."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.first, self.middle, self.last = DirectCallBlock(), DirectCallBlock(), DirectCallBlock()

    def run(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last.forward(self.middle.forward(self.first.forward(x, mask), mask), mask)


class SoftcapModel(Model):
    """The logits are scaled and then capped."""

    def unembed(self, x: Tensor) -> Tensor:
        return 5.0 * torch.tanh(self.head(self.norm(x)) * 0.7 / 5.0)


class MixedBackModel(Model):
    """The embedding is mixed into the stream again before every block, by learned scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.mix = nn.Parameter(torch.ones(LAYERS)), nn.Parameter(torch.full((LAYERS,), 0.4))

    def run(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x
        for index, block in enumerate(self.blocks):
            x = block(self.keep[index] * x + self.mix[index] * first, mask)
        return x


class TwoStreamModel(Model):
    """Two parallel streams: each block reads a mixture and writes to both, and the streams are mixed.

    There is no single residual stream: the account must be refused, and say so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.Parameter(torch.full((LAYERS, 2, 2), 0.5))
        self.writes = nn.Parameter(torch.full((LAYERS, 2, 2), 0.7))
        self.mixes = nn.Parameter(torch.eye(2).repeat(LAYERS, 2, 1, 1) * 0.8 + 0.1)

    def run(self, x: Tensor, mask: Tensor) -> Tensor:
        streams = torch.stack([x, 0.5 * x])
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            for half in (0, 1):
                read = torch.einsum("n,nbpd->bpd", self.reads[layer, half], streams)
                write = block.mlp(block.norm2(read)) if half else block.attention(block.norm1(read), mask)
                streams = torch.einsum("mn,nbpd->mbpd", self.mixes[layer, half], streams)
                streams = streams + self.writes[layer, half].view(2, 1, 1, 1) * write
        return streams.sum(0)


class NoFinalNormModel(Model):
    """The head reads the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(x)


def _ready(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build(seed: int = 1) -> nn.Module:
        with seeded(seed):
            model = make().eval()
        randomise(model, seed)
        return model

    return build


ALL: dict[str, Callable[[], nn.Module]] = {
    name: _ready(make)
    for name, make in {
        "plain": Model,
        "in_place": lambda: Model(InPlaceBlock),
        "channel_gates": lambda: Model(GatedBlock),
        "subtracting": lambda: Model(SubtractingBlock),
        "parallel": lambda: Model(ParallelBlock),
        "inline_norms": lambda: InlineNormModel(InlineNormBlock),
        "narrow_embedding": NarrowEmbeddingModel,
        "shared_block": SharedModel,
        "attributes": AttributesModel,
        "einsum_sinks": lambda: Model(lambda: Block(FusedAttention)),
        "softcap": SoftcapModel,
        "mixed_back": MixedBackModel,
        "two_streams": TwoStreamModel,
        "post_norm": lambda: Model(PostNormBlock),
        "no_final_norm": NoFinalNormModel,
    }.items()
}

REFUSED = {"two_streams"}
"""Those that have no single residual stream."""


class Mixing(nn.Module):
    """The plain model, but each row of a batch gets something of the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ALL["plain"]()
        block = self.model.blocks[1]  # type: ignore[index]
        inside = block.forward
        block.forward = lambda x, mask: inside(x, mask) + 0.5 * (x.mean(0, keepdim=True) - x)
        self.eval()

    def forward(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs)
