"""A reference text as a model reads it: how long its windows are, what of it comes first, what is refused."""

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

import mainstem
from mainstem.basis.reference import reference
from mainstem.errors import UsageError
from mainstem.lab.texts import Text
from mainstem.session import Model

CONTEXT = 128
"""Of every model of the zoo."""


class Numbers(Text):
    """Random token ids that every tiny model knows."""

    def ids(self, model, most=None):
        generator = torch.Generator().manual_seed(2)
        return torch.randint(5, 190, (600,), generator=generator).tolist()[:most]


TEXT = Numbers("numbers", "a seed", "")
LLAMA = mainstem.open(zoo.build("llama"))


@pytest.fixture(scope="module")
def llama() -> Model:
    return LLAMA


@pytest.mark.parametrize("tokens, window, length", [(40, None, 40), (600, None, CONTEXT), (100, 30, 30)])
def test_a_window_is_as_long_as_is_asked_for_or_as_the_text_and_the_context_allow(llama, tokens, window, length):
    on = reference(llama, TEXT, tokens, window)
    assert on.windows.length == length and on.windows.n_tokens == tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_window_longer_than_the_context_is_refused_with_both(family):
    with pytest.raises(UsageError, match=r"window 129, context 128"):
        reference(mainstem.open(zoo.build(family)), TEXT, 600, CONTEXT + 1)


@given(tokens=st.integers(2, 400), most=st.integers(2, 400), window=st.integers(2, 40))
def test_the_first_tokens_are_the_texts_own_in_the_same_windows(tokens, most, window):
    whole = reference(LLAMA, TEXT, max(most, window), window)
    first = whole.first(tokens)
    n = min(tokens, len(whole.ids))
    assert first.ids == whole.ids[:n] and first.windows.n_tokens == n
    assert first.windows.length == min(window, tokens) and first.text is whole.text
