"""The linear layers of a model: every product of a matrix with activations that the anatomy names.

A layer is what reads the stream, or the last matrix before something is written into it: queries, keys, values, gate,
up, mixers' inputs; output and down projections. Fused projections are one layer, whichever way round their matrix is
stored. Not among them, as in LLM.int8(): the embedding, the unembedding, routers and gates of a sublayer's output,
which choose or weigh rather than carry.

That a product is rows times the matrix that the anatomy has, plus a bias, is checked in a run before anything is put
in its place. What cannot be had is refused with its place: sums over routed experts, products with another layout.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import RefusedError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Replacement, Site, replaced_functions
from mainstem.model.norms import recorded_error
from mainstem.model.trees import leaves_of, map_leaves
from mainstem.run.inputs import base_arguments

LEFT_ALONE = ("router", "output_gate")
POSITIONS = 8


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """One product of a matrix with activations.

    Attributes:
        name: its sublayer and what it is for, such as "L5.mlp up"; the second of that kind is "L5.mlp up.2".
        path: the module that computes it.
        site: where the product receives its input.
        weight: the model's own matrix.
        bias: what is added; None for nothing.
        node: of the stream graph, what it reads; None for a layer that writes.
    """

    name: str
    path: str
    site: Site
    weight: Float[Tensor, "d_out d_in"]
    bias: Float[Tensor, " d_out"] | None
    node: int | None

    @property
    def place(self) -> str:
        """Its name and its module, for messages."""
        return f"{self.name} ({self.path})" if self.path else self.name


def linear_layers(module: torch.nn.Module, anatomy: Anatomy, ids: Int[Tensor, "batch pos"]) -> tuple[LinearLayer, ...]:
    """The linear layers, in the order in which they run.

    Args:
        module: the model.
        anatomy: its anatomy.
        ids: a few tokens to check the layers on, in one run.

    Raises:
        RefusedError: the model is quantised already, has routed experts, no linear layer that is known, or one whose
            product is not rows times its matrix; the place is named.
    """
    refuse_quantised(module)
    experts = next((write.unit for write in anatomy.writes if write.experts is not None), None)
    experts = experts or next((read.unit for read in anatomy.expert_reads), None)
    if experts is not None:
        raise RefusedError(
            "Routed experts are not quantised", str(experts), "which matrix is used depends on the token",
            "Use a model whose sublayers are dense.",
        )  # fmt: skip
    found = _named(anatomy)
    if not found:
        raise RefusedError("No linear layer is known", None, "nothing that reads or writes the stream is a product")
    return _checked(module, found, ids[:, :POSITIONS])


def _named(anatomy: Anatomy) -> dict[Site, LinearLayer]:
    """The layers that the anatomy names, by their sites; biases are not known yet."""
    found: dict[Site, LinearLayer] = {}
    taken: Counter[str] = Counter()

    def add(name: str, site: Site, weight: Tensor, node: int | None) -> None:
        taken[name] += 1
        again = f".{taken[name]}" if taken[name] > 1 else ""
        found[site] = LinearLayer(name + again, site.path, site, weight, None, node)

    for read in anatomy.reads:
        if not any(role in LEFT_ALONE for role in read.roles):
            add(f"{read.unit} {'+'.join(read.roles)}", read.input_site, read.weight, read.node)
    for write in anatomy.writes:
        site, carried = write.input_site, write.projection
        if site is not None and carried is not None and site not in found:
            add(f"{write.unit} out", site, carried.factors[0], None)
    return found


def refuse_quantised(module: torch.nn.Module) -> None:
    """Refuses a model whose weights are codes already.

    Raises:
        RefusedError: names the first such weight.
    """
    coded = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    place = next((name for name, tensor in tensors if tensor.dim() >= 2 and tensor.dtype in coded), None)
    if place is None and getattr(module, "is_quantized", False):
        place = type(module).__name__
    if place is not None:
        raise RefusedError(
            "The model is quantised already", place, "its weights are codes of a few bits",
            "Give the model that it was made from, in floating point.",
        )  # fmt: skip


@torch.no_grad()
def _checked(
    module: torch.nn.Module, layers: dict[Site, LinearLayer], ids: Int[Tensor, "batch pos"]
) -> tuple[LinearLayer, ...]:
    """The layers with their biases, in the order in which a run met them."""
    met: dict[Site, LinearLayer] = {}

    def check(layer: LinearLayer) -> Replacement:
        def call(func, args, kwargs):
            result, of_zeros = func(*args, **kwargs), _of_zeros(layer, func, args, kwargs)
            met[layer.site] = _with_bias(layer, received(layer, args, kwargs), result, of_zeros)
            return result

        return call

    with replaced_functions(module, {site: check(layer) for site, layer in layers.items()}):
        module(ids, **base_arguments(module))
    missed = next((layer for site, layer in layers.items() if site not in met), None)
    if missed is not None:
        raise RefusedError("A linear layer did not run", missed.place, "the run met no such product")
    return tuple(met.values())


def received(layer: LinearLayer, args: tuple, kwargs: dict) -> Tensor:
    """What the product receives, among its arguments."""
    return leaves_of((args, kwargs))[layer.site.slot]


def _of_zeros(layer: LinearLayer, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """What the product gives for zeros: its bias."""
    leaves = list(leaves_of((args, kwargs)))
    leaves[layer.site.slot] = torch.zeros_like(leaves[layer.site.slot])
    fresh = iter(leaves)
    args, kwargs = map_leaves(lambda old: next(fresh), (args, kwargs))
    return func(*args, **kwargs)


def _with_bias(layer: LinearLayer, x: Tensor, result: Tensor, of_zeros: Tensor) -> LinearLayer:
    d_out, d_in = layer.weight.shape
    if x.shape[-1] != d_in or tuple(result.shape) != (*x.shape[:-1], d_out):
        raise _other(layer, "its rows are not where those of its input are")
    rows, constant = x.reshape(-1, d_in).double(), of_zeros.reshape(-1, d_out)
    expected = rows @ layer.weight.double().T + constant[0].double()
    seen = result.reshape(-1, d_out).double()
    error = recorded_error(result.dtype) * max(float(expected.norm()), math.ulp(0.0))
    if not torch.equal(constant, constant[:1].expand_as(constant)) or not float((seen - expected).norm()) <= error:
        raise _other(layer, "its result is not its input times its matrix, plus a bias")
    bias = constant[0].clone() if constant.any() else None
    return LinearLayer(layer.name, layer.path, layer.site, layer.weight, bias, layer.node)


def _other(layer: LinearLayer, reason: str) -> RefusedError:
    return RefusedError("A linear layer cannot be replaced", layer.place, reason)


def unquantised(module: torch.nn.Module, anatomy: Anatomy, layers: Sequence[LinearLayer]) -> dict[str, int]:
    """The matrices that are neither a layer's nor an embedding or the unembedding, by name, with their sizes."""
    modules = dict(module.named_modules())
    embeddings = [modules[write.module] for write in anatomy.writes if write.unit.kind == "embedding"]
    held = [parameter for embedding in embeddings for parameter in embedding.parameters(recurse=False)]
    held += [anatomy.readout.unembedding, *(layer.weight for layer in layers)]
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    return {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2 and parameter.untyped_storage().data_ptr() not in known
    }
