"""No name of a model family is in src/: not as an identifier, not in a string, not in a table.

Compared are the keys of Transformers' configuration mapping and the names of its modelling classes, with every name
and every word of every string in the source, docstrings included; identifiers also piece by piece.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import mainstem

SOURCE = Path(mainstem.__file__).parent
WORD = re.compile(r"[A-Za-z0-9]+(?:[-_.][A-Za-z0-9]+)*")

ALLOWED = {
    "aria": "the attributes of accessible HTML, aria-label and others",
    "bit": "a digit of the binary system",
    "clip": "to bound gradients, or the pattern of attention",
    "encoder-decoder": "the kind of model that is refused, in error messages",
}
"""Keys that are ordinary words, each with what it means in the source."""


def families() -> set[str]:
    """Keys of the configuration mapping, with hyphens and with underscores, in lower case.

    Of the library's own mapping: what is registered with it, the laboratory's decoder too, belongs to who did so.
    """
    keys = {key.lower() for key in CONFIG_MAPPING_NAMES}
    return keys | {key.replace("-", "_") for key in keys} | {key.replace("_", "-") for key in keys}


def classes() -> set[str]:
    """Names of modelling classes, in lower case."""
    names: set[str] = set()
    for name, table in vars(modeling_auto).items():
        if name.endswith("_NAMES") and isinstance(table, dict):  # plain text: nothing is imported
            for value in table.values():
                names |= set(value) if isinstance(value, tuple) else {value}
    return {name.lower() for name in names}


FORBIDDEN = families() | classes()


def words(source: str) -> Iterator[tuple[int, str]]:
    """(line, word): names, their pieces, and the words of strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string
        if token.type == tokenize.NAME or "STRING" in tokenize.tok_name[token.type]:
            for match in WORD.finditer(text):
                found = match.group()
                line = token.start[0] + text.count("\n", 0, match.start())
                pieces = re.split(r"[-_.]", found)
                camel = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", found)
                for word in dict.fromkeys([found, *pieces, *camel]):
                    yield line, word


def offences(source: str, allowed: dict[str, str] = ALLOWED) -> list[tuple[int, str]]:
    """Where a source names a family."""
    return [(line, word) for line, word in words(source) if word.lower() in FORBIDDEN and word.lower() not in allowed]


def test_no_source_names_a_family() -> None:
    found = {
        str(path.relative_to(SOURCE)): offences(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }
    assert len(found) > 40
    assert {path: names for path, names in found.items() if names} == {}


def test_every_exception_is_used_and_is_a_key() -> None:
    """An exception that nothing needs any more goes."""
    used = {word.lower() for path in SOURCE.rglob("*.py") for _, word in offences(path.read_text(encoding="utf-8"), {})}
    assert set(ALLOWED) == used & set(ALLOWED)


@pytest.mark.parametrize(
    "planted",
    [
        'if config.model_type == "llama":\n    pass\n',
        "TABLE = {'gpt_neox': 1}\n",
        "def gemma2(x):\n    return x\n",
        "is_mixtral = True\n",
        "def f(x):\n    return x.bloom\n",
        "from transformers import LlamaForCausalLM\n",
        'NAMES = "gpt2 opt"\n',
        'x = f"model.{y}.mamba"\n',
        'def f():\n    """As Qwen2 does."""\n',
        'WIDTH = {"openai-gpt": 3, "xlm-roberta": 4}\n',
    ],
)
def test_the_check_can_fail(planted: str) -> None:
    assert offences(planted, {})


def test_other_words_pass() -> None:
    assert not offences('def heads(pattern):\n    return f"{pattern} of attention", "mlp", d_model, gptqueue\n')


def test_there_is_something_to_compare_with() -> None:
    assert {"llama", "gpt2", "gpt-neox", "gpt_neox", "mamba", "t5"} <= families()
    assert {"llamaforcausallm", "gpt2lmheadmodel", "mambamodel"} <= classes()
