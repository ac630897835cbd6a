"""What the source imports is what pyproject.toml asks for."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import mainstem

SOURCE = Path(mainstem.__file__).parent
ROOT = SOURCE.parents[1]

FOR_TRANSFORMERS = {"accelerate", "gguf"}
"""Asked for though no module imports them: Transformers needs them for `device_map` and for GGUF files."""

INSTALLED_AS = {"sklearn": "scikit-learn"}
"""Packages that are installed under another name than they are imported by."""


def imported(source: str) -> Iterator[str]:
    """The packages that a module imports, at its top or inside a function, other than the standard library."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"mainstem"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def asked_for() -> dict[str, str]:
    """The range of versions of each dependency, those of extras for users included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [own for extra, named in project["optional-dependencies"].items() if extra != "dev" for own in named]
    split = [
        re.fullmatch(r"([\w.-]+)(\[.*\])?(.*)", requirement) for requirement in [*project["dependencies"], *extras]
    ]
    return {normal(found[1]): found[3] for found in split if found}


def test_every_import_is_a_dependency_and_every_dependency_is_used():
    used = {name for path in SOURCE.rglob("*.py") for name in imported(path.read_text(encoding="utf-8"))}
    assert {normal(INSTALLED_AS.get(name, name)) for name in used} | FOR_TRANSFORMERS == asked_for().keys()
    assert not FOR_TRANSFORMERS & used


def test_what_an_extra_brings_is_in_the_tests_too():
    """Otherwise what it is for would be tested nowhere."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {own for extra, named in extras.items() if extra != "dev" for own in named} <= set(extras["dev"])


def test_ranges_are_open_upwards():
    """A library that forbids new versions of others cannot be installed beside them."""
    assert {name: span for name, span in asked_for().items() if not re.fullmatch(r">=[\d.]+", span)} == {}


def test_an_import_inside_a_function_is_noticed():
    source = "import os, numpy.linalg\ndef f():\n    from rich.table import Table\n    from .a import b"
    assert sorted(imported(source)) == ["numpy", "rich"]
