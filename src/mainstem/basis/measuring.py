"""Statistics of every point of the stream over a text, and what the basis report says of their kurtosis."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.analysis.kurtosis import random_expectation
from mainstem.analysis.moments import Moments
from mainstem.analysis.outliers import Criterion
from mainstem.analysis.peaks import MassiveCriterion
from mainstem.basis.reference import Reference
from mainstem.causal.rotated import plain_run
from mainstem.causal.stream_points import StreamPoint, stream_points
from mainstem.causal.stream_statistics import PointMoments, PointOutliers, PointPeaks, RotatedKurtosis
from mainstem.causal.stream_watch import Forward, Watcher, watch
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow

if TYPE_CHECKING:
    from mainstem.session import Model

ROTATIONS, ROTATED_TOKENS = 10, 512


class Watched:
    """Everything that one pass over a text measures; the memory that it takes does not depend on the text.

    Attributes:
        points: the states of the stream, what sublayers read, what output matrices read.
        massive_criterion: what makes an activation massive.
        moments: of every point.
        peaks: massive activations, at the states of the stream.
        inputs: outliers in what sublayers read.
        heads: outliers in what output matrices read, in the space of heads.
        stream: outliers in the states of the stream, in units of each token's root mean square.
    """

    def __init__(
        self,
        points: Sequence[StreamPoint],
        magnitude: float = Criterion.magnitude,
    ) -> None:
        self.points, self.massive_criterion = list(points), MassiveCriterion()
        self.moments = PointMoments(points)
        self.peaks = PointPeaks(points, self.massive_criterion)
        self.inputs = PointOutliers(points, "input", magnitude)
        self.heads = PointOutliers(points, "heads", magnitude)
        self.stream = PointOutliers(points, "stream", magnitude, per_rms=True)

    @property
    def watchers(self) -> list[Watcher]:
        """What looks on during the pass."""
        return [self.moments, self.peaks, self.inputs, self.heads, self.stream]


def forward_of(model: "Model") -> Forward:
    """A forward pass of windows of tokens."""
    return plain_run(model.module)


def measure_stream(
    model: "Model",
    on: Reference,
    magnitude: float = Criterion.magnitude,
    say: Callable[[str], None] = lambda text: None,
) -> Watched:
    """One pass over a text.

    Args:
        model: the model.
        on: the text.
        magnitude: from which outliers are counted.
        say: is told how far it is.

    Raises:
        NotFiniteError: a value is not finite; names the point.
    """
    watched, total = Watched(stream_points(model.anatomy), magnitude), on.windows.n_tokens
    say(f"Measuring the stream: 0 of {total:,} tokens")
    watch(
        model.module,
        forward_of(model),
        watched.points,
        on.windows,
        watched.watchers,
        report=lambda done: say(f"Measuring the stream: {done:,} of {total:,} tokens"),
    )
    return watched


def rotate_stream(
    model: "Model",
    on: Reference,
    rotations: int = ROTATIONS,
    tokens: int = ROTATED_TOKENS,
    say: Callable[[str], None] = lambda text: None,
) -> RotatedKurtosis:
    """The null: kurtosis after random rotations, of the states of the stream and of what sublayers read.

    Args:
        model: the model.
        on: the text.
        rotations: how many; at least ten, because one rotation may be far off where all tokens share a direction.
        tokens: how many tokens of the text are rotated.
        say: is told how far it is.
    """
    short = on.first(tokens).windows
    points = stream_points(model.anatomy, "stream", "input")
    rotated = RotatedKurtosis(points, model.anatomy.sizes.d_model, rotations, model.seed)
    watch(
        model.module,
        forward_of(model),
        points,
        short,
        [rotated],
        report=lambda done: say(f"Rotating the stream: {done:,} of {short.n_tokens:,} tokens"),
    )
    return rotated


def kurtosis_section(watched: Watched, rotated: RotatedKurtosis) -> KurtosisSection:
    """What the report says of kurtosis."""
    moments, null = watched.moments, rotated.kurtosis()
    tokens = int(moments.whole(0).tokens)
    rows = [
        _row(point, moments.whole(number), moments.without_first(number), null[number], watched.peaks.ratio(number))
        for number, point in enumerate(rotated.points)
    ]
    return KurtosisSection(
        tokens={"all": tokens, "first": tokens - int(moments.without_first(0).tokens)},
        expectation=random_expectation(rotated.d_model),
        rotations={"draws": rotated.draws, "tokens": int(rotated.tokens[0])},
        points=rows,
    )


def _row(point: StreamPoint, whole: Moments, rest: Moments, null: Tensor, ratio: float | None) -> PointRow:
    return PointRow(
        name=point.name,
        kind=point.kind,
        layer=point.layer,
        kurtosis=whole.kurtosis,
        without_first=rest.kurtosis,
        rotated=float(null.mean()),
        rotated_least=float(null.min()),
        rotated_largest=float(null.max()),
        neuron_kurtosis=whole.neuron_kurtosis,
        neuron_kurtosis_without_first=rest.neuron_kurtosis,
        max_over_median=ratio,
        largest=float(whole.magnitude.max()),
    )
