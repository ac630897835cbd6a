"""The privileged basis: coordinates of the stream are heavy-tailed, though nothing in the computation asks for it.

Elhage, Lasenby and Olah 2023, "Privileged Bases in the Transformer Residual Stream": every map into and out of the
stream could be rotated and the model would compute the same, so no basis should be special; yet the kurtosis of a
token's vector over coordinates is far from the 3 of a random direction. Here kurtosis is measured at every state of
the stream, beside ten random rotations, with and without what might be all of it (first positions, one dimension), and
the model is rotated to see that the basis is not needed: the loss in float64, float32, bfloat16 and float16.

What makes the basis special is a question of training, and not asked of one trained model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mainstem.basis.measuring import forward_of, kurtosis_section, measure_stream, rotate_stream
from mainstem.basis.reference import Reference, reference
from mainstem.causal.stream_statistics import ThinnedKurtosis, watch
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.privileged_basis_claims import Found, assemble

if TYPE_CHECKING:
    from mainstem.session import Model
