"""Outlier features: dimensions that are large in many layers and at many positions (Dettmers et al. 2022, section 4).

The published criterion: the same dimension has a magnitude of at least 6 in at least 25 % of the layers and at 6 % of
all positions, over what the projections read. A layer counts once, over its query, key, value and up inputs, where the
dimension is that large at one position at least; positions are pooled over all these inputs. Each threshold is an
argument, because none of them is a law of nature.

Only counts are kept, and for quartiles a histogram of each dimension's values above the threshold, in classes 2.2 %
wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

CLASSES, PER_OCTAVE = 512, 32
ONE_SIDED = 0.99
"""The share of one sign from which a dimension counts as one-sided."""


@dataclass(frozen=True)
class Criterion:
    """What makes an outlier feature: a magnitude, a share of the layers, a share of the positions."""

    magnitude: float = 6.0
    layers: float = 0.25
    positions: float = 0.06


PUBLISHED = Criterion()


@dataclass(frozen=True)
class Feature:
    """One dimension with values above the threshold.

    Attributes:
        dimension: which.
        layers: the share of the layers where it has one at least.
        layers_often: the share of the layers where it has one at the criterion's share of the positions of a place;
            unlike `layers` it does not grow with the length of the text.
        positions: the share of all positions of all places where it has one.
        count: how many values.
        positive: the share of them above zero.
        quartiles: of these values, to 2.2 %.
        qualifies: whether the criterion holds.
    """

    dimension: int
    layers: float
    layers_often: float
    positions: float
    count: int
    positive: float
    quartiles: tuple[float, float, float]
    qualifies: bool

    @property
    def one_sided(self) -> bool:
        """Whether practically all of its values have one sign."""
        return max(self.positive, 1 - self.positive) >= ONE_SIDED


class OutlierCounts:
    """Counts of values at or above a magnitude at several places of the same width."""

    def __init__(self, layers: Sequence[int], width: int, magnitude: float) -> None:
        """Nothing counted yet.

        Args:
            layers: for each place the layer that it belongs to.
            width: dimensions of what is there.
            magnitude: the threshold.
        """
        self.layers = list(layers)
        self.magnitude = magnitude
        self.hits: Int[Tensor, "point d_model"] = torch.zeros(len(self.layers), width, dtype=torch.int64)
        self.classes: Int[Tensor, "d_model value"] = torch.zeros(width, 2 * CLASSES, dtype=torch.int64)
        self.tokens = torch.zeros(len(self.layers), dtype=torch.int64)

    def add(
        self,
        places: Sequence[int],
        x: Float[Tensor, "point token d_model"],
        magnitudes: Float[Tensor, "point d_model"] | None = None,
    ) -> None:
        """Counts one batch of vectors at some places.

        Args:
            places: which, each of them named once.
            x: vectors.
            magnitudes: each dimension's largest magnitude in `x`, where it is known.
        """
        at = torch.tensor(places)
        self.tokens[at] += x.shape[1]
        magnitudes = torch.maximum(x.amax(1), -x.amin(1)) if magnitudes is None else magnitudes
        dimensions = (magnitudes >= self.magnitude).any(0).nonzero()[:, 0]
        if not len(dimensions):
            return
        columns = x[:, :, dimensions].cpu().double()
        hit = columns.abs() >= self.magnitude
        dimensions = dimensions.cpu()
        self.hits[at[:, None], dimensions] += hit.sum(1)
        values, of = columns[hit], dimensions[hit.nonzero()[:, 2]]
        octaves = (values.abs() / self.magnitude).log2().clamp_max(CLASSES)
        size = (octaves * PER_OCTAVE).long().clamp_max(CLASSES - 1)
        flat = of * 2 * CLASSES + torch.where(values > 0, CLASSES + size, CLASSES - 1 - size)
        self.classes.view(-1).index_add_(0, flat, torch.ones_like(flat))

    @property
    def values(self) -> int:
        """How many values there are in all dimensions."""
        return int(self.hits.sum())

    def affected_layers(self, positions: float = 0.0) -> Float[Tensor, " d_model"]:
        """For each dimension the share of the layers where it is above the threshold at a share of the positions.

        A layer counts by the place of its where that share is the largest; with a share of 0 one value is enough.
        """
        of = torch.tensor(self.layers)
        affected = []
        for layer in sorted(set(self.layers)):
            inside = of == layer
            share = self.hits[inside].amax(0).double() / self.tokens[inside].max()
            affected.append((share > 0) & (share >= positions))
        return torch.stack(affected).double().mean(0)

    def features(self, criterion: Criterion) -> list[Feature]:
        """All dimensions with values above the threshold: those that qualify first, then by how many they have."""
        counts = self.hits.sum(0)
        layers, often = self.affected_layers(), self.affected_layers(criterion.positions)
        positions = counts.double() / self.tokens.sum()
        made = [
            self._feature(d, float(layers[d]), float(often[d]), float(positions[d]), criterion)
            for d in counts.nonzero()[:, 0].tolist()
        ]
        return sorted(made, key=lambda one: (not one.qualifies, -one.count, one.dimension))

    def _feature(self, dimension: int, layers: float, often: float, positions: float, criterion: Criterion) -> Feature:
        classes = self.classes[dimension]
        count, positive = int(classes.sum()), int(classes[CLASSES:].sum())
        return Feature(
            dimension,
            layers,
            often,
            positions,
            count,
            positive / count,
            self._quartiles(classes),
            layers >= criterion.layers and positions >= criterion.positions,
        )

    def _quartiles(self, classes: Int[Tensor, " value"]) -> tuple[float, float, float]:
        """The middle of the class that each quartile is in."""
        below = classes.cumsum(0)
        found = []
        for share in (0.25, 0.5, 0.75):
            place = int((below >= max(share * float(below[-1]), 1)).nonzero()[0])
            size = place - CLASSES if place >= CLASSES else CLASSES - 1 - place
            value = self.magnitude * 2 ** ((size + 0.5) / PER_OCTAVE)
            found.append(value if place >= CLASSES else -value)
        return found[0], found[1], found[2]


def variance_ranking(
    variances: Float[Tensor, "point d_model"], count: int
) -> tuple[Int[Tensor, " top"], Float[Tensor, " top"]]:
    """The dimensions of most variance over places: of each place's mean variance how many times, the mean over places.

    A ranking, not a criterion: it always finds some.
    """
    relative = (variances / variances.mean(1, keepdim=True)).mean(0)
    best = relative.topk(min(count, len(relative)))
    return best.indices, best.values
