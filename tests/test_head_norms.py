"""Norms of queries and keys: what the anatomy says they are is what attention receives, before rotary embedding."""

import pytest
import torch
import zoo
from torch import Tensor, nn

from mainstem.model.anatomy import Anatomy, Read
from mainstem.model.discovery import discover
from mainstem.run.capture import capture

MODULES = {"query": "q_norm", "key": "k_norm"}
FAMILIES = ["qwen3", "olmo2", "gemma3_text", "apertus", "cohere"]
LENGTH = 9


def built(family: str) -> nn.Module:
    """Cohere's models have a gain for each head and dimension, if they are asked for norms of queries and keys."""
    return zoo.build(family, **({"use_qk_norm": True} if family == "cohere" else {}))


def received(model: nn.Module, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """[pos, heads, d] (or [pos, all]) that each block's norms of queries and keys returned, in a plain run."""
    seen: dict[tuple[int, str], Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        for role, ending in MODULES.items():
            if name.endswith(f"self_attn.{ending}"):
                key = (int(name.split(".layers.")[1].split(".")[0]), role)

                def hook(_, __, output, key=key):
                    result = output[0]
                    positions_first = result.shape[0] == LENGTH
                    seen[key] = (result if positions_first else result.transpose(0, 1)).double()

                handles.append(module.register_forward_hook(hook))
    zoo.logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def outputs(model: nn.Module, anatomy: Anatomy, ids: Tensor) -> list[tuple[Read, Tensor]]:
    places = torch.arange(LENGTH)[None]
    made = capture(model, anatomy, ids, places, use_cache=False)
    return [(read, made.reads[i][0].double()) for i, read in enumerate(anatomy.reads)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norm_of_a_reads_output_is_what_attention_receives_before_rotary(family: str) -> None:
    model, ids = built(family), zoo.prompt(LENGTH, seed=1)
    anatomy, expected = discover(model, use_cache=False), received(model, ids)
    checked = 0
    for read, output in outputs(model, anatomy, ids):
        if read.unit.place != "attn" or read.roles == ("value",):
            assert read.head_norm is None
            continue
        norm, wanted = read.head_norm, expected[(read.unit.layer or 0, read.roles[0])]
        assert norm is not None and norm.gain is not None
        assert norm.gain.shape == (
            (4 if read.roles == ("query",) else 2, 16) if family == "cohere" else wanted.shape[-1:]
        )
        found = norm(output.reshape(wanted.shape))
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
        checked += 1
    assert checked == 2 * len(anatomy.blocks)


def test_a_norm_without_its_gain_would_be_noticed() -> None:
    """The gains of the zoo's models are away from one."""
    model, ids = built("qwen3"), zoo.prompt(LENGTH, seed=1)
    (read, output), expected = outputs(model, discover(model, use_cache=False), ids)[0], received(model, ids)
    bare = type(read.head_norm)(False, None, None, read.head_norm.eps)  # type: ignore[union-attr]
    wanted = expected[(0, "query")]
    assert (bare(output.reshape(wanted.shape)) - wanted).norm() > 0.05 * wanted.norm()
