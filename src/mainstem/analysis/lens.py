"""The logit lens: what the readout says at every sublayer (nostalgebraist 2020), and tokens' course along the stream.

Each state is normed with its own scale (`recompute`, the definition, default) or with the final one (`frozen`). The
last state is the stream before the final norm, so its lens is the model's own prediction. The log-probability increase
of a sublayer is the difference of its target's lens before and after it (Yu et al. 2023, eq. for layers).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.readout import NormConvention, check_norm, frozen_scale, logits_of, normed, token_rows
from mainstem.model.spine import spine_states
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class Lens:
    """The lens after each addition to the stream; row 0 is the embedding.

    Attributes:
        units: what was added last.
        nodes: the states' places in the anatomy's graph.
        logits, log_probabilities: [unit, d_vocab].
    """

    units: list[Unit]
    nodes: list[int]
    norm: NormConvention
    logits: Float[Tensor, "unit d_vocab"]
    log_probabilities: Float[Tensor, "unit d_vocab"]

    def course(self, ids: Int[Tensor, " top"]) -> "Course":
        """Log-probabilities, logits and ranks of chosen tokens along the stream."""
        chosen = self.log_probabilities[:, ids]
        ranks = torch.stack([(self.log_probabilities > chosen[:, i : i + 1]).sum(-1) + 1 for i in range(len(ids))], -1)
        return Course(self.units, ids, self.logits[:, ids], chosen, ranks)

    def top(self, count: int) -> tuple[Float[Tensor, "unit top"], Int[Tensor, "unit top"]]:
        """The likeliest tokens of each state: probabilities and ids."""
        found = self.log_probabilities.topk(min(count, self.log_probabilities.shape[-1]))
        return found.values.exp(), found.indices

    def entropy(self) -> Float[Tensor, " unit"]:
        """Entropy of each state's distribution in nats; log d_vocab is uniform."""
        return -(self.log_probabilities.exp() * self.log_probabilities).nan_to_num().sum(-1)


@dataclass(frozen=True, eq=False)
class Course:
    """What happens to chosen tokens along the stream; `ranks` count from 1."""

    units: list[Unit]
    ids: Int[Tensor, " top"]
    logits: Float[Tensor, "unit top"]
    log_probabilities: Float[Tensor, "unit top"]
    ranks: Int[Tensor, "unit top"]

    def increases(self) -> Float[Tensor, "unit top"]:
        """Each sublayer's log-probability increase in nats; the embedding's is its whole log-probability."""
        first = self.log_probabilities[:1]
        return torch.cat([first, self.log_probabilities.diff(dim=0)])


def lens(decomposition: Decomposition, norm: NormConvention = "recompute") -> Lens:
    """The logit lens at one destination.

    Args:
        decomposition: of any level.
        norm: `recompute` or `frozen`; a readout that is no norm and unembedding always recomputes.
    """
    check_norm(norm)
    anatomy = decomposition.moment.anatomy
    nodes, units = spine_states(anatomy)
    values = decomposition.evaluated.values
    states = torch.stack([values[node][0].double() for node in nodes])
    final = decomposition.moment.stream
    scale = frozen_scale(anatomy.readout, final) if norm == "frozen" and anatomy.readout.opaque is None else None
    dtype = final.dtype if anatomy.readout.opaque is not None else torch.float64
    logits = logits_of(anatomy.readout, states.to(dtype), scale)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return Lens(units, nodes, norm, logits, wide.log_softmax(-1))


def before_softmax_course(decomposition: Decomposition, ids: Int[Tensor, " top"]) -> Float[Tensor, "unit top"]:
    """Before-softmax values of chosen tokens along the stream under the frozen norm, where they add exactly.

    bs_w(x + v) = bs_w(x) + bs_w(v) (Yu et al. 2023, section 3): softcaps are not applied. Computed in float64.
    """
    readout, final = decomposition.moment.anatomy.readout, decomposition.moment.stream
    states = torch.stack(
        [decomposition.evaluated.values[node][0] for node in spine_states(decomposition.moment.anatomy)[0]]
    )
    u = normed(readout, states, frozen_scale(readout, final)) @ token_rows(readout, ids).T * readout.scale
    return u if readout.bias is None else u + readout.bias[ids].double()
