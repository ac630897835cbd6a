"""Plain and residual networks for small images, in the style of He et al. 2015 (section 4.2), where degradation shows.

A stem of one 3x3 convolution, then 6n of them, 2n at each of three map sizes (each half the size before, by a stride of
2) and widths, then the mean over the map and a linear readout: 6n + 2 layers. Every convolution is followed by batch
norm. The convolutions are grouped in blocks of one, two or three layers,

    residual    y = relu(F(x) + x)        F = N W ... relu(N W x), the rectifier after the last layer left out
    plain       y = relu(F(x))

with shortcuts that have no parameters (option A): where the map becomes smaller and wider, x loses every other row and
column, and gets channels of zeros. So the two have the same parameters, and from one seed the same weights: what
differs between them when they are trained is the addition alone.

Weights are drawn as He et al. 2015b say, with variance 2 / (9 * channels in); they depend on the seed alone.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mainstem.errors import UsageError
from mainstem.model.hooks import Site, tapped

Activation = Literal["relu", "sigmoid"]

BATCH = 500
"""How many images are told at a time."""


@dataclass(frozen=True)
class ConvNetConfig:
    """The shape of a network.

    Attributes:
        depth: layers with weights, 6n + 2.
        residual: whether a block's input is added to its output.
        block_layers: convolutions in a block: 1, 2 or 3.
        widths: channels at the three map sizes.
        channels: of the images.
        classes: how many to choose from.
        normalised: whether there is batch norm.
        activation: `sigmoid`, without batch norm, is for showing what gradients that vanish look like.

    Raises:
        UsageError: the depth is not 6n + 2, its stages of 2n layers cannot be cut into blocks, or widths do not grow.
    """

    depth: int = 20
    residual: bool = True
    block_layers: int = 2
    widths: tuple[int, int, int] = (16, 32, 64)
    channels: int = 3
    classes: int = 10
    normalised: bool = True
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        if self.depth < 8 or self.depth % 6 != 2:
            raise UsageError(f"A network of {self.depth} layers is not 6n + 2", None, "Give 8, 14, 20, ... 56 ...")
        if self.block_layers not in (1, 2, 3) or self.stage_layers % self.block_layers:
            raise UsageError(
                f"{self.stage_layers} layers of one map size are not cut into blocks of {self.block_layers}",
                f"depth {self.depth}",
                "Give blocks of 1, 2 or 3 layers that divide them.",
            )
        if not 0 < self.widths[0] < self.widths[1] < self.widths[2]:
            raise UsageError(f"Widths of {self.widths} do not grow as maps get smaller", None, "Give, say, 16, 32, 64.")

    @property
    def stage_layers(self) -> int:
        """Convolutions at one map size, 2n."""
        return (self.depth - 2) // 3


class Layer(nn.Module):
    """A 3x3 convolution and batch norm; its output is the layer's response."""

    def __init__(self, wide_in: int, wide_out: int, stride: int, normalised: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(wide_in, wide_out, 3, stride, padding=1, bias=False, device="meta")
        self.convolution.to_empty(device="cpu")
        self.norm = nn.BatchNorm2d(wide_out) if normalised else nn.Identity()

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        """The response."""
        return self.norm(self.convolution(x))


class Block(nn.Module):
    """One, two or three layers, with or without their input added."""

    def __init__(self, config: ConvNetConfig, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.residual, self.activate = config.residual, _activation(config.activation)
        self.stride, self.wider = 1 + (wide_in != wide_out), wide_out - wide_in
        shapes = [(wide_in, wide_out, self.stride)] + [(wide_out, wide_out, 1)] * (config.block_layers - 1)
        self.layers = nn.ModuleList(Layer(*shape, config.normalised) for shape in shapes)

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        """What the next block reads."""
        written = x
        for number, layer in enumerate(self.layers):
            written = layer(self.activate(written) if number else written)
        return self.activate(written + self.shortcut(x) if self.residual else written)

    def shortcut(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        """The input in the shape of the output, without parameters: option A."""
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.wider))
        return x


class ConvNet(nn.Module):
    """The network; `convnet` makes one from a seed."""

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.config = config
        blocks, wide_in = [], config.widths[0]
        self.stem = Layer(config.channels, wide_in, 1, config.normalised)
        self.activate = _activation(config.activation)
        for wide_out in config.widths:
            for _ in range(config.stage_layers // config.block_layers):
                blocks.append(Block(config, wide_in, wide_out))
                wide_in = wide_out
        self.blocks = nn.ModuleList(blocks)
        self.readout = nn.Linear(wide_in, config.classes, device="meta").to_empty(device="cpu")

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch category"]:
        """The logits."""
        x = self.activate(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.readout(x.mean((2, 3)))

    def convolutions(self) -> dict[str, Layer]:
        """All layers but the readout by their paths, in the order of execution."""
        return {path: module for path, module in self.named_modules() if isinstance(module, Layer)}


def convnet(config: ConvNetConfig, seed: int = 0) -> ConvNet:
    """A network with weights drawn from a seed; torch's own random state is left alone."""
    net, generator = ConvNet(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in net.convolutions().values():
            weight = layer.convolution.weight
            deviation = (2 / weight[0].numel()) ** 0.5
            weight.copy_(deviation * torch.randn(weight.shape, generator=generator))
        weight = net.readout.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
        net.readout.bias.zero_()
    return net


def _activation(name: Activation) -> nn.Module:
    return nn.ReLU() if name == "relu" else nn.Sigmoid()


# --- what is measured of a network --------------------------------------------------------------------------


def responses(net: ConvNet, x: Float[Tensor, "batch channel height width"]) -> list[float]:
    """The standard deviation of each convolution's output, after batch norm and before the addition and the rectifier.

    Of He et al. 2015, figure 7. Batch norm takes its statistics from these images, so that every response of an
    untrained network is 1.

    Args:
        net: the network; it is not changed.
        x: images, a few hundred.
    """
    net = _copy(net)
    seen: list[float] = []
    watched = [
        (Site(path, 0, "output"), lambda leaves: seen.append(float(leaves[0].std()))) for path in net.convolutions()
    ]
    with torch.no_grad(), tapped(net, watched):
        net(x.to(_device(net)))
    return seen


def gradient_norms(
    net: ConvNet, x: Float[Tensor, "batch channel height width"], y: Int[Tensor, " batch"]
) -> list[float]:
    """The norm of the loss's gradient with respect to each convolution's weight, as training sees it.

    Args:
        net: the network; it is not changed.
        x: images.
        y: their classes.
    """
    net = _copy(net)
    device = _device(net)
    F.cross_entropy(net(x.to(device)), y.to(device)).backward()
    return [_norm(layer.convolution.weight.grad) for layer in net.convolutions().values()]


def error_rate(net: ConvNet, x: Float[Tensor, "batch channel height width"], y: Int[Tensor, " batch"]) -> float:
    """The share of images that are told wrongly, by the network as it is used: with the statistics of its training."""
    net = _copy(net).eval()
    with torch.no_grad():
        told = torch.cat([net(part.to(_device(net))).argmax(1).cpu() for part in x.split(BATCH)])
    return float((told != y).double().mean())


def _device(net: ConvNet) -> torch.device:
    return net.readout.weight.device


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.norm())


def _copy(net: ConvNet) -> ConvNet:
    """In the mode of training: what batch norm has counted so far is left as it is."""
    return copy.deepcopy(net).train()
