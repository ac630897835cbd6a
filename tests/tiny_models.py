"""Tiny models by name, made by hand or of a family of the zoo."""

from functools import cache
from typing import Any

import handmade
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
