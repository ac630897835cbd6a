"""A model that treats padded rows unlike single ones is refused, not traced in silence."""

import handmade
import pytest

from mainstem.errors import PromptError
from mainstem.model.loading import load
from mainstem.session import Model


class _Blind(handmade.ALL["plain"]().__class__):
    """A model that takes an attention mask and does not look at it."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return super().forward(input_ids, attention_mask=None)


def _rows(model: Model):
    from mainstem.run.inputs import make_inputs
    from mainstem.run.trace import RunTrace

    inputs = make_inputs(model.module, [[5, 6, 7, 8, 9, 10], [11, 12, 13]], 100, "cpu")
    return RunTrace(model.module, model.anatomy, inputs, [-1])


def test_rows_that_get_what_they_get_alone_are_traced() -> None:
    assert _rows(Model(load(handmade.ALL["plain"]()))).first.logits.shape[0] == 2


def test_rows_that_do_not_are_refused() -> None:
    module = handmade.ALL["plain"]()
    module.__class__ = _Blind
    with pytest.raises(PromptError, match="one at a time"):
        _rows(Model(load(module)))
