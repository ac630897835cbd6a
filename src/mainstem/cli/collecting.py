"""How often Python looks for unreachable cycles while a command begins.

Imports and discovery make some millions of objects that all stay, and looking through them again and again takes a
seventh of the time of a short command. So a process that was started for one command looks rarely until it has its
model, sets what there is then apart, and looks as usual from then on.
"""

import gc

USUAL = gc.get_threshold()
RARELY = (200_000, 50, 100)


def rarely() -> None:
    """From now on; for the console script, whose process is its own."""
    gc.set_threshold(*RARELY)


def as_usual() -> None:
    """From now on, after `rarely`; does nothing where that was not called."""
    if gc.get_threshold() == RARELY:
        gc.freeze()
        gc.set_threshold(*USUAL)
