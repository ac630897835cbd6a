"""Mainstem: who wrote what into a transformer's residual stream, with proof.

The public names are `open`, `Model`, `Trace`, `Edit`, `Point`, `Unit`, `Target`, `MainstemError` and
`__version__`. They are looked up when first used (PEP 562), because torch takes seconds to import and
`mainstem --help` needs none of it; `import mainstem` alone takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainstem.causal.edits import Edit
    from mainstem.errors import MainstemError
    from mainstem.points import Point
    from mainstem.session import Model, open
    from mainstem.targets import Target
    from mainstem.tracing import Trace
    from mainstem.units import Unit

__version__ = "0.1.0"

__all__ = ["Edit", "MainstemError", "Model", "Point", "Target", "Trace", "Unit", "__version__", "open"]

_HOME = {
    "Edit": "mainstem.causal.edits",
    "MainstemError": "mainstem.errors",
    "Model": "mainstem.session",
    "Point": "mainstem.points",
    "Target": "mainstem.targets",
    "Trace": "mainstem.tracing",
    "Unit": "mainstem.units",
    "open": "mainstem.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
