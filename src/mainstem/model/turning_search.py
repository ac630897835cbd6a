"""Finding what turns with the stream in one recorded forward pass; `turning` has the idea and the words."""

from typing import Any

import torch
from torch import Tensor

from mainstem.errors import NoLanguageHeadError
from mainstem.model.discovery import expand, probe_ids, require_finite
from mainstem.model.recorder import record
from mainstem.model.stream import find_head, find_root
from mainstem.model.turning import Turning
from mainstem.model.turning_places import check_seen
from mainstem.model.turning_spreading import Spreading


@torch.no_grad()
def find_turning(model: torch.nn.Module, **forward: Any) -> Turning:
    """How to rotate a copy of a causal language model.

    Args:
        model: the module, in evaluation mode; it is run once on random tokens and left as it was.
        forward: keyword arguments for its forward call, besides the token ids.

    Raises:
        NoLanguageHeadError: the run returns no logits.
        ParallelStreamsError: the model has several streams.
        RefusedError: something reads the stream that is no matrix; names the place.
        NotFiniteError: the stream of that run is not finite, so that nothing can be told; names the first place.
    """
    ids = probe_ids(model)
    recording = record(model, ids, **forward)
    try:
        logits = recording.result["logits"]
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise NoLanguageHeadError("The model returns no logits over a vocabulary", type(model).__name__)
        walk, root = find_root(recording, find_head(recording, logits)[2], ids.shape[1])
        require_finite(expand(walk, root))
        found = Spreading(recording, walk).run(root)
        check_seen(model, recording, found.turns)
        return found
    finally:
        recording.release()
