"""Targets: text is literal, ids are checked, and what cannot be a target says why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.errors import TargetError, TokenError
from mainstem.targets import Target, literal_ids, parse_target, parse_token, token_text

# 13 tokens.
VOCABULARY = ["\n", " ", "Paris", " Paris", " London", "Lon", "don", "a", " a", "b", "<unk>", "is", "id:x"]


class Greedy:
    """Longest match first; what matches nothing becomes <unk>, if there is one, and otherwise bytes."""

    unk_token_id = None

    def __init__(self, vocabulary=VOCABULARY):
        self.vocabulary = list(vocabulary)

    def encode(self, text, /, *, add_special_tokens=True):
        ids = [99] if add_special_tokens else []
        while text:
            pieces = [piece for piece in self.vocabulary if text.startswith(piece)]
            if pieces:
                best = max(pieces, key=len)
                ids.append(self.vocabulary.index(best))
                text = text[len(best) :]
            elif self.unk_token_id is not None:
                ids.append(self.unk_token_id)
                text = text[1:]
            else:
                ids += [1000 + byte for byte in text[0].encode()]
                text = text[1:]
        return ids

    def decode(self, ids, /):
        return "".join(self.vocabulary[i] if i < len(self.vocabulary) else "\ufffd" for i in ids)

    def convert_ids_to_tokens(self, i, /):
        if i >= 1000:
            return f"<0x{i - 1000:02X}>"
        return self.vocabulary[i] if i < len(self.vocabulary) else None


class WithDummyPrefix(Greedy):
    """Puts a space before whatever it is given, and drops it again when decoding, as SentencePiece does."""

    def __init__(self):
        super().__init__([piece.replace(" ", "\u2581") for piece in VOCABULARY])

    def encode(self, text, /, *, add_special_tokens=True):
        return super().encode(("\u2581" + text).replace(" ", "\u2581"), add_special_tokens=add_special_tokens)

    def decode(self, ids, /):
        return super().decode(ids).replace("\u2581", " ").removeprefix(" ")


class WithUnknown(Greedy):
    """Has a token for what it does not know."""

    unk_token = "<unk>"
    unk_token_id = VOCABULARY.index("<unk>")


def target(text, against=(), tokenizer=None, d_vocab=13):
    return parse_target(text, tokenizer or Greedy(), d_vocab, against)


# --- laws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [Greedy(), WithDummyPrefix()], ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("token", [i for i, piece in enumerate(VOCABULARY) if piece not in ("\n", "id:x")])
def test_a_tokens_text_names_the_token(tokenizer, token):
    text = token_text(tokenizer, token)
    assert text == VOCABULARY[token]
    assert parse_token(text, tokenizer, len(VOCABULARY)) == token
    assert parse_token(f"id:{token}", tokenizer, len(VOCABULARY)) == token


@settings(deadline=None)
@given(st.text("Paris Lond\n", max_size=12), st.sampled_from([Greedy(), WithDummyPrefix()]))
def test_any_text_is_a_token_or_an_explained_error(text, tokenizer):
    try:
        parsed = target(text, tokenizer=tokenizer)
    except TokenError as error:
        assert (repr(text) in str(error)) if text else ("is empty" in str(error))
    else:
        assert parsed.kind == "token"
        assert parsed.text == text


@settings(deadline=None)
@given(st.integers(-5, 30))
def test_an_id_is_taken_if_and_only_if_the_vocabulary_has_it(token):
    if 0 <= token < 13:
        assert target(f"id:{token}").ids == (token,)
    else:
        with pytest.raises(TokenError, match=f"Token id {token} is outside the vocabulary.*from 0 to 12"):
            target(f"id:{token}")


# --- literal text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [Greedy(), WithDummyPrefix()], ids=lambda t: type(t).__name__)
def test_a_leading_space_is_part_of_the_text_and_the_other_spelling_is_noted(tokenizer):
    spaced, bare = target(" Paris", tokenizer=tokenizer), target("Paris", tokenizer=tokenizer)
    assert (spaced.ids, spaced.text) == ((3,), " Paris")
    assert (bare.ids, bare.text) == ((2,), "Paris")
    assert (spaced.alternative, spaced.alternative_text) == (2, "Paris")
    assert (bare.alternative, bare.alternative_text) == (3, " Paris")
    assert target("id:3", tokenizer=tokenizer).alternative == 2


def test_there_is_no_other_spelling_where_it_is_several_tokens_or_nothing():
    assert target(" London").alternative is None
    assert target(" ").alternative is None
    assert target("b").alternative is None


def test_text_that_merges_with_the_line_break_is_encoded_alone():
    tokenizer = Greedy([*VOCABULARY, "\n\n"])
    assert literal_ids(tokenizer, "\n") == [0]
    assert parse_token("\n", tokenizer, 14) == 0


def test_several_tokens_show_the_pieces_and_how_to_write_it():
    with pytest.raises(TokenError) as caught:
        target("London")
    assert str(caught.value) == (
        "'London' is 2 tokens here: 'Lon' (id:5), 'don' (id:6). "
        "' London' is one token (id:4); or name the first piece, id:5."
    )
    with pytest.raises(TokenError, match=r"Name one of them by its id, most likely the first: id:2\.$"):
        target("ParisParis")
    with pytest.raises(TokenError, match=r"9 tokens here: .*, \.\.\. Name"):
        target("a" * 9)


def test_pieces_of_a_character_are_shown_in_the_vocabularys_spelling():
    with pytest.raises(TokenError, match=r"'é' is 2 tokens here: '<0xC3>' \(id:1195\), '<0xA9>' \(id:1169\)"):
        target("é")


def test_an_unknown_text_is_not_the_unknown_token():
    with pytest.raises(TokenError, match="The vocabulary has no token for 'q'"):
        target("q", tokenizer=WithUnknown())
    assert target("<unk>", tokenizer=WithUnknown()).ids == (10,)


@pytest.mark.parametrize("text", ["id:", "id:x", "id:1.5", "id:٣", "id:" + "9" * 30])
def test_what_follows_id_has_to_be_a_number(text):
    with pytest.raises(TokenError, match=r"after id: comes a whole number\. Write id:7042\."):
        target(text)


def test_ids_that_only_the_unembedding_knows():
    padded = target("id:20", d_vocab=32)
    assert (padded.ids, padded.text) == ((20,), "id:20")
    with pytest.raises(TokenError, match="Token id 4 is outside"):
        target(" London", d_vocab=3)


# --- kinds ------------------------------------------------------------------------------------------------


def test_sets_and_contrasts():
    both = target(["Paris", " Paris", "id:2"])
    assert (both.kind, both.ids, both.text) == ("set", (2, 3), "Paris |  Paris")
    contrast = target(" Paris", against=[" London", "a", "id:4"])
    assert (contrast.kind, contrast.against, contrast.against_texts) == ("contrast", (4, 7), (" London", "a"))
    assert target(" Paris", against=" London").against == (4,)
    assert contrast.token_id == 3
    with pytest.raises(TargetError, match="not a single token"):
        _ = both.token_id


def test_continuations_and_directions():
    assert Target(continuation=(1, 2)).kind == "continuation"
    assert Target(direction=(0.5, 1.0)).kind == "direction"
    assert hash(Target(direction=(0.5, 1.0))) == hash(Target(direction=(0.5, 1.0)))


def test_what_makes_no_target():
    with pytest.raises(TargetError, match=r"' Paris' is its own rival \(id:3\).*Name another token"):
        target(" Paris", against=["a", "id:3"])
    with pytest.raises(TargetError, match="names nothing"):
        target([])
    with pytest.raises(TargetError, match="mixes"):
        Target(ids=(1,), continuation=(2,))
    with pytest.raises(TargetError, match="Only tokens can have rivals"):
        Target(continuation=(1, 2), against=(3,))
    with pytest.raises(TokenError, match="The text of a token is empty"):
        target("")


# --- tokenizers as they are -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("space", ["byte level", "dummy prefix"])
def test_tokenizers_of_transformers_serve(space):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    mark = "\u0120" if space == "byte level" else "\u2581"
    words = [
        "Paris",
        f"{mark}Paris",
        f"{mark}is",
        "is",
        mark,
        "\u010a" if mark == "\u0120" else "\n",
        "<unk>",
    ]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    if space == "byte level":
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
    else:
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=True),
                tokenizers.pre_tokenizers.Split("\n", "isolated"),
            ]
        )
        inner.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert [target(text, tokenizer=tokenizer, d_vocab=7).ids for text in ("Paris", " Paris")] == [(0,), (1,)]
    assert target(" is", tokenizer=tokenizer, d_vocab=7).alternative == 3
    assert token_text(tokenizer, 1) == " Paris"
    with pytest.raises(TokenError, match="no token for 'Q'"):
        target("Q", tokenizer=tokenizer, d_vocab=7)
