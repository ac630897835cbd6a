"""Networks for small images: plain and residual ones differ by the addition alone."""

import pytest
import torch
from torch import nn

from mainstem.errors import UsageError
from mainstem.lab.convnets import ConvNetConfig, convnet, gradient_norms, responses

SHAPE = {"widths": (4, 8, 16), "channels": 1}


def images(count: int = 16, channels: int = 1, size: int = 8) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


CLASSES = torch.arange(16) % 10


def test_parameters_are_as_many_as_published() -> None:
    """He et al. 2015, table 6: 0.27 million for 20 layers and 0.85 for 56."""
    for depth, published in ((20, 0.27), (56, 0.85)):
        count = sum(weight.numel() for weight in convnet(ConvNetConfig(depth)).parameters())
        assert round(count / 1e6, 2) == published


@pytest.mark.parametrize("depth", [8, 20, 56])
@pytest.mark.parametrize("block_layers", [1, 2])
def test_layers_with_weights_are_as_many_as_the_depth(depth: int, block_layers: int) -> None:
    net = convnet(ConvNetConfig(depth, block_layers=block_layers, **SHAPE))
    kinds = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(kinds) == depth and len(net.convolutions()) == depth - 1
    assert net(images(2)).shape == (2, 10)


@pytest.mark.parametrize("block_layers", [1, 2, 3])
def test_plain_and_residual_have_the_same_weights(block_layers: int) -> None:
    pair = [convnet(ConvNetConfig(20, residual, block_layers, **SHAPE), seed=3) for residual in (False, True)]
    plain, residual = (net.state_dict() for net in pair)
    assert plain.keys() == residual.keys() and all(torch.equal(plain[name], residual[name]) for name in plain)
    assert not torch.allclose(*(net(images()) for net in pair))


def test_a_plain_network_has_no_blocks() -> None:
    """How its layers are grouped changes nothing."""
    nets = [convnet(ConvNetConfig(20, False, block_layers, **SHAPE)) for block_layers in (1, 2, 3)]
    found = [net(images()) for net in nets]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("block_layers", [1, 2, 3])
def test_a_block_that_writes_nothing_hands_on_what_it_reads(block_layers: int) -> None:
    net = convnet(ConvNetConfig(20, True, block_layers, **SHAPE))
    for path, layer in net.convolutions().items():
        if path != "stem":
            nn.init.zeros_(layer.norm.weight)
    stem = torch.relu(net.stem(images()))
    x = stem
    for block in net.blocks:
        x = block(x)
    assert x.shape == (16, 16, 2, 2)
    assert torch.equal(x[:, :4], stem[:, :, ::4, ::4]) and not x[:, 4:].any()


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (convnet(ConvNetConfig(8, **SHAPE), seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["stem.convolution.weight"], other["stem.convolution.weight"])


def test_weights_are_of_the_size_that_keeps_signals() -> None:
    for layer in convnet(ConvNetConfig(20)).convolutions().values():
        weight = layer.convolution.weight
        assert float(weight.detach().std()) == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.15)


@pytest.mark.parametrize(
    "changes",
    [{"depth": 21}, {"depth": 2}, {"block_layers": 4}, {"depth": 8, "block_layers": 3}, {"widths": (8, 8, 16)}],
)
def test_shapes_that_cannot_be_built_are_refused(changes: dict) -> None:
    with pytest.raises(UsageError, match=r"6n \+ 2|blocks of|do not grow"):
        ConvNetConfig(**changes)


# --- measures -----------------------------------------------------------------------------------------------


def test_responses_of_an_untrained_network_are_one() -> None:
    """Batch norm makes them so: whatever they are later, training has done it."""
    net = convnet(ConvNetConfig(20, **SHAPE))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = responses(net, images())
    assert len(found) == 19 and found == pytest.approx([1.0] * 19, abs=0.01)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_responses_are_taken_after_the_norm_and_before_the_addition() -> None:
    net = convnet(ConvNetConfig(8, **SHAPE))
    layer = net.blocks[1].layers[1]
    nn.init.constant_(layer.norm.weight, 3.0)
    nn.init.constant_(layer.norm.bias, -7.0)
    assert responses(net, images())[4] == pytest.approx(3.0, rel=0.01)


def test_gradient_norms_are_those_of_autograd() -> None:
    net = convnet(ConvNetConfig(8, **SHAPE))
    found = gradient_norms(net, images(), CLASSES)
    assert all(weight.grad is None for weight in net.parameters())
    nn.functional.cross_entropy(net(images()), CLASSES).backward()
    layers = net.convolutions().values()
    assert found == pytest.approx([float(layer.convolution.weight.grad.norm()) for layer in layers])


def test_gradients_that_vanish_are_seen() -> None:
    """Sigmoids without batch norm, the textbook's case, against the plain network of the experiment."""
    plain = ConvNetConfig(56, False, **SHAPE)
    vanishing = ConvNetConfig(56, False, normalised=False, activation="sigmoid", **SHAPE)
    norms = [gradient_norms(convnet(config), images(), CLASSES) for config in (plain, vanishing)]
    ratios = [found[0] / found[-1] for found in norms]
    assert ratios[0] > 1 and ratios[1] < 1e-6
