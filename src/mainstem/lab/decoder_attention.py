"""The decoder's attention: causal, with the choices that the laboratory's experiments are about.

    scores    s_ij = q_i . k_j / sqrt(d_head)          of all earlier j, and i itself
    pattern   softmax      exp s_ij / sum_j exp s_ij
              softmax_1    exp s_ij / (1 + sum_j exp s_ij): a head may attend to nothing     (Kaul et al. 2025)
              clipped      clip((1 - gamma) softmax + gamma, 0, 1) with gamma < 0             (Bondarenko et al. 2023)
    smeared   k_j <- sigma(a) k_j + (1 - sigma(a)) k_{j-1}, a learned for each head           (Olsson et al. 2022)
    gated     each head's result times sigma(w . what the attention reads)                    (Bondarenko et al. 2023)
    rotary    pairs of coordinates of q_i and k_j turned by angles i w and j w

The first key has none before it and stays as it is. Keys are smeared before they are turned.

The cache holds keys and values as the matrix gives them, neither smeared nor turned; both are done to all keys at each
step, so that the key before is always there.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.decoder_sublayer import Read, Rotation, Write

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Context:
    """What all layers of one forward pass share.

    Attributes:
        positions: of every key, those in the cache included, counted from the first real token of each row.
        allowed: which sources each destination may read; None: all earlier ones and itself.
        padded: whether rows may start later than at the first column.
        cache: keys and values of earlier positions.
    """

    positions: Int[Tensor, "#batch source"]
    allowed: Bool[Tensor, "#batch 1 pos source"] | None
    padded: bool
    cache: Cache | None


class Attention(nn.Module):
    """Attention of n_heads heads; one matrix reads queries, keys, values and, where it is gated, the gates."""

    def __init__(self, config: DecoderConfig, layer: int, read: Rotation, write: Rotation) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        gates = config.n_heads if config.gated_attention else 0
        self.read = Read(config, 3 * config.d_model + gates, read)
        self.write = Write(config, config.d_model, write)
        self.smear = nn.Parameter(torch.zeros(config.n_heads)) if config.smeared_keys else None

    def forward(
        self, stream: Float[Tensor, "batch pos d_model"], context: Context
    ) -> Float[Tensor, "batch pos d_model"]:
        """What the heads write into the stream."""
        width, heads = self.config.d_model, self.config.n_heads
        query, key, value, *gate = self.read(stream).split([width] * 3 + [heads] * self.config.gated_attention, -1)
        query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.layer)
        if self.smear is not None:
            key = smeared(key, self.smear.sigmoid(), context)
        if self.config.positions == "rotary":
            query = turned(query, context.positions[:, -query.shape[2] :])
            key = turned(key, context.positions)
        result = self.mixed(query, key, value, context.allowed).transpose(1, 2)
        if gate:
            result = result * gate[0].sigmoid().unsqueeze(-1)
        return self.write(result.flatten(2))

    def mixed(
        self,
        query: Float[Tensor, "batch n_heads pos d_head"],
        key: Float[Tensor, "batch n_heads source d_head"],
        value: Float[Tensor, "batch n_heads source d_head"],
        allowed: Bool[Tensor, "#batch 1 pos source"] | None,
    ) -> Float[Tensor, "batch n_heads pos d_head"]:
        """The values that each head's pattern mixes; torch's own kernel where it has the function."""
        if self.config.attention == "softmax":
            return F.scaled_dot_product_attention(query, key, value, allowed, is_causal=allowed is None)
        if allowed is None:
            allowed = causal(query.shape[2], key.shape[2], query.device)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~allowed, -torch.inf)
        if self.config.attention == "softmax_1":
            return F.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ value
        gamma = self.config.gamma or 0.0
        return ((1 - gamma) * scores.softmax(-1) + gamma).clamp(0, 1) @ value


def causal(positions: int, sources: int, device: torch.device) -> Bool[Tensor, "pos source"]:
    """Which sources are not later than each of the last `positions`."""
    return torch.ones(positions, sources, dtype=torch.bool, device=device).tril(sources - positions)


def smeared(
    key: Float[Tensor, "batch n_heads source d_head"], share: Float[Tensor, " n_heads"], context: Context
) -> Float[Tensor, "batch n_heads source d_head"]:
    """Each key mixed with the one before it; `share` is its own part."""
    before = torch.cat([key[:, :, :1], key[:, :, :-1]], 2)
    if context.padded:
        before = torch.where((context.positions == 0)[:, None, :, None], key, before)
    share = share[:, None, None]
    return share * key + (1 - share) * before


def turned(
    x: Float[Tensor, "batch n_heads pos d_head"], positions: Int[Tensor, "#batch pos"]
) -> Float[Tensor, "batch n_heads pos d_head"]:
    """Coordinates j and j + d_head / 2 turned by position * base^(-2 j / d_head)."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, :, None] * frequencies
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
