"""Whole numbers that a caller gives: counts, positions, sizes."""

from typing import Any

from mainstem.errors import UsageError


def whole_number(name: str, given: Any, least: int | None = None) -> int:
    """What was given as an int; floats and tensors that hold a whole number are taken, texts are not.

    Raises:
        UsageError: if it is no whole number, or below the least.
    """
    try:
        number = int(given)
        whole = bool(number == given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # text, nan, inf, a tensor of several
        number, whole = 0, False
    if not whole or (least is not None and number < least):
        allowed = "a whole number" if least is None else f"a whole number from {least} on"
        raise UsageError(f"The {name} is {given!r}", None, f"Give {allowed}.")
    return number
