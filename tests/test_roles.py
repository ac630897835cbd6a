"""Roles: places of a pair by text, by number and by span; the same in both prompts; columns of a sweep over pairs."""

import json

import pytest
import torch
from test_cli import refused, run, saved  # noqa: F401
from test_tasks import Pieces, encoder, without_tokenizer

import mainstem
from mainstem.errors import PairError, UsageError
from mainstem.lab.pairs import PromptPair, encode_pair, read_pairs
from mainstem.lab.roles import Role, positions_of
from mainstem.lab.tasks import TASKS, generate

WORDS = "When Mary and John left, John gave a book to"


@pytest.fixture(scope="module")
def model(saved):  # noqa: F811
    return mainstem.open(saved)


def places(span, text: str = WORDS, tokenizer: Pieces | None = None) -> tuple[int, ...]:
    tokenizer = tokenizer or Pieces()
    ids = tokenizer.encode(text)
    return positions_of(Role("it", span), ids, ids, tokenizer)


# --- one pair ---------------------------------------------------------------------------------------------


def test_a_place_is_text_an_occurrence_a_position_or_a_span() -> None:
    assert places("Mary") == (1,) and places(("John", 1)) == (3,) and places(("John", 2)) == (6,)
    assert places(-1) == (10,) == places(10) and places((5, 7)) == (5, 6) and places("a book") == (8, 9)


def test_a_word_in_pieces_is_all_of_them() -> None:
    assert places("Mary", tokenizer=Pieces(halved=("Mary",))) == (1, 2)
    assert places("1732", "from 1732 to 17") == (2, 3, 4, 5) and places("17", "from 1732 to 17") == (8, 9)


def test_text_inside_a_word_is_found_where_it_is_no_word() -> None:
    assert places("ar") == (1,)
    assert places("a") == (8,)  # the word, not a letter of Mary


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ("Anna", "'Anna' occurs 0 times"),
        ("John", "occurs 2 times, and it is not said which"),
        (("John", 3), "occurs 2 times"),
        (11, "no position 11 in 11 tokens"),
        ((9, 12), "positions 9 to 11 go beyond 11"),
    ],
)
def test_a_place_that_is_not_there_is_refused(span, problem: str) -> None:
    with pytest.raises(PairError, match=rf"'it' has no place: .*{problem}.*second occurrence"):
        places(span)


def test_text_needs_a_tokenizer() -> None:
    pair = PromptPair((1, 2), (1, 3), (7,), roles=(Role("it", "x"),))
    with pytest.raises(PairError, match="without a tokenizer"):
        encode_pair(pair, without_tokenizer())


def test_both_prompts_have_a_role_at_the_same_positions() -> None:
    halved = encoder(Pieces(halved=("Bulgaria",)))
    role = Role("country", "France", "Bulgaria")
    pair = PromptPair("In France right now", "In Bulgaria now", (" x",), where="line 3", roles=(role,))
    with pytest.raises(
        PairError, match=r"positions 1 of the clean prompt .' France'. and at 1, 2 of .*line 3.*as many"
    ):
        encode_pair(pair, halved)
    same = PromptPair("In France now", "In Italy now", (" x",), roles=(Role("country", "France", "Italy"),))
    assert encode_pair(same, halved).roles == {"country": (1,)}


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ('["a"]', "not an object"),
        ('{" ": 1}', "not an object"),
        ('{"a": true}', "role 'a' is no place"),
        ('{"a": [3, 3]}', "role 'a' is no place"),
        ('{"a": ["x", 0]}', "role 'a' is no place"),
        ('{"a": ""}', "role 'a' is no place"),
        ('{"a": {"clean": "x"}}', "role 'a' has other keys"),
        ('{"a": {"clean": "x", "corrupted": "y", "third": 1}}', "role 'a' has other keys"),
    ],
)
def test_bad_roles_in_a_file_are_named(tmp_path, roles: str, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"clean": "a", "corrupted": "b", "answers": ["c"], "roles": ' + roles + "}")
    with pytest.raises(PairError, match=rf"line 1: .*{problem}"):
        read_pairs(path)


def test_roles_come_back_as_they_were_written(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    roles = {"a": "x", "b": ["x", 2], "c": -1, "d": [0, 2], "e": {"clean": "x", "corrupted": 3}}
    path.write_text(json.dumps({"clean": "a", "corrupted": "b", "answers": "c", "roles": roles}))
    expected = (Role("a", "x"), Role("b", ("x", 2)), Role("c", -1), Role("d", (0, 2)), Role("e", "x", 3))
    assert read_pairs(path)[0].roles == expected


@pytest.mark.parametrize("task", TASKS)
def test_every_task_names_the_same_roles_in_all_its_pairs(task: str) -> None:
    made = encoder(Pieces(halved=("museum", "occupation")))
    found = [encode_pair(pair, made) for pair in generate(task, made, 30)]
    assert len({tuple(ids.roles) for ids in found}) == 1 and len(found[0].roles) >= 2
    assert task == "induction" or len({len(ids.clean) for ids in found}) > 1
    for ids in found:
        assert set(ids.differing) <= {at for places in ids.roles.values() for at in places}, ids.roles


# --- a sweep over several ---------------------------------------------------------------------------------

LINES = [
    {
        "clean": "a big cat",
        "corrupted": "a bad cat",
        "roles": {"size": {"clean": "big", "corrupted": "bad"}, "end": -1},
    },
    {"clean": "the red dog", "corrupted": "the rad dog", "roles": {"end": -1, "size": [3, 6], "article": "the"}},
]


def file_of(tmp_path, lines=LINES):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({**line, "answers": ["x"], "wrong": ["y"]}) for line in lines))
    return path


def test_a_role_is_a_cell_with_all_its_positions(model) -> None:
    clean, corrupted = "a big cat", "a bad cat"
    made = model.patch(clean, corrupted, "x", "y", roles={"size": (2, 3, 4), "end": (8,)})
    plain = model.patch(clean, corrupted, "x", "y")
    assert made.columns == ("size", "end")
    assert made.values[:, 1].tolist() == pytest.approx(plain.values[:, 8].tolist(), abs=1e-5)  # batches of other sizes
    ids = torch.tensor([model.encode(clean)])
    with model.edited(mainstem.Edit.patch("L1.resid_pre", corrupted, positions=[2, 3, 4])), torch.no_grad():
        logits = model.module(input_ids=ids).logits[0, -1]
    noised = model.patch(clean, corrupted, "x", "y", direction="noising", roles={"size": (2, 3, 4)})
    x, y = model.encode("x")[0], model.encode("y")[0]
    assert float(noised.values[1, 0]) == pytest.approx(float(logits[x] - logits[y]), abs=1e-5)


def test_pairs_of_different_lengths_are_compared_by_the_roles_of_all(run, model, tmp_path) -> None:  # noqa: F811
    found = run("patch", "--pairs", file_of(tmp_path), "-f", "json")
    assert found[0] == 0, found[2]
    document = json.loads(found[1])
    assert document["columns"] == ["size", "end", "elsewhere"] and document["pairs"] == 2
    assert document["roles"] == {"size": [2, 3, 4], "end": [8], "elsewhere": [0, 1, 5, 6, 7]}
    assert any("article" in note for note in document["notes"])
    own = [{"size": [2, 3, 4], "end": [8], "elsewhere": [0, 1, 5, 6, 7]}]
    own += [{"size": [3, 4, 5], "end": [9], "elsewhere": [0, 1, 2, 6, 7, 8]}]  # "th" is one token
    sweeps = [
        model.patch(line["clean"], line["corrupted"], "x", "y", roles=roles)
        for line, roles in zip(LINES, own, strict=True)
    ]
    mean = torch.stack([sweep.values for sweep in sweeps]).mean(0)
    assert torch.tensor(document["values"]).allclose(mean.float(), atol=1e-6)
    table = run("patch", "--pairs", file_of(tmp_path), "--grid", "attn")[1]
    assert "elsewhere" in table.replace("\n", "") and "all its positions at once" in " ".join(table.split())


def test_roles_may_be_asked_for_where_lengths_are_equal(run, tmp_path) -> None:  # noqa: F811
    one = file_of(tmp_path, LINES[:1])
    assert json.loads(run("patch", "--pairs", one, "-f", "json")[1])["roles"] is None
    assert json.loads(run("patch", "--pairs", one, "--roles", "-f", "json")[1])["columns"][0] == "size"
    refused(run("patch", "--pairs", one, "--roles", "--grid", "heads"), 2, "takes no roles")
    refused(run("patch", "a big cat", "a bad cat", "--answer", "x", "--roles"), 2, "no role that all pairs name")


def test_pairs_without_a_role_in_common_are_told_how(run, tmp_path) -> None:  # noqa: F811
    lines = [LINES[0], {**LINES[1], "roles": {"article": "the"}}]
    refused(run("patch", "--pairs", file_of(tmp_path, lines)), 2, "not the same", '"roles"', "line 1", "line 2")


@pytest.mark.parametrize("roles", [{}, {"a": ()}, {"a": (9,)}, {"a": (-1,)}])
def test_roles_without_positions_are_refused(model, roles) -> None:
    with pytest.raises(UsageError, match="no role|has positions"):
        model.patch("a big cat", "a bad cat", "x", "y", roles=roles)


def test_the_state_of_other_roles_is_refused(model, tmp_path) -> None:
    state = tmp_path / "state.jsonl"
    model.patch("a big cat", "a bad cat", "x", "y", roles={"a": (2,)}, state=state)
    with pytest.raises(UsageError, match="roles"):
        model.patch("a big cat", "a bad cat", "x", "y", roles={"a": (3,)}, state=state)
