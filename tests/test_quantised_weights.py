"""Weights that are not the matrices they stand for: quantised layers and adapters give right circuits or a refusal."""

import copy

import peft
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

import mainstem
from mainstem.errors import LevelRefusedError, RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")


class Scaled(nn.Module):
    """A linear layer of 8-bit numbers and a scale for each row, multiplied out before the product."""

    bits = 8

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        most = 2 ** (self.bits - 1) - 1
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / most
        self.register_buffer("scale", scale)
        self.register_buffer("whole", self.stored((linear.weight.detach() / scale).round().to(torch.int8)))

    def stored(self, whole: Tensor) -> Tensor:
        return whole

    def matrix(self) -> Tensor:
        """The weights that it stands for."""
        return self.whole.to(self.scale.dtype) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix())


class Packed(Scaled):
    """The same of 4-bit numbers, two in a byte."""

    bits = 4

    def stored(self, whole: Tensor) -> Tensor:
        low, high = ((whole + 8).to(torch.uint8)[:, i::2] for i in (0, 1))
        return low | (high << 4)

    def matrix(self) -> Tensor:
        numbers = torch.stack([self.whole & 15, self.whole >> 4], -1).flatten(1)
        return (numbers.to(self.scale.dtype) - 8) * self.scale


class AfterProduct(Scaled):
    """The scales multiply the product."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole.to(x.dtype)) * self.scale[:, 0]


class Kernel(Scaled):
    """What is read is rounded, too, and whole numbers are multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().amax(-1, keepdim=True) / 127
        product = (x / size).round().to(torch.int32) @ self.whole.to(torch.int32).T
        return product.to(x.dtype) * size * self.scale[:, 0]


def with_layers(make, names: tuple[str, ...]) -> nn.Module:
    """A tiny model some of whose linear layers are made anew."""
    module = zoo.build("llama")
    for path, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and path.endswith(names):
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, make(layer))
    return module.eval()


def dense(module: nn.Module) -> nn.Module:
    """The same with the matrices that the layers stand for."""
    out = copy.deepcopy(module)
    for path, layer in list(out.named_modules()):
        if isinstance(layer, Scaled):
            parent, _, name = path.rpartition(".")
            made = nn.Linear(0, 0, bias=False)
            made.weight = nn.Parameter(layer.matrix().clone())
            setattr(out.get_submodule(parent), name, made)
    return out.eval()


def assert_same_weights(module: nn.Module, plain: nn.Module) -> None:
    one, other = mainstem.open(module), mainstem.open(plain)
    assert one.weights_check.holds
    for head in one.weights.heads[::5]:
        for made in ("qk", "ov"):
            expected = getattr(other.weights, made)(head).dense()
            assert torch.allclose(getattr(one.weights, made)(head).dense(), expected, atol=1e-6 * expected.norm())


@pytest.mark.parametrize("make", [Scaled, Packed, AfterProduct])
def test_weights_that_are_dequantised_in_the_run_are_the_matrices_they_stand_for(make) -> None:
    module = with_layers(make, ("proj",))
    assert_same_weights(module, dense(module))


def test_a_kernel_of_whole_numbers_is_refused_by_name() -> None:
    model = mainstem.open(with_layers(Kernel, ("q_proj",)))
    said = r"L1\.attn.*q_proj multiplies by quantised weights"
    with pytest.raises(LevelRefusedError, match=said):
        model.head_circuits("L1H1")
    with pytest.raises(LevelRefusedError, match="q_proj multiplies by quantised weights"):
        model.composition(("k",))
    with pytest.raises(LevelRefusedError, match=said):
        model.compare_subspaces("L0H1.write", "L1H1.query")
    assert model.composition(("v",), top=1).certificate.holds  # values and outputs are as they were


def test_output_matrices_of_whole_numbers_are_refused_by_name() -> None:
    model = mainstem.open(with_layers(Kernel, ("o_proj", "down_proj")))
    with pytest.raises(LevelRefusedError, match=r"L1\.attn: model\.layers\.1\.self_attn\.o_proj .* quantised"):
        model.head_circuits("L1H1")
    with pytest.raises(LevelRefusedError, match="o_proj multiplies by quantised weights"):
        model.composition()


def test_packed_weights_of_torch_are_refused_by_name() -> None:
    plain = zoo.build("llama")
    some = torch.ao.quantization.quantize_dynamic(plain, {"model.layers.1.self_attn.k_proj"}, dtype=torch.qint8)
    with pytest.raises(LevelRefusedError, match=r"L1\.attn: self_attn\.k_proj multiplies by quantised weights"):
        mainstem.open(some.eval()).head_circuits("L1H1")
    everything = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(RefusedError, match="lm_head multiplies by quantised weights"):
        mainstem.open(everything.eval()).head_circuits("L1H1")


def adapted(targets: list[str]) -> peft.PeftModel:
    made = peft.get_peft_model(zoo.build("llama"), peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made.eval()


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj"])
def test_an_adapter_beside_the_matrix_is_refused_by_name(target: str) -> None:
    with pytest.raises(LevelRefusedError, match=rf"L1\.attn: .* 2 matrices .*{target}\.base_layer.*lora_A.*merge"):
        mainstem.open(adapted([target])).head_circuits("L1H1")


def test_an_adapter_of_the_output_matrix_is_in_what_the_head_writes() -> None:
    made = adapted(["o_proj"])
    assert_same_weights(made, copy.deepcopy(made).merge_and_unload())


def test_a_merged_adapter_is_in_the_circuits() -> None:
    made = adapted(["q_proj", "v_proj"])
    layer = made.base_model.model.model.layers[1].self_attn.q_proj
    whole = (
        layer.base_layer.weight + layer.lora_B.default.weight @ layer.lora_A.default.weight * layer.scaling["default"]
    )
    merged = made.merge_and_unload()
    assert torch.allclose(merged.model.layers[1].self_attn.q_proj.weight, whole, atol=1e-5)
    assert mainstem.open(merged.eval()).weights_check.holds
