"""Arguments and results of torch functions as trees of tuples, lists and dictionaries, walked fast.

A discovery takes apart tens of thousands of argument lists. PyTorch's own tree functions look each node up in a
registry of types; plain containers need none of that. Limits: objects of other types are leaves, also where PyTorch
would open them.
"""

from collections.abc import Callable
from copy import copy
from typing import Any


def leaves_of(tree: Any) -> list[Any]:
    """Everything in `tree` that is no tuple, list or dictionary, in order."""
    if not isinstance(tree, _CONTAINERS):
        return [tree]
    found: list[Any] = []
    _collect(tree, found)
    return found


_CONTAINERS = (tuple, list, dict)


def _collect(tree: Any, found: list[Any]) -> None:
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, _CONTAINERS):
            _collect(item, found)
        else:
            found.append(item)


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf replaced by what `change` makes of it; kinds of tuples that hold no change are kept."""
    kind = type(tree)
    if kind is tuple:
        return tuple([map_leaves(change, item) for item in tree])
    if kind is list:
        return [map_leaves(change, item) for item in tree]
    if isinstance(tree, dict):
        items = {key: map_leaves(change, item) for key, item in tree.items()}
        if kind is dict:
            return items
        new = copy(tree)  # an output object stays one, with its attributes
        for key, item in items.items():
            if item is not tree[key]:
                new[key] = item
        return new
    if isinstance(tree, tuple | list):  # sizes and named tuples: rebuilt as they were, where nothing in them changes
        new = [map_leaves(change, item) for item in tree]
        return tree if all(a is b for a, b in zip(new, tree, strict=True)) else tuple(new)
    return change(tree)
