"""Attention's operands in one arrangement: [batch, heads, positions, coordinate], whatever the model's own is."""

from collections.abc import Mapping
from functools import cache

from einops import rearrange
from torch import Tensor


def heads_first(tensor: Tensor, layout: str, sizes: Mapping[str, int], batch: int) -> Tensor:
    """A key or value argument with layout over b, h (or k, g, own), s and d or j, as [batch, heads, source, ...]."""
    return _arrange(tensor, layout, sizes, batch, _source_and_coordinate(layout))


def pattern_rows(tensor: Tensor, layout: str, sizes: Mapping[str, int], batch: int) -> Tensor:
    """A pattern argument as [batch, heads, destination, source]."""
    return _arrange(tensor, layout, sizes, batch, "t s")


def query_rows(tensor: Tensor, layout: str, sizes: Mapping[str, int], batch: int) -> Tensor:
    """A query argument as [batch, heads, destination, coordinate]."""
    return _arrange(tensor, layout, sizes, batch, "t d")


def result_rows(tensor: Tensor, layout: str, sizes: Mapping[str, int], batch: int) -> Tensor:
    """Attention's result as [batch, heads, destination, coordinate]."""
    return _arrange(tensor, layout, sizes, batch, "t j")


@cache
def _source_and_coordinate(layout: str) -> str:
    return "s d" if "d" in layout.split(" ") else "s j"


@cache
def _in_order(layout: str, ending: str) -> bool:
    return layout in (f"b h {ending}", f"b own {ending}")


def _arrange(tensor: Tensor, layout: str, sizes: Mapping[str, int], batch: int, ending: str) -> Tensor:
    if _in_order(layout, ending):
        return tensor
    words = layout.replace("(", " ").replace(")", " ").split()
    heads = [name for name in ("h", "k", "g", "own") if name in words]
    known = {name: sizes[name] for name in heads if name in sizes}
    if "b" in words:
        known["b"] = batch
    ones = [i for i, name in enumerate(words) if name == "1"]
    if ones:  # an axis of one that stands for all heads
        layout = layout.replace("1", "own", 1)
        heads.append("own")
    start = "b" if "b" in words else "()"
    middle = "(" + " ".join(heads) + ")" if heads else "()"
    return rearrange(tensor, f"{layout} -> {start} {middle} {ending}", **known)
