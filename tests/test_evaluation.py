"""Windows of a text, and what runs say of its tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.causal.evaluation import evaluate
from mainstem.errors import NotFiniteError, TextError, UsageError
from mainstem.run.windows import windows

VOCABULARY = 11


@given(st.integers(2, 40), st.integers(0, 60), st.integers(1, 40))
def test_every_token_is_seen_once_and_in_its_place(length, more, stride):
    ids = list(range(length + more))
    cut = windows(ids, length, min(stride, length))
    assert cut.ids[cut.fresh()].tolist() == ids
    assert cut.n_tokens == len(ids)
    assert cut.predicted().sum() == sum(length - max(first, 1) for first in cut.new)


def test_a_sliding_window_predicts_each_token_but_the_first_from_enough_before_it():
    cut = windows(list(range(23)), 8, 3)
    assert cut.ids[cut.predicted()].tolist() == list(range(1, 23))
    assert min(cut.new[1:]) == 8 - 3


@pytest.mark.parametrize("length, stride", [(1, 1), (8, 0), (8, 9)])
def test_windows_that_cannot_be_are_refused(length, stride):
    with pytest.raises(UsageError):
        windows(list(range(20)), length, stride)


def test_a_text_shorter_than_a_window_is_refused_with_both_lengths():
    with pytest.raises(TextError, match="5 tokens, a window 8"):
        windows(list(range(5)), 8)


def _bigrams(seed: int):
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return lambda ids: table[ids]


def _text(n: int) -> list[int]:
    return torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(7)).tolist()


def test_losses_do_not_depend_on_batches_and_agree_with_cross_entropy():
    ids, run = _text(41), _bigrams(0)
    cut = windows(ids, 8, 5)
    one, three = (evaluate({"plain": run}, cut, batch)["plain"] for batch in (1, 3))
    torch.testing.assert_close(one.nats, three.nats)
    tokens = torch.tensor(ids)
    expected = torch.nn.functional.cross_entropy(run(tokens)[:-1].double(), tokens[1:], reduction="none")
    torch.testing.assert_close(one.nats, expected)
    assert one.perplexity == pytest.approx(float(expected.mean().exp()))
    assert not one.kl.any() and not one.flips.any()


def test_divergence_is_from_the_first_run_to_the_other():
    runs = {"plain": _bigrams(0), "other": _bigrams(1)}
    cut = windows(_text(30), 10)
    other = evaluate(runs, cut)["other"]
    seen = cut.ids[:, :-1][cut.predicted()[:, 1:]]
    first, second = (run(seen).double().softmax(-1) for run in runs.values())
    torch.testing.assert_close(other.kl, (first * (first / second).log()).sum(-1))
    assert torch.equal(other.flips, first.argmax(-1) != second.argmax(-1))


def test_a_run_without_numbers_is_named():
    runs = {"plain": _bigrams(0), "broken": lambda ids: _bigrams(0)(ids) * float("nan")}
    with pytest.raises(NotFiniteError, match="broken"):
        evaluate(runs, windows(_text(30), 10))
