"""Error messages: what, where, and at the end what to do next."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import mainstem
from mainstem import errors
from mainstem.errors import (
    AnatomyError,
    CertificateError,
    ChoiceError,
    HashMismatchError,
    LevelRefusedError,
    LoadError,
    MainstemError,
    NotFiniteError,
    ParallelStreamsError,
    PromptError,
    RefusedError,
    UsageError,
)

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, MainstemError)]
PLAIN = [cls for cls in CLASSES if cls is not ChoiceError]


@pytest.mark.parametrize("cls", PLAIN)
def test_every_message_says_what_and_where_and_ends_with_a_remedy(cls):
    assert str(cls("It broke.", where="L5.mlp", remedy="Mend it.")) == "It broke (L5.mlp). Mend it."
    assert str(cls("It broke")) == f"It broke. {cls.default_remedy}"
    assert re.search(r"[.]$", cls.default_remedy)


@pytest.mark.parametrize("cls", CLASSES)
def test_exit_codes_follow_the_tree(cls):
    assert cls.exit_code == (2 if issubclass(cls, UsageError) else 1)


def test_the_drawing_is_the_tree():
    drawn = re.findall(r"^( *[│├└─ ]*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    parents: dict[int, str] = {}
    for indent, name in drawn:
        depth = len(indent)
        above = [parents[d] for d in sorted(parents) if d < depth]
        parents = {d: parent for d, parent in parents.items() if d < depth} | {depth: name}
        assert getattr(errors, name).__base__.__name__ == (above[-1] if above else "Exception")
    assert sorted(name for _, name in drawn) == sorted(cls.__name__ for cls in CLASSES)


@pytest.mark.parametrize(
    "error",
    [
        *(cls("What", "where", remedy="Do.") for cls in PLAIN),
        ChoiceError("level", "head", ["heads", "neurons"]),
        RefusedError("What", "where", "why", "Do."),
        HashMismatchError("The wheel differs", "a.whl", None, "ab", "cd"),
        CertificateError("The sum fails", "L3.attn", None, 0.5, 1e-6),
    ],
)
def test_errors_survive_copies_and_pickles(error):
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_a_choice_suggests_the_nearest_and_lists_all():
    error = ChoiceError("level", "Head", ["sublayers", "heads", "neurons"])
    assert str(error) == ("Unknown level 'Head'. Did you mean 'heads'? Choose one of: sublayers, heads, neurons.")
    assert (error.name, error.given, error.allowed) == ("level", "Head", ("sublayers", "heads", "neurons"))
    assert "Did you mean" not in str(ChoiceError("norm", "zzz", ["frozen", "recompute"]))
    assert str(ChoiceError("norm", None, ["frozen"])) == "Unknown norm None. Choose one of: frozen."


@pytest.mark.parametrize("cls", [AnatomyError, RefusedError, ParallelStreamsError, LevelRefusedError])
def test_a_refusal_gives_its_reason(cls):
    error = cls("Heads cannot be separated", "L5.attn", "the output passes through a convolution.", "Use mlp.")
    assert str(error) == ("Heads cannot be separated (L5.attn): the output passes through a convolution. Use mlp.")
    assert error.reason == "the output passes through a convolution."


def test_numbers_are_part_of_the_message():
    assert "(x.whl): expected sha256 ab, found cd. Nothing was kept." in str(
        HashMismatchError("The wheel is not the one asked for", "x.whl", expected="ab", found="cd")
    )
    assert "(L3.attn): relative error 0.5, tolerance 1e-06. Run in" in str(
        CertificateError("The parts do not add up", "L3.attn", relative_error=0.5, tolerance=1e-6)
    )
    assert "(L7.mlp). Check" in str(NotFiniteError("The stream holds NaN", "L7.mlp"))


def test_a_branch_can_be_caught_as_one():
    with pytest.raises(UsageError):
        raise PromptError("The prompt is empty")
    assert not issubclass(PromptError, LoadError)


# --- one convention: what is wrong begins with a capital letter, a reason with a small one ----------------------

OWN_NAMES = ("Mainstem", "Transformers")
"""What a reason may begin with: names that are written with a capital letter everywhere."""


def beginnings(source: str) -> list[tuple[str, str, str]]:
    """(class, argument, first words) of the texts that errors are raised with; quoted values give no words."""
    classes = {cls.__name__: cls for cls in PLAIN}
    found = []
    for node in ast.walk(ast.parse(source)):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if not isinstance(node, ast.Call) or name not in classes:
            continue
        places = ["what", "where", "reason"] if issubclass(classes[name], AnatomyError) else ["what", "where"]
        given = dict(zip([*places, "remedy"], node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
        for argument, value in given.items():
            text = value.values[0] if isinstance(value, ast.JoinedStr) else value
            if argument in ("what", "reason", "remedy") and isinstance(text, ast.Constant) and text.value:
                found.append((str(name), argument, str(text.value)))
    return found


def misspelt(argument: str, text: str) -> bool:
    if argument == "reason":
        return text[0].isupper() and not text.startswith(OWN_NAMES)
    return text[0].islower()


def test_messages_begin_with_a_capital_letter_and_reasons_with_a_small_one():
    found = [
        (path.name, *beginning)
        for path in Path(mainstem.__file__).parent.rglob("*.py")
        for beginning in beginnings(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 150
    assert not [row for row in found if misspelt(*row[2:])]


def test_a_message_that_begins_otherwise_would_be_noticed():
    source = 'RefusedError("no", "there", "Because.", remedy=f"mend {it}."); LoadError(f"{x!r} is", "there")'
    found = beginnings(source)
    assert [argument for _, argument, text in found if misspelt(argument, text)] == ["what", "reason", "remedy"]
