"""The model's own cache of a prompt's first positions, for many rows, so that runs can begin after them.

A cache is made by the model and never looked into: it is copied, cut and repeated by its own methods, and where it
cannot be cut, the model runs the shorter prefix.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.run.inputs import CACHES, cache_argument
from mainstem.run.memory import LiveBytes


class Prefixes:
    """Caches of the beginnings of one prompt.

    Args:
        model: the module; it is left as it was.
        ids: [1, pos] the prompt.
        forward: further arguments of the forward call.

    Attributes:
        usable: whether the model makes a cache that can be repeated for the rows of a batch.
        nbytes: what the cache of the whole prompt holds.
    """

    def __init__(self, model: torch.nn.Module, ids: Int[Tensor, "1 pos"], forward: dict[str, Any]) -> None:
        self.model, self.ids, self.forward = model, ids, forward
        self.usable, self.nbytes = False, 0
        self.name = cache_argument(model)
        if self.name is None:
            return
        live = LiveBytes()
        try:
            with live:
                self._keep(ids.shape[1])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model that cannot run with its cache is run without
            return
        self.nbytes = live.live
        self._croppable = getattr(self._cache, "is_croppable", False)
        self.usable = hasattr(self._cache, "reorder_cache")

    @torch.no_grad()
    def _keep(self, length: int) -> None:
        result = self.model(input_ids=self.ids[:, :length], **{**self.forward, "use_cache": True})
        self._length = length
        self._cache: Any = next((made for name in CACHES if (made := getattr(result, name, None)) is not None), None)

    def after(self, length: int, batch: int, computed: Sequence[int]) -> dict[Any, Any]:
        """What a forward call of `batch` rows takes to go on after the first `length` positions.

        Args:
            length: how many positions are left out.
            batch: the number of rows.
            computed: how many of them each block computes; the cache has a layer for each block, where they differ.
        """
        cache = copy.deepcopy(self._of(length))
        rows = torch.zeros(batch, dtype=torch.long, device=self.ids.device)
        if all(count in (0, batch) for count in computed):
            cache.reorder_cache(rows)
        else:
            for layer, count in zip(cache.layers, computed, strict=True):
                layer.reorder_cache(rows[: max(count, 1)])
        return {"use_cache": True, self.name: cache}

    def _of(self, length: int) -> Any:
        """The cache of a prefix; the model's last run is kept."""
        if length < self._length and self._croppable:
            cache = copy.deepcopy(self._cache)
            try:
                cache.crop(length - self._length)
            except (RuntimeError, ValueError, NotImplementedError, AttributeError):
                self._croppable = False  # a window has passed over what would be needed, or there are only states
            else:
                return cache
        if length != self._length:
            self._keep(length)
        return self._cache
