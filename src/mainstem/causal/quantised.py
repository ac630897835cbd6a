"""A model whose linear layers multiply as a quantiser does: on the fly, and undone exactly.

Weights are never changed. Each layer's matrix is rounded once for each quantiser (codes of one byte, shared between
quantisers that round it alike), and inside `quantised` the layer's product is computed from them where the model calls
it. On leaving, also after an error, the model computes the same bits as before.

SmoothQuant's divisors are known from the inputs of a calibration text. As published, they are of what reads the
stream, one vector for all layers that read the same value, because they are folded into the norm before it; the last
matrix before a write is rounded as it is.

Cost: a run under an int8 quantiser about that of a plain one; a byte for each weight and way of rounding.
Limits: of a tensor's scale, a tensor is what one call of the layer receives: the windows that run together.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.quantizers import Codes, QuantisedMatrix, Quantiser, Scheme, at_least_float32, smoothing
from mainstem.causal.evaluation import Run
from mainstem.causal.linear_layers import LinearLayer, received
from mainstem.errors import NotFiniteError
from mainstem.model.hooks import Replacement, Site, replaced_functions
from mainstem.model.outputs import logits_of
from mainstem.run.inputs import base_arguments

Maxima = Mapping[Site, Float[Tensor, " d_in"]]
"""Of each layer the greatest |x| of its input dimensions."""


@dataclass(frozen=True, eq=False)
class QuantisedLayer:
    """A layer with its rounded matrix, and what its inputs are divided by first, or None."""

    layer: LinearLayer
    matrix: QuantisedMatrix
    divisors: Float[Tensor, " d_in"] | None

    def rows(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "row d_in"]:
        """What the matrix is multiplied with, in the dtype of `x`."""
        rows = x.reshape(-1, x.shape[-1])
        return rows if self.divisors is None else (rows / self.divisors).to(x.dtype)

    def __call__(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """The layer's result, bias included, in the dtype of `x`.

        Raises:
            NotFiniteError: it overflows, or its input has; names the layer.
        """
        result = self.matrix(self.rows(x))
        if self.layer.bias is not None:
            result += self.layer.bias.to(result)
        if not bool(result.sum(dtype=torch.promote_types(result.dtype, torch.float32)).isfinite()):
            dtype = str(x.dtype).removeprefix("torch.")
            raise NotFiniteError(f"A value overflows {dtype}", self.layer.place, "Open the model with --dtype float32.")
        return result.reshape(*x.shape[:-1], -1)


Prepared = tuple[QuantisedLayer, ...]
"""A quantiser's layers, made once and entered as often as wanted."""


def prepared(
    layers: Sequence[LinearLayer], quantisers: Mapping[str, Quantiser], maxima: Maxima | None = None
) -> dict[str, Prepared]:
    """Every layer's matrix rounded by every quantiser, by the quantisers' names.

    Args:
        layers: as `linear_layers` finds them.
        quantisers: by name.
        maxima: of a calibration text, as `input_maxima` gives them; for quantisers that smooth.
    """
    known: dict[tuple[Site, Scheme], Codes] = {}
    return {name: tuple(_layers(layers, quantiser, maxima or {}, known)) for name, quantiser in quantisers.items()}


def _layers(
    layers: Sequence[LinearLayer], quantiser: Quantiser, maxima: Maxima, known: dict[tuple[Site, Scheme], Codes]
) -> Iterator[QuantisedLayer]:
    divisors = _divisors(layers, maxima, quantiser.smoothing) if quantiser.smoothing is not None else {}
    for layer in layers:
        if layer.site in divisors:
            divisor = divisors[layer.site]
            yield QuantisedLayer(layer, quantiser.prepared(at_least_float32(layer.weight) * divisor), divisor)
            continue
        key = layer.site, quantiser.weights
        matrix = quantiser.prepared(layer.weight, known.get(key))
        known[key] = matrix.codes
        yield QuantisedLayer(layer, matrix, None)


def _divisors(layers: Sequence[LinearLayer], maxima: Maxima, exponent: float) -> dict[Site, Float[Tensor, " d_in"]]:
    """Of each layer that reads the stream, by its site; the same for all that read one value."""
    together: dict[int, list[LinearLayer]] = {}
    for layer in layers:
        if layer.node is not None:
            together.setdefault(layer.node, []).append(layer)
    found = {}
    for group in together.values():
        weights = torch.stack([at_least_float32(layer.weight).abs().amax(0) for layer in group]).amax(0)
        inputs = torch.stack([maxima[layer.site] for layer in group]).amax(0)
        found |= dict.fromkeys((layer.site for layer in group), smoothing(inputs, weights, exponent))
    return found


@torch.no_grad()
def input_maxima(module: torch.nn.Module, layers: Sequence[LinearLayer], ids: Int[Tensor, "batch pos"]) -> Maxima:
    """The greatest |x| of every input dimension of every layer, in a run on some tokens."""
    found: dict[Site, Tensor] = {}

    def watching(layer: LinearLayer) -> Replacement:
        def call(func, args, kwargs):
            x = received(layer, args, kwargs)
            found[layer.site] = at_least_float32(x.reshape(-1, x.shape[-1])).abs().amax(0)
            return func(*args, **kwargs)

        return call

    with replaced_functions(module, {layer.site: watching(layer) for layer in layers}):
        module(ids, **base_arguments(module))
    return found


@contextmanager
def quantised(module: torch.nn.Module, layers: Prepared) -> Iterator[torch.nn.Module]:
    """Every run of the model inside multiplies with the rounded matrices; on leaving, it is as it was.

    Raises:
        NotFiniteError: in a run, where a layer's result overflows; names the layer.
    """

    def multiplying(layer: QuantisedLayer) -> Replacement:
        return lambda func, args, kwargs: layer(received(layer.layer, args, kwargs))

    with replaced_functions(module, {layer.layer.site: multiplying(layer) for layer in layers}):
        yield module


def quantised_run(module: torch.nn.Module, layers: Prepared) -> Run:
    """Logits of the model as quantised; of the model itself where there are no layers."""
    arguments, device = base_arguments(module), next(module.parameters()).device

    def run(ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        with quantised(module, layers):
            return logits_of(module(ids.to(device), **arguments))

    return run


@dataclass(frozen=True)
class LayerError:
    """How far one layer is off, on the inputs that it gets in full precision.

    Attributes:
        relative_error: ||quantised - full|| / ||full|| of the layer's product, in the Frobenius norm.
        outliers: how many of its input dimensions are kept in the float dtype.
        d_in: out of how many.
    """

    relative_error: float
    outliers: int
    d_in: int


@torch.no_grad()
def layer_errors(
    module: torch.nn.Module, quantisers: Mapping[str, Prepared], ids: Int[Tensor, "batch pos"]
) -> dict[str, dict[str, LayerError]]:
    """The error of every layer under every quantiser, by the names of quantiser and layer, from one run.

    Layers that run several times on the same weights are told apart by their names.
    """
    found: dict[str, dict[str, LayerError]] = {name: {} for name in quantisers}
    by_site: dict[Site, list[tuple[str, QuantisedLayer]]] = {}
    for name, layers in quantisers.items():
        for layer in layers:
            by_site.setdefault(layer.layer.site, []).append((name, layer))

    def measuring(own: list[tuple[str, QuantisedLayer]]) -> Replacement:
        def call(func, args, kwargs):
            full = func(*args, **kwargs)
            for name, layer in own:
                x = received(layer.layer, args, kwargs)
                found[name][layer.layer.name] = _error(layer, x, full)
            return full

        return call

    with replaced_functions(module, {site: measuring(own) for site, own in by_site.items()}):
        module(ids, **base_arguments(module))
    return found


def _error(layer: QuantisedLayer, x: Tensor, full: Tensor) -> LayerError:
    wide = full.double() if layer.layer.bias is None else full.double() - layer.layer.bias.double()
    off = layer(x).double() - full.double()
    outliers = int(layer.matrix.outliers(layer.rows(x)).sum())
    size = float(wide.norm())
    return LayerError(float(off.norm()) / size if size else 0.0, outliers, x.shape[-1])
