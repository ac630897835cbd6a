"""A left-padded batch gives each row what it gets alone: in the model's outputs, and in everything that is captured."""

import inspect

import pytest
import torch
import transformers
import zoo
from tiny_models import arguments, discovered
from torch import Tensor

from mainstem.analysis.certificate import certify, check_reads
from mainstem.analysis.decompose import LEVELS, decompose
from mainstem.errors import LevelRefusedError
from mainstem.run.capture import capture
from mainstem.run.moment import Moment, moment

pytestmark = pytest.mark.slow  # thorough, and not among what every edit runs

transformers.logging.set_verbosity_error()

LONG, SHORT = 9, 6
PADDING = LONG - SHORT

WITH_POSITIONS = ["gpt2", "bert", "gpt_bigcode", "xglm", "llama", "gemma2", "gpt_neox", "mixtral", "cohere"]
"""Told positions by `position_ids`; the first four count the padding where they are not told."""

BY_MASK = [
    *["bloom", "mpt", "falcon", "opt", "gemma3_text", "gptj", "qwen3_moe", "mamba", "qwen3_next", "gpt_oss"],
    *["stablelm", "deepseek_v3", "olmo2", "granite", "xlnet", "codegen", "jamba", "nemotron_h"],
]
"""Families that get what they need from the attention mask alone."""

SDPA = ["phi3", "llama", "gpt2", "gemma3_text"]

QUICK = {"gpt2", "llama", "bloom", "falcon", "gpt_oss", "xlnet", "mamba"}


def cases(names: list[str]) -> list:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


def batch() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Two prompts, the second padded on the left; the mask; each prompt alone."""
    long, short = zoo.prompt(LONG, seed=1), zoo.prompt(SHORT, seed=2)
    padded = torch.cat([torch.ones(1, PADDING, dtype=torch.long), short], dim=1)
    ids = torch.cat([long, padded])
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask, [long, short]


def same(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= 1e-5 * b.norm() + 1e-9)


def compare(name: str, positions: bool, implementation: str = "eager") -> None:
    model, anatomy = discovered(name, implementation)
    ids, mask, alone = batch()
    extra: dict[str, Tensor] = {"attention_mask": mask}
    if positions:
        assert "position_ids" in inspect.signature(model.forward).parameters
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    last = torch.full((2, 1), LONG - 1)
    together = capture(model, anatomy, ids, last, **extra, **arguments(name))
    for row, (prompt, padding) in enumerate(zip(alone, (0, PADDING), strict=True)):
        end = torch.tensor([[prompt.shape[1] - 1]])
        single = moment(anatomy, capture(model, anatomy, prompt, end, **arguments(name)), 0, 0, 0)
        padded = moment(anatomy, together, row, 0, padding)
        _same_moments(padded, single)
        _certified(padded)


def _same_moments(padded: Moment, single: Moment) -> None:
    assert padded.position == single.position
    assert padded.n_sources == single.n_sources
    assert same(padded.logits, single.logits)
    assert same(padded.stream, single.stream)
    for a, b in zip(padded.writes, single.writes, strict=True):
        assert same(a, b)
    for a, b in zip(padded.reads, single.reads, strict=True):
        assert same(a, b)
    for a, b in zip(padded.block_inputs, single.block_inputs, strict=True):
        assert same(a, b)
    for site, heads in single.attention.items():
        assert same(padded.attention[site].pattern, heads.pattern)
        assert same(padded.attention[site].result(), heads.result())


def _certified(here: Moment) -> None:
    for level in LEVELS:
        try:
            certificate = certify(decompose(here, level))
        except LevelRefusedError:
            continue
        assert certificate.holds, (level, certificate.failed)
    assert check_reads(decompose(here)).holds


@pytest.mark.parametrize("name", cases(WITH_POSITIONS))
def test_with_positions_each_row_is_what_it_is_alone(name: str) -> None:
    compare(name, positions=True)


@pytest.mark.parametrize("name", cases(BY_MASK))
def test_with_a_mask_each_row_is_what_it_is_alone(name: str) -> None:
    compare(name, positions=False)


@pytest.mark.parametrize("name", cases(SDPA))
def test_the_fused_kernel_too(name: str) -> None:
    """It may repeat key/value heads where it gets a mask, and group queries itself where it does not."""
    compare(name, positions=True, implementation="sdpa")


@pytest.mark.parametrize("name", ["plain", "in_place", "einsum_sinks", "post_norm", "shared_block"])
def test_models_that_no_library_knows_too(name: str) -> None:
    compare(name, positions=False)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_position_of_a_run_can_be_the_destination(name: str) -> None:
    model, anatomy = discovered(name)
    ids = zoo.prompt(LONG, seed=1)
    every = torch.arange(LONG)[None]
    run = capture(model, anatomy, ids, every, use_cache=False)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    for place in range(LONG):
        here = moment(anatomy, run, 0, place, 0)
        assert here.position == place
        assert torch.equal(here.logits, logits[place])
        _certified(here)
