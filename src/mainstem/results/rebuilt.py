"""A result's dataclasses from their dictionaries: what `dataclasses.asdict` took apart, put together again."""

from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def rebuilt(kind: Any, value: Any) -> Any:
    """The value of a type that JSON held as dictionaries and lists.

    Args:
        kind: a dataclass, or a type of one of its fields.
        value: what `asdict` gave, after a way through JSON or not.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: rebuilt(hints[name], inner) for name, inner in value.items()})  # type: ignore[operator]
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        return rebuilt(next(one for one in inside if one is not NoneType), value)
    if origin is list:
        return [rebuilt(inside[0], one) for one in value]
    if origin is tuple:
        kinds = inside[:1] * len(value) if inside[-1] is Ellipsis else inside
        return tuple(rebuilt(one, inner) for one, inner in zip(kinds, value, strict=True))
    if origin is dict:
        return {name: rebuilt(inside[1], inner) for name, inner in value.items()}
    return value
