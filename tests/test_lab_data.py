"""Generated text has the statistics that it claims, and is a function of its step and seed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import mainstem
from mainstem.errors import ChoiceError, TextError, UsageError
from mainstem.lab.bigrams import START, RepeatedBigrams
from mainstem.lab.corpora import open_corpus
from mainstem.lab.decoder import decoder
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.lab.skip_trigrams import FORCED, PLANTED, SkipTrigram, SkipTrigramText
from mainstem.lab.texts import open_text
from mainstem.lab.training import Recipe, next_token_loss, train


@given(st.integers(0, 1000), st.integers(0, 5), st.integers(2, 9), st.integers(0, 5))
def test_a_second_copy_is_marked_and_follows_its_first(step: int, seed: int, shortest: int, more: int) -> None:
    text = RepeatedBigrams(d_vocab=30, length=40, batch=6, segment=(shortest, shortest + more), seed=seed)
    ids, repeated = text.sample(step)
    assert torch.equal(ids, text(step)) and torch.equal(text.sample(step).repeated, repeated)
    assert (ids[:, 0] == START).all() and (ids[:, 1:] != START).all() and ids.max() < 30
    for row, marked in zip(ids.tolist(), repeated, strict=True):
        places = marked.nonzero()[:, 0].tolist()
        assert shortest - 1 <= len(places) <= shortest + more - 1
        assert places == list(range(places[0], places[-1] + 1))
        segment = row[places[0] - 1 : places[-1] + 1]
        assert len(set(segment)) == len(segment)
        assert any(row[i : i + len(segment)] == segment for i in range(1, places[0] - len(segment)))


def test_everything_else_is_of_the_table() -> None:
    text = RepeatedBigrams(d_vocab=12, length=200, batch=200, segment=(2, 3), successors=3)
    table = text.table
    assert ((table[1:] > 0).sum(1) == 3).all() and torch.allclose(table.sum(1), torch.ones(12))
    assert torch.allclose(table[1:, 1:].sum(0), torch.ones(11)) and (table[:, START] == 0).all()
    ids = text(0)
    counts = torch.zeros(12, 12).index_put(
        (ids[:, :-1].flatten(), ids[:, 1:].flatten()), torch.ones(()), accumulate=True
    )
    found = counts / counts.sum(1, keepdim=True)
    assert (found - table)[1:].abs().max() < 0.05  # two segments of 2 or 3 among 200 tokens
    assert text.entropy == pytest.approx(float(-(table[3] * table[3].log()).nansum()))


def test_its_null_repeats_nothing_at_the_same_places() -> None:
    text = RepeatedBigrams(d_vocab=200, batch=200)
    (ids, repeated), (other, marked) = text.sample(3), text.sample(3, repeat=False)
    assert torch.equal(repeated, marked) and not torch.equal(ids, other)
    second = repeated.clone()
    second[:, :-1] |= repeated[:, 1:]
    assert torch.equal(ids[~second], other[~second])
    assert (ids != other)[repeated].float().mean() > 0.98


def test_steps_and_seeds_differ() -> None:
    for kind in (RepeatedBigrams, SkipTrigramText):
        assert not torch.equal(kind()(0), kind()(1)) and not torch.equal(kind()(0), kind(seed=1)(0))


def outs_of(text: SkipTrigramText, row: list[int], place: int) -> set[int]:
    """What the planted trigrams allow at a place."""
    return {
        text.id_of(each.out)
        for each in text.trigrams
        if row[place - 1] == text.id_of(each.destination) and text.id_of(each.source) in row[: place - 1]
    }


@pytest.mark.parametrize("step", range(3))
def test_outs_follow_their_destinations_exactly_where_a_source_stands_earlier(step: int) -> None:
    text = SkipTrigramText(batch=200)
    ids, planted = text.sample(step)
    half = text.length // 2
    assert not planted[:, :half].any() and planted.sum(1).max() <= text.destinations
    for row, marked in zip(ids.tolist(), planted.tolist(), strict=True):
        for place in range(half, text.length):
            allowed = outs_of(text, row, place)
            assert marked[place] == bool(allowed)
            assert not allowed or row[place] in allowed
    destinations = torch.isin(ids, torch.tensor([text.id_of(each.destination) for each in PLANTED]))
    after = torch.zeros_like(planted)
    after[:, 1:] = destinations[:, :-1]
    assert (after & ~planted).any() and not (planted & ~after).any()
    outs = torch.tensor([text.id_of(each.out) for each in PLANTED[1:]])
    assert not torch.isin(ids[~planted], outs).any()
    assert len(ids[planted].unique()) == len(PLANTED)


def test_what_is_forced_is_not_planted() -> None:
    assert not set(FORCED) & set(PLANTED)
    for forced in FORCED:
        assert any((each.source, each.destination) == forced[:2] for each in PLANTED)
        assert any((each.source, each.out) == (forced.source, forced.out) for each in PLANTED)


def test_words_are_tokens(tmp_path) -> None:
    text = SkipTrigramText()
    text.tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    row = text(0)[0].tolist()
    assert tokenizer("keep the in mind".replace("the ", ""))["input_ids"] == [
        text.id_of(w) for w in ("keep", "in", "mind")
    ]
    assert tokenizer(tokenizer.decode(row))["input_ids"] == row


@pytest.mark.parametrize(("level", "d_vocab"), [("characters", 0), ("bpe", 300)])
def test_a_corpus_is_its_text(level, d_vocab: int, tmp_path) -> None:
    corpus = open_corpus(["drama"], level, d_vocab)
    text = open_text("drama").text
    assert corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.held_out) == text
    assert 0.07 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.13
    assert d_vocab in (0, corpus.d_vocab) and int(corpus.train.max()) < corpus.d_vocab
    corpus.tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text[:500])["input_ids"] == corpus.train[:1000].tolist()[: len(again(text[:500])["input_ids"])]
    same = open_corpus(["drama"], level, d_vocab)
    assert torch.equal(same.train, corpus.train)


def test_a_model_trained_on_a_corpus_opens_and_explains_text(tmp_path) -> None:
    corpus = open_corpus(["drama"], "bpe", 300)
    model = decoder(DecoderConfig(vocab_size=corpus.d_vocab, d_model=16, n_heads=2, d_mlp=24, max_positions=16))
    train(model, next_token_loss, corpus.batches(4, 16), Recipe(4))
    model.save_pretrained(tmp_path)
    corpus.tokenizer.save_pretrained(tmp_path)
    opened = mainstem.open(tmp_path)
    explanation = opened.explain("To be, or not")
    assert explanation.certificate.holds
    assert opened.encode("To be, or not") == corpus.tokenizer("To be, or not")["input_ids"]


def test_batches_are_windows_of_the_training_part() -> None:
    corpus = open_corpus(["drama"])
    batches = corpus.batches(4, 16, seed=1)
    assert torch.equal(batches(7), batches(7)) and not torch.equal(batches(7), batches(8))
    assert not torch.equal(batches(7), corpus.batches(4, 16, seed=2)(7))
    found = corpus.train.unfold(0, 16, 1)
    assert all((found == row).all(1).any() for row in batches(7))
    windows = corpus.windows(16)
    assert torch.equal(windows.flatten(), corpus.held_out[: windows.numel()])
    assert corpus.windows(16, 5).shape == (5, 16)


def test_a_character_that_the_text_has_not_is_a_token() -> None:
    corpus = open_corpus(["drama"])
    assert len(corpus.tokenizer("a\u4e00b")["input_ids"]) == 3


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ChoiceError, match="characters, bpe"):
        open_corpus(["drama"], "words")  # type: ignore[arg-type]
    with pytest.raises(TextError, match="shorter than a window"):
        open_corpus(["drama"]).windows(1_000_000)
    for wrong in ({"segment": (1, 4)}, {"segment": (8, 40)}, {"d_vocab": 15}):
        with pytest.raises(UsageError):
            RepeatedBigrams(**wrong)
    for wrong in ({"sources": 20}, {"destinations": 7}, {"trigrams": (*PLANTED, SkipTrigram("in", "are", "x"))}):
        with pytest.raises(UsageError):
            SkipTrigramText(**wrong)
