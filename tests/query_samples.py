"""Traces of tiny models and the keys of their value units, for the tests of queries."""

from functools import cache

import handmade
import pytest
import zoo

import mainstem
from mainstem.analysis.keys import Key
from mainstem.explain.unit_keys import key_of
from mainstem.targets import Target
from mainstem.tracing import Trace
from mainstem.units import Unit

TARGET = Target(ids=(7,), against=(), text="id:7")
SIDES = ("value", "query", "key")
QUICK = {"llama", "gpt2"}
FAMILIES = ["llama", "qwen3", "gpt2", "gpt_neox", "gptj", "olmo2", "falcon", "cohere", "opt", "starcoder2"]
"""Gated and plain MLPs, head norms over heads and over all of them, biases, partial and interleaved rotary embedding,
parallel blocks, norms after sublayers, grouped keys and values."""


def slowly(names: list[str], quick: set[str] = QUICK) -> list:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@cache
def traced(name: str, attention: str = "sdpa", **overrides) -> Trace:
    """A trace of 23 tokens, more than the anatomy was discovered on."""
    if name in handmade.ALL:
        return mainstem.open(handmade.ALL[name]()).trace(list(range(3, 26)))
    module = zoo.build(name, attn_implementation=attention, **overrides)
    return mainstem.open(module).trace(zoo.prompt(23, 3)[0].tolist())


def key(trace: Trace, unit: str, side: str = "value", position: int = -1) -> Key:
    return key_of(trace, Unit.parse(unit), position, side, TARGET, 0)[0]
