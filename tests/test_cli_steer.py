"""`mainstem steer`: edits as text, what they become, and the comparison that is printed."""

import contextlib
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import mainstem
from mainstem.causal.edits import Edit
from mainstem.errors import EditError, UnitError
from mainstem.intervene.edit_text import EXAMPLES, parse_edit
from tests.test_cli import PROMPT, directory, refused, run, saved  # noqa: F401 (fixtures)

# --- the words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "at", "expected"),
    [
        ("zero L9H8", "L9H8", {}),
        ("  zero   L24.mlp  @-1 ", "L24.mlp", {"positions": (-1,)}),
        ("zero L9H8@3 @3,4", "L9H8@3", {"positions": (3, 4)}),
        ("scale L9H8 -0.5 @generated", "L9H8", {"number": -0.5, "positions": "generated"}),
        ("mean L9H8", "L9H8", {}),
        ("mean L9H8 'a @-1'", "L9H8", {"texts": ("a @-1",)}),
        ('patch L5.resid_pre "it\'s" @prompt', "L5.resid_pre", {"texts": ("it's",), "positions": "prompt"}),
        (r"patch L5.resid_pre 'a \' b'", "L5.resid_pre", {"texts": ("a ' b",)}),
        ("knockout L23H4 3,4 @-1", "L23H4", {"sources": (3, 4), "positions": (-1,)}),
        ("add L12.resid_pre ' a' - \"b\"  5", "L12.resid_pre", {"texts": (" a", "b"), "number": 5.0}),
        ("add L12.resid_pre 'a'-'b'", "L12.resid_pre", {"texts": ("a", "b"), "number": 1.0}),
    ],
)
def test_what_a_text_says(written, at, expected):
    told = parse_edit(written)
    assert str(told.at) == at and told.method == written.split()[0] and told.written == written
    plain = {"texts": (), "number": None, "file": None, "sources": (), "positions": None}
    assert {name: getattr(told, name) for name in plain} == plain | expected


def test_files_may_have_spaces_in_their_names():
    for told in ("add L1.mlp v.safetensors 4", "add L1.mlp 'my v.safetensors' 4", "project_out L1.mlp v.safetensors"):
        assert parse_edit(told).file.suffix == ".safetensors"


@pytest.mark.parametrize("method", EXAMPLES)
def test_every_example_is_an_edit(method):
    for example in EXAMPLES[method].split(", or "):
        assert parse_edit(example).method == method


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", "empty"),
        ("erase L9H8", "no method"),
        ("'zero' L9H8", "no method"),
        ("zero", "no point"),
        ("zero L9H8 3", "does not fit"),
        ("scale L9H8", "scale L9H8 0.5"),
        ("scale L9H8 half", "'half' is no number"),
        ("knockout L9H8 x", "no positions"),
        ("patch L5.resid_pre other", "does not fit"),
        ("patch L5.resid_pre ''", "does not fit"),
        ("patch L5.resid_pre 'open", "not closed"),
        ("zero L9H8 @last", "no positions"),
        ("add L9H8", "needs a file or a difference"),
        ("add L9H8 'a' - 'b' 4 5", "at most a coefficient"),
        ("add L9H8 f.safetensors four", "'four' is no number"),
    ],
)
def test_mistakes_are_explained_with_an_example(written, expected):
    with pytest.raises(EditError, match=expected) as caught:
        parse_edit(written)
    assert "Write" in str(caught.value) or "Put" in str(caught.value)


def test_a_wrong_address_is_said_by_the_points():
    with pytest.raises(UnitError):
        parse_edit("zero L9Q8")


@given(st.text(min_size=1))
def test_any_text_between_quotes_comes_back(text):
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    assert parse_edit(f"patch L5.resid_pre '{quoted}'").texts == (text,)


@given(st.text())
def test_any_text_is_an_edit_or_explained(text):
    with contextlib.suppress(EditError, UnitError):
        parse_edit(text)


# --- what they become --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(saved):  # noqa: F811
    return mainstem.open(saved)


def logits(model, *edits):
    with model.edited(*edits):
        return model.trace(PROMPT).logits()


def test_a_text_does_what_the_python_edit_does(model):
    pairs = [
        ("zero L0H1 @-1", Edit.zero("L0H1", -1)),
        ("scale L1.mlp 0.5", Edit.scale("L1.mlp", 0.5)),
        ("patch L1.resid_pre 'the other one'", Edit.patch("L1.resid_pre", "the other one")),
        ("knockout L1H2 0,1 @-1", Edit.knockout("L1H2", [0, 1], -1)),
        ("mean L0H1 'another text'", Edit.mean("L0H1", "another text")),
    ]
    untouched = logits(model)
    for written, edit in pairs:
        found = logits(model, model.edit(written))
        assert torch.equal(found, logits(model, edit)) and not torch.equal(found, untouched), written


def test_the_difference_of_two_texts_is_that_of_their_streams(model):
    plus, minus = (model.trace(text)["blocks.1.hook_resid_pre"][-1] for text in ("love", "a hate"))
    found = logits(model, model.edit("add L1.resid_pre 'love' - 'a hate' 3"))
    assert torch.equal(found, logits(model, Edit.add("L1.resid_pre", plus - minus, 3.0)))
    with pytest.raises(EditError, match="no difference"):
        model.edit("add L1H2.query 'a' - 'b'")


def test_vectors_come_from_files(model, tmp_path):
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0))
    save_file({"direction": vector}, tmp_path / "v.safetensors")
    found = logits(model, model.edit(f"add L1.resid_pre '{tmp_path}/v.safetensors' 2"))
    assert torch.equal(found, logits(model, Edit.add("L1.resid_pre", vector, 2.0)))
    found = logits(model, model.edit(f"project_out L1.resid_pre '{tmp_path}/v.safetensors'"))
    assert torch.equal(found, logits(model, Edit.project_out("L1.resid_pre", vector[None])))


# --- the command -------------------------------------------------------------------------------------------


STEER = ["steer", PROMPT, "--edit", "zero L0.mlp", "--edit", "scale L1H2 -3 @-1", "--tokens", "4"]


def test_the_document(run):  # noqa: F811
    code, out, _ = run(*STEER, "--continuation", "xy", "--continuation", " s", "-f", "json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "mainstem/steer/1" and document["command"] == "steer"
    assert document["edits"] == ["zero L0.mlp", "scale L1H2 -3 @-1"] and document["count"] == 4
    assert document["model"]["n_layers"] == 2 and document["prompt"]["text"] == PROMPT
    for side in ("plain", "edited"):
        assert len(document[side]["ids"]) == 4 and document[side]["cached"]
        assert document[side]["difference"] < 1e-4
    assert [row["text"] for row in document["continuations"]] == ["xy", " s"]
    assert all(row["plain"] < 0 and row["plain"] != row["edited"] for row in document["continuations"])


def test_what_is_printed(run, tmp_path):  # noqa: F811
    shown = run(*STEER, "--continuation", "xy")[1]
    assert "zero L0.mlp" in shown and "with the edits" in shown and "with a cache" in shown and "ratio" in shown
    assert run(*STEER, "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "scale L1H2 -3 @-1" in page and "<mark" in page


def test_an_edit_without_effect_is_said(run):  # noqa: F811
    document = json.loads(run("steer", PROMPT, "--edit", "scale L0.mlp 1", "--tokens", "3", "-f", "json")[1])
    assert document["plain"]["ids"] == document["edited"]["ids"] and document["same"] == 3
    assert "unchanged" in [warning["code"] for warning in document["warnings"]]
    assert "unchanged" not in [w["code"] for w in json.loads(run(*STEER, "-f", "json")[1])["warnings"]]


@pytest.mark.parametrize("place", [0, 3])
def test_an_edit_of_a_place_that_no_run_had_is_said_beside_one_that_works(run, place):  # noqa: F811
    """Of a prompt of n tokens and 3 written ones, the runs have n + 2 positions."""
    last = len(json.loads(run(*STEER, "-f", "json")[1])["prompt"]["ids"]) + 1
    edits = ("--edit", "zero L0.mlp", "--edit", f"knockout L1H2 {last + place}")
    warnings = json.loads(run("steer", PROMPT, *edits, "--tokens", "3", "-f", "json")[1])["warnings"]
    missed = [(warning["value"], warning["text"]) for warning in warnings if warning["code"] == "missed"]
    assert [value for value, _ in missed] == ([last + place] if place else [])
    assert all(f"`knockout L1H2 {last + place}`" in text for _, text in missed)


def test_temperature_draws_by_the_seed(run):  # noqa: F811
    def written(seed):
        out = run(*STEER, "--temperature", "1.5", "--tokens", "12", "--seed", seed, "-f", "json")[1]
        return json.loads(out)["edited"]["ids"]

    assert written(1) == written(1) != written(2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--edit", "erase L0.mlp"], ["no method", "zero L9H8"]),
        (["--edit", "zero L7H0"], ["L7H0"]),
        (["--edit", "add L0.mlp none.safetensors"], ["no such file"]),
        (["--edit", "zero L0.mlp", "--edit", "mean L0.mlp"], ["would be lost"]),
        (["--edit", "zero L0.mlp", "--tokens", "0"], ["--tokens"]),
        (["--edit", "zero L0.mlp", "--tokens", "90"], ["context"]),
        (["--edit", "zero L0.mlp", "--temperature", "-1"], ["temperature"]),
        (["--edit", "zero L0.mlp @-40"], ["-40"]),
        ([], ["--edit"]),
    ],
)
def test_mistakes_on_the_command_line(run, arguments, expected):  # noqa: F811
    refused(run("steer", PROMPT, *arguments), 2, *expected)


def test_a_ratio_is_that_of_the_two_probabilities():
    from mainstem.report.steer_text import ratio, ratio_text
    from mainstem.results.generation import Likelihood

    assert ratio(Likelihood("x", ["x"], math.log(0.2), math.log(0.4))) == pytest.approx(2)
    assert ratio_text(Likelihood("x", ["x"], -1.0, -1.0)) == "× 1"
