"""What a forward call returns."""

from typing import Any

from jaxtyping import Float
from torch import Tensor


def logits_of(result: Any) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits in what a model returns: alone, or an attribute of it."""
    return result.logits if hasattr(result, "logits") else result
