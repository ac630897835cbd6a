"""The privileged basis: coordinates of the stream are heavy-tailed, though nothing in the computation asks for it.

Elhage, Lasenby and Olah 2023, "Privileged Bases in the Transformer Residual Stream": every map into and out of the
stream could be rotated and the model would compute the same, so no basis should be special; yet the kurtosis of a
token's vector over its coordinates is far from the 3 of a random direction. Here kurtosis is measured at every state of
the stream, beside ten random rotations, with and without what might be all of it (first positions, one dimension), and
the model is rotated to see that the basis is not needed: the loss in float64, float32, bfloat16 and float16.

What makes the basis special is a question of training, and cannot be asked of one trained model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mainstem.basis.measuring import Watched, forward_of, kurtosis_section, measure_stream, rotate_stream
from mainstem.basis.reference import Reference, reference
from mainstem.causal.stream_points import stream_points
from mainstem.causal.stream_statistics import ThinnedKurtosis
from mainstem.causal.stream_watch import watch
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.privileged_basis_claims import Found, assemble
from mainstem.run.windows import windows

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS, EVAL_TOKENS, SAMPLED = 20_000, 1_024, 2_048
QUICK_TOKENS, QUICK_EVAL_TOKENS, QUICK_SAMPLED = 2_048, 256, 512
"""Of the text for kurtosis, for losses, and for rotations and what is left without one dimension."""


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the case.

    Args:
        model: the model, with its tokenizer.
        quick: kurtosis on 2,048 tokens instead of 20,000, losses on 256 instead of 1,024.
        report: receives a line of progress for each step.

    Raises:
        PromptError: the model has no tokenizer.
        ParallelStreamsError, RefusedError: the model cannot be rotated; names the place.
        CertificateError: the rotated copy does not compute the same.
    """
    on = reference(model, "drama", QUICK_TOKENS if quick else TOKENS)
    watched = measure_stream(model, on, say=report)
    report("rotating the stream ...")
    sampled = QUICK_SAMPLED if quick else SAMPLED
    section = kurtosis_section(watched, rotate_stream(model, on, tokens=sampled))
    report("without the largest dimension ...")
    thinned = without_largest(model, on, watched, sampled)
    losses = model.basis.rotate("random", tokens=QUICK_EVAL_TOKENS if quick else EVAL_TOKENS, say=report).rotations
    assert losses is not None
    return assemble(model, Found(section, *thinned, losses))


def without_largest(
    model: "Model", on: Reference, watched: Watched, tokens: int = SAMPLED
) -> tuple[list[int], list[float]]:
    """For each state of the stream its largest dimension by mean square, and the kurtosis over all others.

    Args:
        model: the model.
        on: the text.
        watched: what was measured of it.
        tokens: how many tokens of it kurtosis is taken of; whole windows, one at least.
    """
    points = stream_points(model.anatomy, "stream")
    numbers = {point.name: number for number, point in enumerate(watched.points) if point.kind == "stream"}
    largest = [int(watched.moments.without_first(numbers[point.name]).rms.argmax()) for point in points]
    length = on.windows.length
    thinned = ThinnedKurtosis(largest)
    short = windows(on.ids[: max(tokens // length, 1) * length], length)
    watch(model.module, forward_of(model), points, short, [thinned])
    return largest, thinned.kurtosis().tolist()
