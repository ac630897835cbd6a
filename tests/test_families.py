"""Every causal-LM family of the installed Transformers: exact or refused with a reason, never wrong in silence."""

from collections import Counter
from typing import Any

import pytest
import transformers
import zoo
from accounts import Account, account
from zoo_sizes import UNBUILDABLE

from mainstem.errors import AnatomyError

transformers.logging.set_verbosity_error()

QUICK = [
    *["llama", "gpt2", "gemma2", "falcon", "mixtral", "gpt_oss", "bloom", "bert", "mamba"],
    *["qwen3_next", "deepseek_v3", "xlnet", "big_bird", "olmo2"],
]
"""One of each kind of structure: the tests that `make quick` runs."""

REFUSED = {
    "deepseek_v4": "parallel residual streams",
    "gemma3n_text": "parallel residual streams",
    "hy_v4": "parallel residual streams",
    "inkling2_loop_text": "parallel residual streams",
    "inkling2_text": "parallel residual streams",
    "prophetnet": "parallel residual streams",
    "qwen4_exp": "parallel residual streams",
    "qwen4_exp_text": "parallel residual streams",
    "reformer": "2 parallel residual streams",
    "cpmant": "43 positions for 11 tokens",
}
"""Families without a single residual stream that can be seen, and what is said of them."""

WHOLE_ATTENTION = {
    "blt": "sources for",
    "diffllama": "2 products of a pattern with values",
    "jetmoe": "more than matrices",
    "zamba": "more than matrices",
    "zamba2": "more than matrices",
}
"""Families whose attention is not split into heads, and why."""

LEAST = {
    "sublayers": 140,
    "heads": 120,
    "subvalues": 110,
    "attention_neurons": 110,
    "neurons": 120,
}
"""How many families must be exact at each level."""


def _exact(family: str, **overrides: Any) -> Account | None:
    """The account of a model whose sublayers are exact; None for one that has to be refused, and is."""
    try:
        model = zoo.build(family, **overrides)
    except zoo.NotBuilt as error:
        pytest.skip(str(error))
    if family in REFUSED:
        with pytest.raises(AnatomyError, match=REFUSED[family]):
            account(model, use_cache=False)
        return None
    found = account(model, use_cache=False)
    assert not found.failures
    assert "sublayers" in found.exact
    return found


def _check(family: str) -> None:
    found = _exact(family)
    if found is None:
        return
    attends = any(write.unit.place == "attn" for write in found.anatomy.writes)
    if family in WHOLE_ATTENTION:
        assert WHOLE_ATTENTION[family] in found.refused["heads"]
    elif attends:
        assert {"heads", "subvalues", "attention_neurons"} <= found.exact
    if any(write.neurons or write.experts for write in found.anatomy.writes):
        assert "neurons" in found.exact


@pytest.mark.parametrize("family", QUICK)
def test_a_family_is_exact_or_refused(family: str) -> None:
    _check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in zoo.families() if f not in QUICK and f not in UNBUILDABLE])
def test_every_other_family_is_exact_or_refused(family: str) -> None:
    _check(family)


@pytest.mark.slow
def test_enough_families_are_exact_at_every_level() -> None:
    """In one process, so that the totals are of all families however the tests are spread over workers."""
    totals: Counter[str] = Counter()
    for family in zoo.families():
        try:
            model = zoo.build(family)
            found = account(model, use_cache=False)
        except (zoo.NotBuilt, AnatomyError):
            continue
        assert not found.failures, family
        totals.update(found.exact)
    short = {level: totals[level] for level, least in LEAST.items() if totals[level] < least}
    assert not short


VARIANTS = {name: (family, overrides) for name, family, overrides in zoo.variants()}
QUICK_VARIANTS = [
    *["falcon-blocks-1", "gemma4_text-blocks-0", "doge-blocks-0", "jetmoe-blocks-0", "llama-heads-1"],
    *["bert-bfloat16", "gemma2-bfloat16", "mamba-bfloat16", "llama-float64", "phi3-sdpa"],
]


def _check_variant(name: str) -> None:
    family, overrides = VARIANTS[name]
    _exact(family, **overrides)


@pytest.mark.parametrize("name", QUICK_VARIANTS)
def test_a_configuration_away_from_the_defaults_is_exact(name: str) -> None:
    _check_variant(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in QUICK_VARIANTS])
def test_every_other_configuration_is_exact(name: str) -> None:
    _check_variant(name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_longer_prompt_than_the_recorded_one_is_exact(family: str) -> None:
    found = account(zoo.build(family), length=40, use_cache=False)
    assert not found.failures


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])
def test_what_a_loop_over_experts_does_on_one_prompt_does_not_matter_on_another(family: str) -> None:
    """How many calls a loop over the chosen experts makes depends on the prompt."""
    overrides = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 1, "moe_intermediate_size": 40}
    chosen = overrides if family == "gemma4_text" else {}
    model = zoo.build(family, experts_implementation="eager", **chosen)
    for length in (2, 3, 25):
        assert not account(model, length=length, use_cache=False).failures
