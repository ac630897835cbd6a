"""Tiny models by name, made by hand or of a family of the zoo."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import handmade
import torch
import zoo
from torch import nn

from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover


def build(name: str, **options: Any) -> nn.Module:
    """A model of its own; the options are those of `zoo.build`, and models made by hand have none."""
    return handmade.ALL[name]() if name in handmade.ALL else zoo.build(name, **options)


def arguments(name: str) -> dict[str, Any]:
    """What its forward call is given beside the prompt: models made by hand know no cache."""
    return {} if name in handmade.ALL else {"use_cache": False}


@cache
def discovered(name: str, implementation: str = "eager") -> tuple[nn.Module, Anatomy]:
    """A model that tests share and leave as it is, and its anatomy."""
    model = build(name, attn_implementation=implementation)
    return model, discover(model, **arguments(name))


@contextmanager
def hardly_different(module: nn.Module, other: int, token: int) -> Iterator[None]:
    """Inside, the embedding of `other` is nearly that of `token`: first order is all there is to what they change."""
    table = next(m for m in module.modules() if isinstance(m, nn.Embedding))
    kept = table.weight.detach().clone()
    noise = torch.randn(kept.shape[1], generator=torch.Generator().manual_seed(0), dtype=kept.dtype)
    with torch.no_grad():
        table.weight[other] = kept[token] + 1e-3 * noise * kept.std()
    try:
        yield
    finally:
        with torch.no_grad():
            table.weight.copy_(kept)
