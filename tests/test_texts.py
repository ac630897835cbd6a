"""Reference texts: what comes along, files, directories, datasets, and all that can be wrong with them."""

import sys
import types
from importlib.resources import files

import pytest

from mainstem.errors import TextError
from mainstem.lab.texts import SHIPPED, open_text


class Words:
    """Reads a text word by word."""

    def encode(self, prompt):
        return list(range(len(prompt.split())))


@pytest.mark.parametrize("name", SHIPPED)
def test_texts_come_along_with_their_sources(name):
    text = open_text(name)
    assert (text.name, text.source) == (name, SHIPPED[name])
    assert len(text.text) > 70_000 and len(text.ids(Words())) > 5_000
    assert f"`{name}.txt`" in (files("mainstem") / "data" / "README.md").read_text(encoding="utf-8")


def test_texts_that_come_along_are_small():
    assert sum(len((files("mainstem") / "data" / f"{name}.txt").read_bytes()) for name in SHIPPED) < 250_000


@pytest.mark.slow
def test_each_text_has_twenty_thousand_tokens_of_the_default_model(demo_model):
    for name in SHIPPED:
        assert len(open_text(name).ids(demo_model, 20_000)) == 20_000


def test_a_file_and_a_directory(tmp_path):
    (tmp_path / "b.md").write_text("two three", encoding="utf-8")
    (tmp_path / "a.txt").write_text("one ö", encoding="utf-8")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    assert open_text(tmp_path / "a.txt").text == "one ö"
    whole = open_text(str(tmp_path))
    assert whole.text == "one ö\n\ntwo three" and "2 files" in whole.source
    assert whole.ids(Words(), 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("empty.txt", b" \n", "empty"), ("latin.txt", b"caf\xe9", "not UTF-8.*byte 3"), (None, b"", "no .txt or .md")],
)
def test_files_that_are_no_text_are_refused(tmp_path, name, content, message):
    if name is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=message):
        open_text(tmp_path / name if name else tmp_path)


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TextError, match="no such text"):
        open_text(tmp_path / "nothing.txt")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("not asked for", encoding="utf-8")
    with pytest.raises(TextError, match="No text is named.*drama"):
        open_text("")
    with pytest.raises(TextError, match="no such text.*drama"):
        open_text("what is this?")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TextError, match="not installed.*pip install datasets"):
        open_text("someone/some-words")


@pytest.fixture
def datasets(monkeypatch):
    """A stand-in for the package, which need not be installed: two datasets on a hub of their own."""

    def load_dataset(name, split=None, streaming=False):
        if name == "broken":
            raise ConnectionError("no network")
        if name == "empty":
            return []
        rows = [{"title": "one", "body": "one two"}, {"title": "two", "body": "three"}]
        if name == "clear":
            rows = [{"text": row["body"], "number": 1} for row in rows]
        splits = {"train": rows, "test": rows[:1]}
        return splits if split is None else splits[split]

    module = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=lambda path: [{"text": "kept"}])
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    "name", ["typo.txt", "texts/typo.MD", "typo.txt:train", "./clear", "../clear", "/clear", "~/x"]
)
def test_a_file_that_is_not_there_is_not_asked_of_the_hub(datasets, monkeypatch, name):
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *args, **options: pytest.fail("asked"))
    with pytest.raises(TextError, match="no such text"):
        open_text(name)


def test_datasets(datasets, tmp_path):
    assert open_text("clear:train").text == "one two\n\nthree"
    assert open_text("of/several:test:body").text == "one two"
    (tmp_path / "dataset_info.json").write_text("{}", encoding="utf-8")
    assert open_text(tmp_path).text == "kept"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("clear", "several splits.*train, test"),
        ("of/several:train", "not clear which column.*title, body"),
        ("clear:train:number", "no text in a column number"),
        ("broken", "cannot be opened: no network"),
        ("empty", "empty"),
    ],
)
def test_datasets_that_are_not_clear_are_refused(datasets, source, message):
    with pytest.raises(TextError, match=message):
        open_text(source)
