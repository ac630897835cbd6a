"""How often Python looks for unreachable cycles while a command begins.

Imports and discovery make some millions of objects that nearly all stay, and looking through them again and again takes
a seventh of the time of a short command. So a process that was started for one command looks rarely until it has its
model or begins to train one, and as usual from then on.
"""

import gc

RARELY = (200_000, 50, 100)
_usual: list[tuple[int, int, int]] = []


def rarely() -> None:
    """From now on; for the console script, whose process is its own."""
    _usual.append(gc.get_threshold())
    gc.set_threshold(*RARELY)


def as_usual() -> None:
    """From now on, after `rarely`; does nothing where that was not called."""
    if _usual:
        gc.set_threshold(*_usual[0])
        _usual.clear()
