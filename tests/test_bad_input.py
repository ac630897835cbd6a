"""Models that lack a part, and probabilities that underflow: explained all the same, or refused by name."""

import math
from collections.abc import Callable

import handmade
import pytest
import torch
import zoo
from torch import Tensor

import mainstem
from mainstem.errors import LevelRefusedError, UnitError, UsageError
from mainstem.tracing import Trace

IDS = list(range(3, 12))


class AttentionOnly(handmade.Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x), mask)


class MLPOnly(handmade.Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))


def trace_of(block: Callable) -> Trace:
    torch.manual_seed(3)
    return mainstem.open(handmade.Model(block).eval()).trace(IDS)


@pytest.mark.parametrize(
    ("block", "kind", "verified", "missing", "lacking"),
    [
        (AttentionOnly, "attention_subvalue", "attention", "ffn_neuron", "L1N3"),
        (MLPOnly, "ffn_neuron", "ffn", "head", "L1H0@2"),
    ],
)
def test_a_model_without_one_kind_of_sublayer(block, kind: str, verified: str, missing: str, lacking: str) -> None:
    trace = trace_of(block)
    made = trace.explain(top=5, queries=1, ablate={"ffn": 2, "attention": 2})
    assert {value.kind for value in made.values} == {kind} and made.certificate.holds
    assert made.account["total"] == pytest.approx(sum(v for k, v in made.account.items() if k != "total"))
    assert made.verification is not None and len(made.verification.ablated["units"]) == 2
    assert trace.explain(top=5, exhaustive=True).values[0].unit == made.values[0].unit
    with pytest.raises(UsageError, match=f"no {missing.replace('_', ' ')}s.*It has: .*{kind}"):
        trace.explain(kinds=[missing])
    with pytest.raises(UnitError, match="L1"):
        trace.queries(lacking)
    other = {"ffn": "attention", "attention": "ffn"}[verified]
    with pytest.raises(LevelRefusedError, match="none of these kinds"):
        trace.verify("id:7", {other: 3})


@pytest.mark.parametrize("norm", ["frozen", "recompute"])
def test_a_probability_that_underflows_is_explained_in_log_space(norm) -> None:
    module = zoo.build("llama")
    with torch.no_grad():
        module.lm_head.weight.mul_(400)
    trace = mainstem.open(module).trace(IDS)
    log_p = trace.logits().double().log_softmax(-1)
    worst = int(log_p.argmin())
    assert float(log_p[worst].exp().float()) == 0.0  # none is left in the model's own precision
    made = trace.explain(target=f"id:{worst}", top=5, norm=norm)
    assert made.target.log_probability == pytest.approx(float(log_p[worst]), rel=1e-5)
    every = trace.explain(target=f"id:{worst}", top=5, norm=norm, exhaustive=True)
    assert [value.unit for value in made.values] == [value.unit for value in every.values]
    for value in made.values:
        assert value.increase is not None and math.isfinite(value.increase) and value.increase > 0
    account = trace.attribute(trace.model.target(f"id:{worst}"), "units", "additive")
    assert math.isfinite(account.unexplained) and abs(account.unexplained) < 1e-3 * abs(float(log_p[worst]))
