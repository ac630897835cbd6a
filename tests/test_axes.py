"""One vocabulary: every axis in an annotation is a word of `mainstem.axes`."""

import ast
import re
from pathlib import Path

import mainstem
from mainstem.axes import AXES

SOURCE = Path(mainstem.__file__).parent
DTYPES = {
    "Float",
    "Float32",
    "Float64",
    "Int",
    "Int64",
    "Integer",
    "Bool",
    "Num",
    "Real",
    "Shaped",
    "UInt8",
    "Inexact",
}


def annotations(source: str):
    """The axes of every jaxtyping annotation in a module: (line, axes)."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
            continue
        name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
        axes = node.slice.elts[-1]
        if name in DTYPES and isinstance(axes, ast.Constant) and isinstance(axes.value, str):
            yield node.lineno, axes.value


def unknown_words(axes: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", axes.replace("...", " "))) - set(AXES) - {"_"}


def test_every_axis_is_in_the_vocabulary():
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {word}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, axes in annotations(path.read_text(encoding="utf-8"))
        for word in sorted(unknown_words(axes))
    ]
    assert not found, "not in mainstem.axes.AXES (use its words, or add yours with its meaning): " + ", ".join(found)


def test_the_check_can_fail():
    source = 'def f(x: Float[Tensor, "*batch pos d_modle"], y: Int[Tensor, " pos"]) -> None: ...'
    assert [(line, unknown_words(axes)) for line, axes in annotations(source)] == [
        (1, {"d_modle"}),
        (1, set()),
    ]


def test_every_word_is_explained():
    assert all(meaning and not meaning.endswith(".") for meaning in AXES.values())
