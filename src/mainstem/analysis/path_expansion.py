"""The logits of an attention-only model as a sum over paths through its heads (Elhage et al. 2021).

With the patterns and the norms' scales of a run a model without MLPs is linear in its embeddings, and its logits are
sums over all products of heads in the order of the layers: the direct path, each head alone, A^h2 A^h1 x W_OV^h2
W_OV^h1 of two heads (a virtual attention head), and so on. The certificate compares the sum with the model's own
logits. Terms are made from the factored weights, patterns and scales only: nothing is fitted, no remainder is kept.

Cost: paths grow as (heads + 1)^layers; `orders` adds up all paths of as many heads and grows with layers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.factored import Factored
from mainstem.analysis.head_circuits import eigenvalue_score
from mainstem.analysis.token_vectors import unembedded
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Readout
from mainstem.units import Unit

MOST = 4096
"""Paths to be listed one by one at most."""

Path = tuple[Unit, ...]
DIRECT: Path = ()
"""The path through no head."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention sublayer of a run.

    Attributes:
        heads: its heads.
        pattern: what each destination gives to each source.
        ov: W_OV of the heads, as a stack.
        scale: the scale at each position of the norm that it reads through.
        bias: what each head writes of the bias of its values, for all of its pattern.
        constant: the bias that the sublayer writes.
    """

    heads: tuple[Unit, ...]
    pattern: Float[Tensor, "n_heads pos source"]
    ov: Factored
    scale: Float[Tensor, " pos"]
    bias: Float[Tensor, "n_heads d_model"]
    constant: Float[Tensor, " d_model"]

    def through(self, head: int, stream: Float[Tensor, "source d_model"]) -> Float[Tensor, "pos d_model"]:
        """What a head writes of a part of the stream."""
        moved = self.pattern[head] @ (stream * self.scale[:, None])
        return moved @ self.ov.right[head].mT @ self.ov.left[head].mT

    def begun(self, head: int) -> Float[Tensor, "pos d_model"]:
        """What a head writes of the bias of its values: a path that begins at the head."""
        return self.pattern[head].sum(-1, keepdim=True) * self.bias[head]


@dataclass(frozen=True, eq=False)
class PathExpansion:
    """A run of an attention-only model, ready to be expanded.

    Attributes:
        layers: in the order of execution.
        embedding: what enters the first, at every position.
        scale: the final norm's, at every position.
        readout: of the model.
        logits: what the model computed.
    """

    layers: Sequence[Layer]
    embedding: Float[Tensor, "pos d_model"]
    scale: Float[Tensor, " pos"]
    readout: Readout
    logits: Float[Tensor, "pos d_vocab"]

    def orders(self) -> list[Float[Tensor, "pos d_vocab"]]:
        """The logits of all paths through no head, through one, through two, ...; biases count by what they pass."""
        parts = [self.embedding]
        for layer in self.layers:
            written = [sum(layer.through(h, part) for h in range(len(layer.heads))) for part in parts]
            parts = [*parts, torch.zeros_like(self.embedding)]
            for order, add in enumerate(written):
                parts[order + 1] = parts[order + 1] + add
            parts[0] = parts[0] + layer.constant
            parts[1] = parts[1] + sum(layer.begun(h) for h in range(len(layer.heads)))
        return [self._read(part) + (self._constant() if order == 0 else 0) for order, part in enumerate(parts)]

    def paths(self) -> dict[Path, Float[Tensor, "pos d_vocab"]]:
        """The logits of every path, by the heads on it; biases are in the shortest paths that they take.

        Raises:
            LevelRefusedError: if there are too many to list.
        """
        count = 1
        for layer in self.layers:
            count *= len(layer.heads) + 1
        if count > MOST:
            reason = f"{count:,} paths are more than {MOST:,}"
            raise LevelRefusedError("No list of paths", None, reason, "Ask for the sums of each order instead.")
        parts: dict[Path, Tensor] = {DIRECT: self.embedding}
        for layer in self.layers:
            for path, part in list(parts.items()):
                for number, head in enumerate(layer.heads):
                    parts[(*path, head)] = layer.through(number, part)
            parts[DIRECT] = parts[DIRECT] + layer.constant
            for number, head in enumerate(layer.heads):
                parts[(head,)] = parts[(head,)] + layer.begun(number)
        read = {path: self._read(part) for path, part in parts.items()}
        read[DIRECT] = read[DIRECT] + self._constant()
        return read

    def error(self, terms: Sequence[Tensor]) -> float:
        """The largest difference of the sum of terms from the model's logits, relative to the largest logit."""
        total = torch.stack(list(terms)).sum(0)
        return float((total - self.logits).abs().max() / self.logits.abs().max())

    def losses(self, ids: Int[Tensor, " pos"]) -> list[float]:
        """Mean nats of each next token when only paths of up to 0, 1, 2, ... heads reach the logits.

        The patterns are frozen, so this is the published procedure in one pass: run n replaces heads' outputs by those
        of run n - 1. Differences are the marginal effect of each order.
        """
        total, found = torch.zeros_like(self.logits), []
        for part in self.orders():
            total = total + part
            found.append(float(torch.nn.functional.cross_entropy(total[:-1], ids[1:])))
        return found

    def virtual(self, second: Unit, first: Unit) -> "VirtualHead":
        """The virtual attention head of two: the second reads what the first wrote.

        Raises:
            LevelRefusedError: if the second does not come after the first, or either is none of the run's.
        """
        places = {head: (n, i) for n, layer in enumerate(self.layers) for i, head in enumerate(layer.heads)}
        if first not in places or second not in places or places[second][0] <= places[first][0]:
            raise LevelRefusedError(f"No virtual head of {second} after {first}", None, "it is none after the other")
        (n1, h1), (n2, h2) = places[first], places[second]
        early, late = self.layers[n1], self.layers[n2]
        pattern = (late.pattern[h2] * late.scale) @ (early.pattern[h1] * early.scale)
        return VirtualHead(first, second, pattern, late.ov[h2] @ early.ov[h1])

    def _read(self, part: Tensor) -> Float[Tensor, "pos d_vocab"]:
        return unembedded(self.readout, part.mT).mT * self.scale[:, None]

    def _constant(self) -> Tensor | float:
        norm, bias = self.readout.norm, self.readout.bias
        constant = 0.0 if bias is None else bias.double()
        if norm is not None and norm.bias is not None:
            before = norm.bias.double() if self.readout.before is None else self.readout.before(norm.bias.double())
            constant = constant + self.readout.unembedding.double() @ before * self.readout.scale
        return constant


@dataclass(frozen=True, eq=False)
class VirtualHead:
    """Two heads one after the other, as one: A^second A^first and W_OV^second W_OV^first.

    Attributes:
        pattern: destination x source, the scales of both norms in it.
        ov: the product.
    """

    first: Unit
    second: Unit
    pattern: Float[Tensor, "pos source"]
    ov: Factored

    @property
    def copying(self) -> float:
        """sum lambda / sum |lambda| of the product in the stream."""
        return eigenvalue_score(self.ov.eigenvalues())
