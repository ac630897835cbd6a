"""Outlier features: a few dimensions that matter more than all others, and what quantisers make of them.

Dettmers et al. 2022, "LLM.int8()", found dimensions of the stream that are large in most layers and at most positions;
zeroing them ruins a model, and eight bits cannot hold them beside the others. Here the published criterion and the two
ablations are run on one model, with the control that the paper has (random dimensions) and some that it has not
(dimensions of nearly the same size, random ones of which as much is subtracted, a constant in their place), and the
paper's int8 quantisers are run in the model's own basis and in a rotated one. The control of the criterion is the same
count, on the same tokens, of the same vectors in a random basis.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.analysis.outliers import PUBLISHED as CRITERION
from mainstem.analysis.quantizers import PUBLISHED
from mainstem.analysis.rotations import random_rotation
from mainstem.basis.ablating import ablation_section
from mainstem.basis.measuring import forward_of, measure_stream
from mainstem.basis.outlier_reading import outlier_section
from mainstem.basis.quantising import quantiser_section, rotated_copy
from mainstem.basis.reference import reference
from mainstem.causal.stream_points import stream_points
from mainstem.causal.stream_statistics import PointOutliers
from mainstem.causal.stream_watch import Seen, watch
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.outliers_claims import Found, assemble
from mainstem.run.windows import Windows

if TYPE_CHECKING:
    from mainstem.session import Model

ROTATED = "rotated"
TOKENS, EVAL_TOKENS = 20_000, 3_072
QUICK_TOKENS, QUICK_EVAL_TOKENS = 2_048, 512
DRAWS, QUICK_DRAWS = 10, 3
"""Of each control."""
VARIED = 6
"""How many of the most varied dimensions are also taken out: as many as the paper's largest models have outliers."""


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the case.

    Args:
        model: the model, with its tokenizer.
        quick: statistics on 2,048 tokens instead of 20,000, perplexities on 512 instead of 3,072, three draws of each
            control instead of ten.
        report: receives a line of progress for each step.

    Raises:
        PromptError: the model has no tokenizer.
        RefusedError: the model cannot be rotated, or is quantised already; names the place.
        LevelRefusedError: nothing is seen to read the stream for attention.
    """
    on = reference(model, "drama", QUICK_TOKENS if quick else TOKENS)
    draws = QUICK_DRAWS if quick else DRAWS
    short = reference(model, "drama", QUICK_EVAL_TOKENS if quick else EVAL_TOKENS)
    outliers = outlier_section(model, measure_stream(model, on, say=report), CRITERION)
    report("the same vectors in a random basis ...")
    turned = turned_features(model, on.windows)
    copy = rotated_copy(model, "random", report)
    found = [row.dimension for row in outliers.table("input").rows if row.qualifies]
    ablated = ablation_section(model, short, found, draws=draws, say=report)[0] if found else None
    varied = ablation_section(model, short, by="variance", count=VARIED, draws=draws, say=report)[0]
    quantised = quantiser_section(model, [short], PUBLISHED, {ROTATED: copy}, say=report)
    return assemble(model, Found(outliers, turned, ablated, varied, quantised))


class _Turned:
    """Shows vectors in another basis to what counts outliers."""

    def __init__(self, counter: PointOutliers, rotation: Tensor) -> None:
        self.counter, self.rotation = counter, rotation

    def see(self, numbers: Sequence[int], seen: Seen) -> None:
        """The vectors of some points; see `Watcher`."""
        self.counter.see(numbers, Seen(seen.x @ self.rotation.to(seen.x), seen.rows))


def turned_features(model: "Model", on: Windows) -> int:
    """How many dimensions of a random basis would be outlier features: the null of the criterion."""
    points = stream_points(model.anatomy, "input")
    outliers = PointOutliers(points, "input", CRITERION.magnitude)
    turned = _Turned(outliers, random_rotation(model.anatomy.sizes.d_model, model.seed))
    watch(model.module, forward_of(model), points, on, [turned])
    return 0 if outliers.counts is None else sum(each.qualifies for each in outliers.counts.features(CRITERION))
