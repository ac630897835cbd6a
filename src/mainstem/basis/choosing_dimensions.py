"""Which dimensions a question is about: those given, those that the outlier criterion finds, or the most varied."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mainstem.analysis.outliers import Criterion, variance_ranking
from mainstem.causal.stream_statistics import PointMoments, PointOutliers
from mainstem.errors import UsageError
from mainstem.whole_numbers import whole_number

CHOICES = ("outliers", "variance")


@dataclass(frozen=True)
class Chosen:
    """Dimensions, how they were chosen ("given", "outliers", "variance"), and what is to be said of that."""

    dimensions: list[int]
    by: str
    notes: list[str]


def given_dimensions(dimensions: Sequence[int], d_model: int) -> list[int]:
    """The dimensions that a caller names.

    Raises:
        UsageError: none, one that the stream does not have or that is named twice, or so many that no others are left
            to compare them with.
    """
    found = [whole_number("dimension", dimension) for dimension in dimensions]
    for dimension in found:
        if not 0 <= dimension < d_model:
            raise UsageError(
                f"The stream has no dimension {dimension}", None, f"It has {d_model}, from 0 to {d_model - 1}."
            )
    if len(set(found)) < len(found):
        raise UsageError("A dimension is named twice", ", ".join(map(str, found)), "Name each once.")
    require_controls(len(found), d_model)
    return found


def require_controls(count: int, d_model: int) -> None:
    """Refuses a number of dimensions that has no controls.

    Raises:
        UsageError: it is 0, or more than half of all.
    """
    if not 1 <= count <= d_model // 2:
        raise UsageError(
            f"{count} dimensions cannot be compared with as many others",
            f"the stream has {d_model}",
            f"Take 1 to {d_model // 2} of them.",
        )


def chosen_dimensions(
    by: str, count: int, moments: PointMoments, outliers: PointOutliers, given: list[int] | None = None
) -> Chosen:
    """The dimensions that are given, that the published criterion finds, or of the highest variance.

    Where the criterion finds none, or so many that no others are left, the most varied ones are taken, and it is said.

    Args:
        by: "outliers" or "variance".
        count: how many of the most varied.
        moments: of the inputs of attention.
        outliers: counts over what sublayers read.
        given: what a caller names, checked.
    """
    if given is not None:
        return Chosen(given, "given", [])
    variances = torch.stack([moments.whole(number).variance for number in range(len(moments.points))])
    notes = []
    if by == "outliers" and outliers.counts is not None:
        found = [each.dimension for each in outliers.counts.features(Criterion()) if each.qualifies]
        if 1 <= len(found) <= variances.shape[1] // 2:
            return Chosen(found, "outliers", [])
        notes = [
            f"{len(found) or 'No'} dimensions are outliers by the published criterion; the {count} of the highest "
            "variance at attention's inputs are taken."
        ]
    return Chosen(variance_ranking(variances, count)[0].tolist(), "variance", notes)
