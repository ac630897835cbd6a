"""A section of the basis report as plain data: the model in a rotated basis, beside itself."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mainstem.results.reading import numbers


@dataclass(frozen=True)
class PrecisionRow:
    """The model and its rotated copy on the same text, both in one dtype.

    Attributes:
        dtype: such as "float32".
        lifted: whether the model's own casts to narrower numbers were lifted.
        loss, rotated_loss: nats for each token; `change` is the difference. None where a run failed.
        kl: KL of the rotated copy's predictions from the model's, nats; `flips`: the share of tokens whose likeliest
            prediction changed.
        logits: the largest difference of any logit, relative to the largest logit.
        failure: what failed, and where, or None.
        tokens: how many tokens were predicted.
    """

    dtype: str
    lifted: bool
    loss: float | None
    rotated_loss: float | None
    change: float | None
    kl: float | None
    flips: float | None
    logits: float | None
    failure: str | None = None
    tokens: int = 0


@dataclass(frozen=True)
class KurtosisRow:
    """A point's kurtosis without the first positions of windows, in the model and in the rotated copy."""

    name: str
    kind: str
    layer: int | None
    kurtosis: float
    rotated: float


@dataclass(frozen=True)
class Checkpoint:
    """What was written, and how far the model that was loaded again is from the rotated copy in its logits."""

    path: str
    files: list[str]
    bytes: int
    logits: float


@dataclass(frozen=True)
class RotationSection:
    """A rotation of the stream.

    Attributes:
        rotation: `random`, `hadamard` or `learned`; `objective` what a learned one minimises.
        seed: of the rotation.
        d_model: its size; `orthogonality` the largest entry of |R R^T - I|.
        keeps_ones: whether R 1 = 1, which models that take means over the stream need.
        turned: how many tensors were rotated; `folded` how many gains became 1.
        untied: tensors that were one in the model and are two in the copy.
        at_run_time: the places that are turned back and forth while the copy runs.
        certificate: how far the logits are off in float64 with casts lifted, relative to the largest.
        expectation: the mean kurtosis of a random direction.
        precisions, points: the tables.
        checkpoint: what was written, if anything was.
    """

    rotation: str
    objective: str | None
    seed: int
    d_model: int
    orthogonality: float
    keeps_ones: bool
    turned: int
    folded: int
    untied: list[str]
    at_run_time: list[str]
    certificate: dict[str, float]
    expectation: float
    precisions: list[PrecisionRow]
    points: list[KurtosisRow]
    checkpoint: Checkpoint | None = None

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of its tables."""
        for precision in self.precisions:
            place = f"{precision.dtype}, casts lifted" if precision.lifted else precision.dtype
            yield from numbers(place, precision)
        for point in self.points:
            yield point.name, "kurtosis", point.kurtosis
            yield point.name, "rotated", point.rotated
