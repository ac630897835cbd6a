"""Which reads are certified, and that the reads certificate bites on each kind of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import handmade
import torch
import zoo
from accounts import moment_of
from torch import nn

from mainstem.analysis.certificate import check_reads
from mainstem.analysis.decompose import decompose
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover
from mainstem.run.moment import Moment

LENGTH = 9


def arguments(name: str) -> dict[str, Any]:
    return {} if name in handmade.ALL else {"use_cache": False}


@cache
def made(name: str, **options: Any) -> tuple[nn.Module, Anatomy, Moment]:
    model = handmade.ALL[name]() if name in handmade.ALL else zoo.build(name, **options)
    anatomy = discover(model, **arguments(name))
    return model, anatomy, moment_of(model, anatomy, zoo.prompt(LENGTH, seed=1), **arguments(name))


def roles(anatomy: Anatomy, place: str, layer: int = 1) -> list[tuple[str, ...]]:
    return [read.roles for read in anatomy.reads if read.unit.layer == layer and read.unit.place == place]


def test_a_shared_experts_gate_is_a_read() -> None:
    model, anatomy, here = made("qwen2_moe")
    assert sorted(roles(anatomy, "mlp")) == [("gate",), ("output_gate",), ("router",), ("up",)]
    gates = [read for read in anatomy.reads if read.roles == ("output_gate",)]
    for layer, read in enumerate(gates):
        assert torch.equal(read.weight, model.model.layers[layer].mlp.shared_expert_gate.weight)
    assert check_reads(decompose(here)).holds
    wrong = [replace(r, weight=r.weight * 1.01) if r.roles == ("output_gate",) else r for r in anatomy.reads]
    check = check_reads(decompose(replace(here, anatomy=replace(anatomy, reads=tuple(wrong)))))
    assert not check.holds and "output_gate of L0.mlp" in str(check.where)


def test_projections_whose_positions_are_on_a_later_axis_are_reads() -> None:
    """Queries, keys and values of one contraction, [3, batch, heads, pos, d_head]."""
    model, anatomy, here = made("einsum_sinks")
    assert roles(anatomy, "attn") == [("query", "key", "value")]
    for read, block in zip([r for r in anatomy.reads if r.axis is not None], model.blocks, strict=True):
        assert read.axis == 3
        assert torch.equal(read.weight, block.attention.qkv.reshape(-1, handmade.WIDTH))
    check = check_reads(decompose(here))
    assert check.holds and check.worst < 1e-5
    turned = [replace(r, weight=r.weight.roll(1, 0)) if r.axis is not None else r for r in anatomy.reads]
    assert not check_reads(decompose(replace(here, anatomy=replace(anatomy, reads=tuple(turned))))).holds
