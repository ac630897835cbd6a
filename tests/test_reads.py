"""Which reads are certified, and that the reads certificate bites on each kind of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import handmade
import pytest
import torch
import zoo
from accounts import moment_of
from tiny_models import arguments, build
from torch import nn

import mainstem
from mainstem.analysis.certificate import check_reads
from mainstem.analysis.decompose import decompose
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover
from mainstem.model.layouts import PositionAxis
from mainstem.run.moment import Moment
from mainstem.tracing import Trace

LENGTH = 9


@cache
def made(name: str, **options: Any) -> tuple[nn.Module, Anatomy, Moment]:
    model = build(name, **options)
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
        assert read.axis == PositionAxis(3, (1,))
        assert torch.equal(read.weight, block.attention.qkv.reshape(-1, handmade.WIDTH))
    check = check_reads(decompose(here))
    assert check.holds and check.worst < 1e-5
    turned = [replace(r, weight=r.weight.roll(1, 0)) if r.axis is not None else r for r in anatomy.reads]
    assert not check_reads(decompose(replace(here, anatomy=replace(anatomy, reads=tuple(turned))))).holds


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_a_batch_as_large_as_another_axis_is_told_apart(rows: int) -> None:
    """The axes of [3, batch, 4 heads, pos, 4] are told apart by what they were in the recording, not by their sizes."""
    model = mainstem.open(made("einsum_sinks")[0])
    prompts = [zoo.prompt(LENGTH, seed)[0].tolist() for seed in range(rows)]
    several = Trace(model, model.inputs(prompts), (-1,))
    for row, ids in enumerate(prompts):
        decomposition = several.decompose("sublayers", row=row)
        assert check_reads(decomposition).holds
        alone = Trace(model, model.inputs(ids), (-1,)).decompose("sublayers")
        for read, own in zip(decomposition.moment.reads, alone.moment.reads, strict=True):
            assert torch.allclose(read, own, atol=1e-5)


# --- experts ------------------------------------------------------------------------------------------------

EXPERTS = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "dbrx", "jetmoe"]


@pytest.mark.parametrize("implementation", ["default", "eager"])
@pytest.mark.parametrize("name", EXPERTS)
def test_what_the_chosen_experts_read_is_certified(name: str, implementation: str) -> None:
    """Two experts for each token: their gate and up matrices, stacked in one product or in two."""
    chosen = None if implementation == "default" else implementation
    _, anatomy, here = made(name, experts_implementation=chosen)
    sums = [write for write in anatomy.writes if write.experts is not None]
    assert [read.unit for read in anatomy.expert_reads] == [write.unit for write in sums]
    check = check_reads(decompose(here))
    assert check.holds and check.worst < 1e-5
    rows = {site: [one for one in found if len(one.position)] for site, found in here.expert_reads.items()}
    met = [sorted({e for one in found for e in one.rows.expert.tolist()}) for found in rows.values()]
    written = [sorted(e for rows in parts.rows for e in _used(rows)) for parts in here.experts.values()]
    assert met == written and all(len(experts) == 2 for experts in met)
    count = sum(len(one.position) for found in rows.values() for one in found)
    assert check.checked == len(anatomy.reads) + count + 1  # the readout is one


def _used(rows: Any) -> list[int]:
    return [int(expert) for expert, weight in zip(rows.expert, rows.weight[0], strict=True) if weight != 0]


def test_the_routers_of_experts_are_reads() -> None:
    for name in ("mixtral", "qwen2_moe", "deepseek_v3"):
        assert ("router",) in roles(made(name)[1], "mlp")


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_wrong_account_of_what_experts_read_is_noticed(name: str) -> None:
    _, anatomy, here = made(name)
    before = anatomy.blocks[-1].input_node
    moved = tuple(replace(read, node=before) for read in anatomy.expert_reads)
    check = check_reads(decompose(replace(here, anatomy=replace(anatomy, expert_reads=moved))))
    assert not check.holds and str(check.where).startswith("expert ")
    others = {
        site: [replace(one, rows=replace(one.rows, expert=(one.rows.expert + 1) % 4)) for one in found]
        for site, found in here.expert_reads.items()
    }
    assert not check_reads(decompose(replace(here, expert_reads=others))).holds


def test_experts_reads_are_those_of_the_asked_position_of_the_asked_prompt() -> None:
    """In a padded batch, at an earlier position, the same rows as in the prompt's own run."""
    model = mainstem.open(made("mixtral")[0])
    long, short = zoo.prompt(9, seed=1)[0].tolist(), zoo.prompt(6, seed=2)[0].tolist()
    alone = model.trace(short, positions=(2, -1))
    batch = Trace(model, model.inputs([long, short]), (2, -1))
    for position in (2, -1):
        assert alone.reads(position).holds
        assert batch.reads(position, row=1).holds and batch.reads(position, row=0).holds
        one, other = alone.run.moment(position, 0), batch.run.moment(position, 1)
        for found, again in zip(one.expert_reads.values(), other.expert_reads.values(), strict=True):
            assert [r.rows.expert.tolist() for r in found] == [r.rows.expert.tolist() for r in again]
