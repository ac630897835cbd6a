"""How the decoder's sublayers read the stream and write into it: norm, rotation, gain, matrix; matrix, rotation back.

    read     W (g * R n(x) + b)     n: the norm without its gain g and bias b; W: the matrix
    write    R^T W z

Without rotation R is the identity, and this is the usual pre-norm sublayer. A fixed orthogonal R turns the
activations between the stream and the basis that the sublayer computes in (Elhage, Lasenby and Olah 2023, "Privileged
Bases in the Transformer Residual Stream", the experiments on training): gain, bias and W belong to the basis of the
computation, and nothing that is trained is aligned with the dimensions of the stream. As in the paper there is one
rotation for all places ("shared": the same function as without, its stream turned) or another one for each
("independent"). R keeps the vector of ones, so that LayerNorm's mean is the same in both bases.

The rotation is multiplied into the matrix in each forward pass, (W diag(g) R) n(x) + W b, which is the same map of the
activations with the same gradients, and costs d_model^2 d_out once instead of d_model^2 for every token.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mainstem.analysis.rotations import rotation
from mainstem.lab.decoder_config import DecoderConfig

Rotation = Float[Tensor, "d_model d_model"] | None


def rotations(config: DecoderConfig) -> Iterator[Rotation]:
    """The rotation of each place that reads the stream or writes into it, one after the other."""
    place = 0
    while True:
        if config.rotation == "none":
            yield None
        else:
            seed = config.rotation_seed + (place if config.rotation == "independent" else 0)
            yield rotation("random", config.d_model, seed, fix_ones=True).float()
        place += 1


class Norm(nn.Module):
    """LayerNorm, RMSNorm, RMSNorm with one gain for all dimensions, or none."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        sizes = {"layer": config.d_model, "rms": config.d_model, "rms_single": 1}
        size = sizes.get(config.norm)
        self.gain = None if size is None else nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if config.norm == "layer" else None

    def bare(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The norm without gain and bias."""
        if self.kind == "layer":
            return F.layer_norm(stream, stream.shape[-1:], eps=self.eps)
        return stream if self.kind == "none" else F.rms_norm(stream, stream.shape[-1:], eps=self.eps)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The norm."""
        if self.kind == "layer":
            return F.layer_norm(stream, stream.shape[-1:], self.gain, self.bias, self.eps)
        return stream if self.gain is None else self.bare(stream) * self.gain


class Read(nn.Module):
    """A matrix [d_out, d_model] that reads the stream through a norm of its own."""

    rotation: Tensor | None

    def __init__(self, config: DecoderConfig, d_out: int, rotation: Rotation) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.weight = nn.Parameter(torch.empty(d_out, config.d_model))
        self.register_buffer("rotation", rotation)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_out"]:
        """What the sublayer gets."""
        if self.rotation is None:
            return F.linear(self.norm(stream), self.weight)
        weight = self.weight if self.norm.gain is None else self.weight * self.norm.gain
        constant = None if self.norm.bias is None else self.weight @ self.norm.bias
        return F.linear(self.norm.bare(stream), weight @ self.rotation, constant)

    def computation_basis(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What W reads, in the basis that the sublayer computes in: g * R n(x) + b."""
        if self.rotation is None:
            return self.norm(stream)
        turned = self.norm.bare(stream) @ self.rotation.T
        turned = turned if self.norm.gain is None else turned * self.norm.gain
        return turned if self.norm.bias is None else turned + self.norm.bias


class Write(nn.Module):
    """A matrix [d_model, d_in] that writes into the stream."""

    rotation: Tensor | None

    def __init__(self, config: DecoderConfig, d_in: int, rotation: Rotation) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model, d_in))
        self.register_buffer("rotation", rotation)

    def forward(self, inside: Float[Tensor, "batch pos d_in"]) -> Float[Tensor, "batch pos d_model"]:
        """What is added to the stream."""
        return F.linear(inside, self.weight if self.rotation is None else self.rotation.T @ self.weight)
