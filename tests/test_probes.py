"""The labels certificate counts only what could have shown a wrong label."""

import pytest
import torch
import zoo

from mainstem.causal.labels import check_labels
from mainstem.model.discovery import discover


@pytest.mark.parametrize("silent", [False, True])
def test_units_that_write_nothing_are_not_counted(silent: bool) -> None:
    model = zoo.build("llama")
    anatomy = discover(model)
    if silent:
        with torch.no_grad():
            for write in anatomy.writes:
                if write.attention is not None and write.projection is not None:
                    write.projection.factors[0].zero_()
    check = check_labels(model, anatomy, zoo.prompt(9, seed=1))
    assert check.holds
    assert check.checked == (3 if silent else 12)  # neurons alone, or heads, coordinates and sources as well
