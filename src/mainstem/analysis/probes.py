"""Linear probes: whether labels can be read off vectors, and in which directions.

Ridge regression onto indicators of the classes, in closed form: with centred X [n, d] and Y [n, classes],
W = X^T (X X^T + lambda n I)^-1 Y; the label is the largest entry of x W. The directions that a probe reads are the row
space of W^T. Lambda is the one of `PENALTIES`, in units of the mean squared norm, that does best on a third of the
training rows. What a probe learns by itself is told by a control task (Hewitt and Liang 2019, "Designing and
interpreting probes with control tasks"): labels drawn at random for each type of token; the accuracy above it is the
probe's selectivity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import UsageError

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, eq=False)
class Probe:
    """A trained probe: rows [d_in] of weights for each class, about a mean."""

    weights: Float[Tensor, "row d_in"]
    mean: Float[Tensor, " d_in"]
    offsets: Float[Tensor, " row"]

    def labels(self, vectors: Float[Tensor, "batch d_in"]) -> Int[Tensor, " batch"]:
        """The label of each vector."""
        return ((vectors.double() - self.mean) @ self.weights.T + self.offsets).argmax(1)

    def accuracy(self, vectors: Float[Tensor, "batch d_in"], labels: Int[Tensor, " batch"]) -> float:
        """How many labels it gets right."""
        return float((self.labels(vectors) == labels).double().mean())


def train_probe(vectors: Float[Tensor, "batch d_in"], labels: Int[Tensor, " batch"], seed: int = 0) -> Probe:
    """A probe for labels from 0.

    Raises:
        UsageError: if there are fewer than two labels, or fewer than six rows.
    """
    if len(labels) < 6 or int(labels.max()) < 1:
        raise UsageError("A probe needs six rows and two labels at least", f"{len(labels)} rows", "Give more of them.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    kept, tried = order[len(order) // 3 :], order[: len(order) // 3]
    best = max(
        PENALTIES,
        key=lambda penalty: _fit(vectors[kept], labels[kept], penalty).accuracy(vectors[tried], labels[tried]),
    )
    return _fit(vectors, labels, best)


def control_labels(types: Sequence[int], classes: int, seed: int = 0) -> Int[Tensor, " batch"]:
    """A label for each type of token, drawn at random; the same for the same type."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {kind: int(torch.randint(classes, (1,), generator=generator)) for kind in sorted(set(types))}
    return torch.tensor([drawn[kind] for kind in types])


def _fit(vectors: Float[Tensor, "batch d_in"], labels: Int[Tensor, " batch"], penalty: float) -> Probe:
    wide = vectors.double()
    mean = wide.mean(0)
    centred = wide - mean
    wanted = torch.nn.functional.one_hot(labels, int(labels.max()) + 1).double()
    offsets = wanted.mean(0)
    gram = centred @ centred.T
    gram = gram + penalty * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return Probe((centred.T @ torch.linalg.solve(gram, wanted - offsets)).T, mean, offsets)
