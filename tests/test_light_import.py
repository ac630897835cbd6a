"""Importing stays light: no torch until something is computed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import mainstem

SOURCE = Path(mainstem.__file__).parents[1]
HEAVY = ("torch", "transformers", "numpy", "jaxtyping")


def loaded_after(statement: str) -> list[str]:
    """The heavy packages that a fresh interpreter has loaded after a statement."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [name for name in HEAVY if name in done.stdout.split()]


def test_the_check_can_fail():
    assert loaded_after("import numpy") == ["numpy"]


@pytest.mark.parametrize(
    "statement",
    [
        "import mainstem",
        "import mainstem; dir(mainstem); mainstem.__version__",
        "import mainstem; mainstem.Unit.parse('L9H8'); mainstem.Target; mainstem.MainstemError",
        "import mainstem.axes, mainstem.errors, mainstem.targets, mainstem.units",
    ],
)
def test_words_import_nothing_heavy(statement):
    assert loaded_after(statement) == []


def test_the_command_line_imports_nothing_heavy():
    if importlib.util.find_spec("mainstem.cli") is None:
        pytest.skip("there is no command line yet")
    assert loaded_after("import mainstem.cli") == []


def test_experiments_are_listed_without_anything_heavy():
    assert loaded_after("import mainstem.cli; mainstem.cli.run(['reproduce'])") == []


def test_public_names():
    assert mainstem.__all__ == sorted(mainstem.__all__)
    assert set(mainstem.__all__) <= set(dir(mainstem))
    with pytest.raises(AttributeError, match="'mainstem' has no attribute 'Units'"):
        _ = mainstem.Units
