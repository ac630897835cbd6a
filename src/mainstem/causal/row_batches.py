"""How many runs of prompts can be rows of one batch, and whether a batch gives a row what it gets alone.

A model may mix the rows of a batch, as experts with a capacity do: rows that are changed would change the others. Such
a model gets its runs one at a time.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.model.outputs import logits_of

BATCH_ENTRIES = 32_000_000
"""The most logits, over all positions, that one batch may have: 128 MB in float32."""

LARGEST_SLACK = 0.05
"""How far a row of a batch may be from the same run alone, relative, however coarse the dtype."""


def alike(row: Tensor, alone: Tensor) -> bool:
    """To rounding: a batch may be computed by other kernels than a single row."""
    slack = min(1024 * torch.finfo(row.dtype).eps, LARGEST_SLACK) * float(alone.double().norm())
    return float((row.double() - alone.double()).norm()) <= slack


@torch.no_grad()
def mixes_rows(
    model: torch.nn.Module, ids: Int[Tensor, " pos"], position: int, alone: Float[Tensor, " d_vocab"], **forward: Any
) -> bool:
    """Whether a prompt gets other logits beside another one, before it and after it.

    Args:
        model: the module; it is left as it was.
        ids: the prompt.
        position: where its logits are compared.
        alone: its logits there in a run of its own.
        forward: further arguments of the forward call.
    """
    rows = torch.stack([ids, ids.roll(1), ids])
    logits = logits_of(model(input_ids=rows, **forward))[:, position]
    return not (alike(logits[0], alone) and alike(logits[2], alone))
