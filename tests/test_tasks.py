"""Pairs of prompts: read or refused line by line, encoded at equal length; tasks that fit any tokenizer."""

import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.analysis.statistics import split_half
from mainstem.errors import ChoiceError, MainstemError, PairError, PromptError, TokenError
from mainstem.lab.pairs import EncodedPair, Encoder, PromptPair, encode_pair, read_pairs
from mainstem.lab.tasks import TASKS, capitals, generate, greater_than, indirect_object, induction
from mainstem.lab.wording import CAPITALS, NAMES


class Pieces:
    """Cuts text by a pattern, gives each new piece the next id, and knows what it gave."""

    all_special_ids = (0, 1)
    unk_token_id = None

    def __init__(self, digits: str = r"\d", halved: tuple[str, ...] = ()) -> None:
        self.pattern = re.compile(rf"{digits}| ?[A-Za-z]+|.|\n")
        self.halved = halved
        self.pieces = ["<s>", "</s>"]

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        ids = []
        for word in self.pattern.findall(text):
            half = len(word) // 2
            for piece in (word[:half], word[half:]) if word.strip() in self.halved else (word,):
                if piece not in self.pieces:
                    self.pieces.append(piece)
                ids.append(self.pieces.index(piece))
        return ids

    def decode(self, ids: list[int], /) -> str:
        return "".join(self.pieces[i] for i in ids)

    def convert_ids_to_tokens(self, i: int, /) -> str:
        return self.pieces[i]


def encoder(tokenizer: Pieces | None = None, d_vocab: int = 5000) -> Encoder:
    own = tokenizer or Pieces()
    return Encoder(lambda prompt: own.encode(prompt) if isinstance(prompt, str) else list(prompt), own, d_vocab)


def without_tokenizer(d_vocab: int = 40) -> Encoder:
    return Encoder(list, None, d_vocab)


PAIR = PromptPair("France has", "Italy has", (" Paris",), (" Rome",))


# --- files ------------------------------------------------------------------------------------------------


def write(path, *lines: str):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_pairs_come_back_as_they_were_written(tmp_path) -> None:
    rows = [
        {"clean": "France has", "corrupted": "Italy has", "answers": [" Paris"], "wrong": [" Rome"]},
        {"clean": [1, 2], "corrupted": [1, 3], "answers": 7},
        {"clean": "line\u2028break", "corrupted": "x", "answers": " one", "wrong": []},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    found = read_pairs(write(tmp_path / "p.jsonl", lines[0], "", *lines[1:], ""))
    assert found == [PAIR, PromptPair((1, 2), (1, 3), (7,)), PromptPair("line\u2028break", "x", (" one",))]
    assert [pair.where for pair in found] == [f"line {n} of p.jsonl" for n in (1, 3, 4)]


GOOD = '{"clean": "a", "corrupted": "b", "answers": ["c"]}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{'clean': 1}", "not JSON"),
        ('["a", "b"]', "not an object with keys, but list"),
        ('{"clean": "a", "corrupted": "b"}', "no 'answers'"),
        ('{"answers": ["c"]}', "no 'clean', 'corrupted'"),
        (GOOD[:-1] + ', "wrongs": []}', "unknown key 'wrongs' .known: clean, corrupted, answers, wrong, roles."),
        ('{"clean": "", "corrupted": "b", "answers": ["c"]}', "'clean' is neither text nor a list of token ids, or is"),
        ('{"clean": "a", "corrupted": [1, true], "answers": ["c"]}', "'corrupted' is neither text"),
        ('{"clean": "a", "corrupted": "b", "answers": []}', "'answers' is empty"),
        ('{"clean": "a", "corrupted": "b", "answers": [1.5]}', "'answers' holds something that is neither"),
        ('{"clean": "a", "corrupted": "b", "answers": ["c"], "wrong": [""]}', "'wrong' holds something"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line: str, problem: str) -> None:
    with pytest.raises(PairError, match=rf"line 2: {problem}.*Write each line as"):
        read_pairs(write(tmp_path / "p.jsonl", GOOD, line))


def test_all_bad_lines_are_named_but_not_without_end(tmp_path) -> None:
    with pytest.raises(PairError) as caught:
        read_pairs(write(tmp_path / "p.jsonl", "x", GOOD, "[]", *["y"] * 20))
    message = str(caught.value)
    assert "line 1: not JSON" in message and "line 3: not an object" in message and "; and 12 more" in message
    assert "line 2:" not in message


def test_files_without_pairs_are_refused(tmp_path) -> None:
    with pytest.raises(PairError, match="holds no pair .*p.jsonl"):
        read_pairs(write(tmp_path / "p.jsonl", "", "  "))
    with pytest.raises(PairError, match=r"cannot be read: (No such file|byte \d+ is not|Is a dir)"):
        read_pairs(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"clean": "\xe9"}')
    with pytest.raises(PairError, match="Give a text file in UTF-8"):
        read_pairs(tmp_path / "latin.jsonl")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "p.jsonl"


@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=60)
def test_any_file_is_read_or_an_explained_error(scratch, content: bytes) -> None:
    scratch.write_bytes(content)
    with pytest.raises(PairError):
        read_pairs(scratch)


# --- encoding ---------------------------------------------------------------------------------------------


def test_a_pair_is_encoded_at_equal_length() -> None:
    found = encode_pair(PAIR, encoder())
    assert len(found.clean) == len(found.corrupted) == 2
    assert found.differing == (0,)
    ids = encode_pair(PromptPair((5, 6, 7), (5, 8, 7), (9,), (3,)), without_tokenizer())
    assert ids == EncodedPair((5, 6, 7), (5, 8, 7), (9,), (3,)) and ids.differing == (1,)


def test_unequal_lengths_are_refused_side_by_side() -> None:
    pair = PromptPair("In France now", "In Bulgaria now", (" Paris",), where="line 3 of p.jsonl")
    with pytest.raises(PairError) as caught:
        encode_pair(pair, encoder(Pieces(halved=("Bulgaria",))))
    assert str(caught.value) == (
        "The clean prompt has 3 tokens and the corrupted one 4; from position 1 on they are: clean ' France', "
        "corrupted ' Bul' 'garia' (line 3 of p.jsonl). Replace words by words of as many tokens."
    )
    with pytest.raises(PairError, match="clean nothing, corrupted ' a'"):
        encode_pair(PromptPair("a b", "a a b", (" c",)), encoder())


def test_equal_prompts_and_answers_of_several_tokens_are_refused() -> None:
    with pytest.raises(PairError, match="are the same tokens"):
        encode_pair(PromptPair("a b", "a b", (" c",)), encoder())
    halved = encoder(Pieces(halved=("Paris",)))
    with pytest.raises(TokenError, match=r"' Paris' is 2 tokens here: ' Pa' .*, 'ris' .*line 9"):
        encode_pair(PromptPair("a b", "c b", (" Paris",), where="line 9"), halved)
    with pytest.raises(TokenError, match="outside the vocabulary"):
        encode_pair(PromptPair((1,), (2,), (40,)), without_tokenizer())


def test_a_leading_space_is_suggested_where_it_helps() -> None:
    class Spaced(Pieces):
        def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
            self.halved = () if " Paris" in text else ("Paris",)
            return super().encode(text, add_special_tokens=add_special_tokens)

    with pytest.raises(TokenError, match="' Paris' is one token"):
        encode_pair(PromptPair("a b", "c b", ("Paris",)), encoder(Spaced()))


# --- tasks ------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "single digits": lambda: Pieces(),
    "two digits": lambda: Pieces(digits=r"\d\d"),
    "some names halved": lambda: Pieces(halved=(*NAMES[::2], *list(CAPITALS)[::3], *list(CAPITALS.values())[::4])),
}


@pytest.mark.parametrize("tokens", TOKENIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_every_pair_of_every_task_fits_the_tokenizer_and_comes_again(task: str, tokens: str) -> None:
    made = encoder(TOKENIZERS[tokens]())
    pairs = generate(task, made, 30, seed=5)
    assert len(set(pairs)) == 30
    for pair in pairs:
        encoded = encode_pair(pair, made)  # equal lengths, answers of one token
        assert encoded.differing and encoded.answers and encoded.wrong_answers
        assert not set(encoded.answers) & set(encoded.wrong_answers)
    assert generate(task, made, 30, seed=5) == pairs != generate(task, made, 30, seed=6)
    assert generate(task, made, 10, seed=5) == pairs[:10]


def names_of(prompt: str) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z]+", prompt) if word in NAMES]


@pytest.mark.parametrize("corruption", ["swap", "third"])
def test_indirect_object(corruption: str) -> None:
    pairs = indirect_object(encoder(), 60, corruption=corruption)
    orders = set()
    for pair in pairs:
        first, second, giver = names_of(pair.clean)
        answer, wrong = pair.answers[0].strip(), pair.wrong_answers[0].strip()
        assert giver == wrong and {first, second} == {answer, wrong}
        orders.add("ABBA" if first == answer else "BABA")
        *others, replaced = names_of(pair.corrupted)
        assert others == [first, second] and len(encode_pair(pair, encoder()).differing) == 1
        assert (replaced == answer) if corruption == "swap" else (replaced not in (answer, wrong))
    assert orders == {"ABBA", "BABA"}


def test_greater_than_with_two_digit_years() -> None:
    tokenizer = Pieces(digits=r"\d\d")
    for pair in greater_than(encoder(tokenizer), 40):
        year, century = (int(part) for part in re.findall(r"\d\d", pair.clean)[1:])
        assert pair.corrupted == pair.clean.replace(f"{century}{year:02}", f"{century}01")
        assert [tokenizer.decode([t]) for t in pair.answers] == [f"{y:02}" for y in range(year + 1, 100)]
        assert [tokenizer.decode([t]) for t in pair.wrong_answers] == [f"{y:02}" for y in range(year + 1)]


def test_greater_than_with_single_digits_is_decided_by_the_tens() -> None:
    tokenizer = Pieces()
    for pair in greater_than(encoder(tokenizer), 40):
        century, year = re.search(r"(\d\d)(\d\d) to", pair.clean).groups()
        answers, wrong = ([tokenizer.decode([t]) for t in ids] for ids in (pair.answers, pair.wrong_answers))
        assert sorted(answers + wrong) == list("0123456789")
        # whatever the units digit will be, an answer makes the year later, and a wrong answer does not
        assert all(int(f"{tens}{units}") > int(year) for tens in answers for units in range(10))
        assert all(int(f"{tens}{units}") <= int(year) for tens in wrong for units in range(10))
        assert f"{century}01 to" in pair.corrupted


def test_years_that_are_joined_otherwise_are_refused() -> None:
    with pytest.raises(PairError, match="Neither two-digit years nor digits are single tokens"):
        greater_than(encoder(Pieces(digits=r"\d+")), 5)


@pytest.mark.parametrize("corruption", ["value", "key"])
def test_induction(corruption: str) -> None:
    for pair in induction(without_tokenizer(), 40, corruption=corruption, length=6):
        clean, corrupted, place = list(pair.clean), list(pair.corrupted), len(pair.clean) - 7
        assert len(set(clean[:6])) == 6 and clean[6:] == clean[: place + 1]
        assert pair.answers == (clean[place + 1],)
        (changed,) = encode_pair(pair, without_tokenizer()).differing
        assert changed == place + (corruption == "value")
        assert corrupted[changed] not in clean
        assert pair.wrong_answers[0] == corrupted[changed] if corruption == "value" else pair.wrong_answers[0] in clean


def test_induction_leaves_out_special_tokens() -> None:
    pairs = induction(encoder(d_vocab=14), 30, length=8)
    assert all(min(pair.clean + pair.corrupted) >= 2 for pair in pairs)


def test_capitals_are_facts() -> None:
    for pair in capitals(encoder(), 40):
        (own,) = [country for country in CAPITALS if country in pair.clean]
        (other,) = [country for country in CAPITALS if country in pair.corrupted]
        assert (pair.answers, pair.wrong_answers) == ((f" {CAPITALS[own]}",), (f" {CAPITALS[other]}",))


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"induction"}))
def test_text_needs_a_tokenizer(task: str) -> None:
    with pytest.raises(PromptError, match="came without a tokenizer.*Take induction"):
        generate(task, without_tokenizer(), 3)


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(ChoiceError, match="Unknown task 'capital'. Did you mean 'capitals'"):
        generate("capital", encoder(), 3)
    with pytest.raises(ChoiceError, match="Unknown corruption 'noise'"):
        indirect_object(encoder(), 3, corruption="noise")
    with pytest.raises(PairError, match="different pairs of capitals, not 100000"):
        capitals(encoder(Pieces(halved=tuple(CAPITALS.values())[3:])), 100_000)
    with pytest.raises(PairError, match="gives 0 different pairs of indirect-object"):
        indirect_object(encoder(Pieces(halved=NAMES)), 3)
    with pytest.raises(PairError, match="cannot be had from a vocabulary of 6"):
        induction(without_tokenizer(6), 1, length=8)
    with pytest.raises(MainstemError, match="three at least"):
        induction(without_tokenizer(), 1, length=2)


@pytest.mark.slow
def test_the_default_model_does_the_tasks(demo_model) -> None:
    """The clean prompt favours the answers by more than the corrupted one, on every pair of eight."""
    made = demo_model.encoder
    for task in TASKS:
        for pair in generate(task, made, 8):
            encoded = encode_pair(pair, made)
            with torch.no_grad():
                logits = demo_model.module(torch.tensor([encoded.clean, encoded.corrupted])).logits[:, -1]
            right, wrong = (logits[:, list(ids)].mean(-1) for ids in (encoded.answers, encoded.wrong_answers))
            assert float((right - wrong)[0]) > max(0.0, float((right - wrong)[1])), (task, pair)


# --- statistics -------------------------------------------------------------------------------------------


def table(units: int, prompts: int, noise: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    effect = torch.randn(units, 1, generator=generator)
    return effect + noise * torch.randn(units, prompts, generator=generator)


def test_stability_is_one_without_noise_and_none_without_effect() -> None:
    sure = split_half(table(50, 9, 0.0, 1))
    assert abs(sure.half - 1) < 1e-9 and abs(sure.whole - 1) < 1e-9
    assert abs(split_half(torch.randn(4000, 10, generator=torch.Generator().manual_seed(2))).half) < 0.05


def test_stability_of_the_whole_is_what_other_prompts_would_give() -> None:
    """Against the means over as many other prompts of the same units, where the noise is as large as the effect."""
    both = table(3000, 24, 2.0, seed=3)
    first, second = both[:, :12], both[:, 12:]
    expected = float(torch.corrcoef(torch.stack([first.mean(1), second.mean(1)]))[0, 1])
    found = split_half(first)
    assert abs(found.whole - expected) < 0.03
    assert found.half < found.whole - 0.08


@given(st.integers(0, 1000), st.floats(0.1, 10), st.floats(-10, 10))
@settings(max_examples=20)
def test_stability_does_not_depend_on_scale_or_shift(seed: int, scale: float, shift: float) -> None:
    one = table(12, 6, 1.0, seed)
    a, b = split_half(one, splits=10), split_half(scale * one + shift, splits=10)
    assert math.isclose(a.half, b.half, abs_tol=1e-3) and split_half(one, splits=10) == a


def test_stability_that_is_not_defined_is_nan() -> None:
    for one in (torch.randn(1, 8), torch.randn(8, 1), torch.ones(5, 6)):
        assert math.isnan(split_half(one).half) and math.isnan(split_half(one).whole)
