"""Path patching: the algebra gives what a run with frozen writes gives, and paths of a linear circuit add up."""

from functools import cache

import handmade
import pytest
import torch
from torch import Tensor
from zoo import build

import mainstem
from mainstem.causal.changes import Change, Pass, set_by_position
from mainstem.causal.edited_rows import EditedRows, Row
from mainstem.causal.edits import Edit
from mainstem.causal.head_changes import HeadChange, head_values
from mainstem.causal.path_patching import PathEffects, PathPatching
from mainstem.causal.pieces import Attending, Entries, PieceMap
from mainstem.errors import LevelRefusedError, PairError, UnitError, UsageError
from mainstem.intervene.following_paths import default_senders
from mainstem.lab.planted import EDGES, PlantedModel, planted_pairs
from mainstem.points import Point
from mainstem.run.inputs import base_arguments
from mainstem.session import Model
from mainstem.units import Unit

FAMILIES = ("llama", "gpt2", "olmo2", "granite", "mixtral")
HANDMADE = ("post_norm", "mixed_back")
SENDERS = ("embed", "L0H1", "L0.mlp", "L1H2")
POSITIONS = 6
BOUND = 2e-6
"""Norms of Transformers compute in float32 in float64 models too."""


@cache
def opened(name: str) -> Model:
    """A tiny model in float64 with fused attention where it has that."""
    if name in HANDMADE:
        return mainstem.open(handmade.ALL[name]().double())
    return mainstem.open(build(name, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"))


def prompts() -> tuple[Tensor, Tensor]:
    """Two prompts of equal length."""
    draw = torch.Generator().manual_seed(3)
    first, second = torch.randint(5, 90, (2, POSITIONS), generator=draw)
    return first, second


def runs(model: Model, ids: Tensor) -> EditedRows:
    """Runs of one prompt."""
    return EditedRows(model.module, model.anatomy, ids, POSITIONS - 1, model.inputs, **base_arguments(model.module))


def metric(logits: Tensor) -> Tensor:
    """A logit difference."""
    return logits[:, 3].double() - logits[:, 7].double()


def receivers(model: Model) -> list[tuple[str, ...]]:
    """Of every role that the model lets one see."""
    fused = all(write.attention.fused for write in model.anatomy.writes if write.attention is not None)
    heads = [("L2H1.query",), ("L2H0.key",)] if fused else []
    return [*heads, ("L2H3.value",), ("L1.mlp.input",), ("L1.mlp.input", "L2H0.value")]


def frozen(model: Model, sender: str, ids: Tensor, other: Tensor) -> list[Edit]:
    """The sender from the other run, and every other sublayer as it is in its own."""
    own = Unit.parse(sender).sublayer
    rest = [unit for unit in model.anatomy.sublayers() if unit != own]
    return [Edit.patch(sender, other.tolist()), *(Edit.patch(str(unit), ids.tolist()) for unit in rest)]


def by_freezing(model: Model, sender: str, asked: list[tuple[str, ...]], ids: Tensor, other: Tensor) -> list[float]:
    """The effects by the definition: one run with frozen writes, then receivers read what they read there."""
    pieces = [[piece for at in receiver for piece in PieceMap(model.anatomy).of(Point.parse(at))] for receiver in asked]
    every = [piece for own in pieces for piece in own]
    heads = {id(piece): (piece, []) for piece in every if isinstance(piece, Attending)}
    sites = [piece.site for piece in every if isinstance(piece, Entries)]
    with model.edited(*frozen(model, sender, ids, other)):
        there = runs(model, ids)
        found = there.values(sites)

        def watch(now: Pass) -> list:
            return [tap for p, kept in heads.values() for tap in head_values(p.core, {(p.head, p.what): kept}, now)]

        there.logits([Row()], watch)

    def change(piece) -> Change | HeadChange:
        if isinstance(piece, Attending):
            return HeadChange(piece.core, piece.head, piece.what, set_by_position(heads[id(piece)][1][0]))
        return Change(piece.site, set_by_position(found[piece.site]))

    rows = runs(model, ids)
    made = rows.logits([Row(changes=[change(piece) for piece in own]) for own in pieces])
    return (metric(made) - metric(rows.clean[None])).tolist()


@pytest.mark.parametrize("name", [*FAMILIES, *HANDMADE])
def test_it_is_what_a_run_with_frozen_writes_gives(name: str) -> None:
    model, (ids, other) = opened(name), prompts()
    asked = receivers(model)
    made = PathPatching(runs(model, ids), other).effects([Unit.parse(s) for s in SENDERS], asked, metric)
    largest = 0.0
    for i, sender in enumerate(SENDERS):
        expected = torch.tensor(by_freezing(model, sender, asked, ids, other), dtype=torch.float64)
        largest = max(largest, float(expected.abs().max()))
        assert torch.allclose(made.effects[i], expected, rtol=0, atol=BOUND), sender
    assert largest > 1e-2


def test_a_receiver_before_its_sender_has_exactly_no_effect() -> None:
    model, (ids, other) = opened("llama"), prompts()
    made = PathPatching(runs(model, ids), other).effects(
        [Unit.parse("L1.mlp")], [("L1H0.query", "L0.mlp.input")], metric
    )
    assert float(made.effects[0, 0]) == 0.0 and float(made.totals[0]) != 0.0


@pytest.mark.parametrize("sender", ["embed", "L0H1", "L0H2", "L0.attn", "L1H3", "L1.attn"])
def test_paths_of_a_linear_circuit_add_up_to_the_whole(sender: str) -> None:
    model, (ids, other) = linear(), prompts()
    ids, other = ids % 25, other % 25
    later = [f"L{layer}H{head}.value" for layer in range(3) for head in range(4)]
    heads = [f"L{layer}H{head}" for layer in range(3) for head in range(4)]
    with model.edited(*[Edit.freeze(f"{head}.pattern", ids.tolist()) for head in heads]):
        made = PathPatching(runs(model, ids), other).effects(
            [Unit.parse(sender)], [*[(at,) for at in later], ("logits",)], metric
        )
    assert abs(float(made.totals[0])) > 1e-3 and float((made.effects[0] != 0).sum()) > 4
    assert float(made.effects.sum()) == pytest.approx(float(made.totals[0]), abs=1e-9)


@cache
def linear() -> Model:
    """A model of attention alone, without norms."""
    module = PlantedModel().double()
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        for weight in (module.tokens.weight, module.positions.weight, module.unembedding.weight):
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64))
        for block in module.blocks:
            block.mlp.output.weight.zero_()
            for projection in (*block.attention.projections(), block.attention.output):
                projection.weight.copy_(0.2 * torch.randn(projection.weight.shape, generator=draw, dtype=torch.float64))
    return mainstem.open(module)


def test_the_planted_edges_are_the_paths_that_matter() -> None:
    model = mainstem.open(PlantedModel())
    pair = planted_pairs(1)[0]
    senders = ["embed", *(f"L{layer}H{head}" for layer in (0, 1) for head in range(4)), "L0.mlp", "L1.mlp"]
    asked = [f"L{layer}H{head}.{role}" for layer in (0, 1) for head in range(4) for role in ("query", "key", "value")]
    asked += ["L0.mlp.input", "L1.mlp.input", "L2.mlp.input", "logits"]
    made = model.patch_paths(
        [int(one) for one in pair.clean],
        [int(one) for one in pair.corrupted],
        senders,
        asked,
        answers=[f"id:{token}" for token in pair.answers],
        wrong_answers=[f"id:{token}" for token in pair.wrong_answers],
    )
    found = {(sender, receiver) for sender, receiver, effect in made.top(7) if abs(effect) > 1}
    planted = {(e.writer, "logits" if e.reader == "logits" else f"{e.reader}.{e.role}") for e in EDGES}
    assert found == planted
    assert max(abs(effect) for _, _, effect in made.top(1000)[7:]) < 1e-4
    assert made.clean > 0 > made.other and made.metric == "logit-difference"


def test_by_default_heads_send_and_sublayers_without_heads() -> None:
    senders = [str(unit) for unit in default_senders(opened("llama").anatomy)]
    assert senders[:6] == ["embed", "L0H0", "L0H1", "L0H2", "L0H3", "L0.mlp"] and len(senders) == 1 + 3 * 5
    assert [str(unit) for unit in default_senders(linear().anatomy)][:3] == ["embed", "embed.pos", "L0H0"]


def test_only_chosen_positions_of_the_sender_change() -> None:
    model, (ids, other) = opened("llama"), prompts()
    patching = PathPatching(runs(model, ids), other)
    ask = [Unit.parse("L0H1")], [("L2H3.value",)], metric
    every, none, last = (patching.effects(*ask, positions).effects for positions in (range(POSITIONS), (), (5,)))
    assert torch.allclose(every, patching.effects(*ask).effects) and not float(none.abs().sum())
    assert float(last) not in (0.0, float(every))


@pytest.mark.parametrize(
    ("sender", "receiver", "error", "message"),
    [
        ("L0H1@2", "logits", UnitError, "no sender"),
        ("L9H0", "logits", UnitError, "no unit L9H0"),
        ("L0H1", "L2H1", UnitError, "receives nothing"),
        ("L0H1", "L9H1.query", UnitError, "no unit L9H1"),
    ],
)
def test_what_is_no_path_is_refused(sender: str, receiver: str, error: type[Exception], message: str) -> None:
    first, second = (ids.tolist() for ids in prompts())
    with pytest.raises(error, match=message):
        opened("llama").patch_paths(first, second, [sender], [receiver], "id:3", "id:7")


def test_requests_that_cannot_be_are_refused() -> None:
    first, second = (ids.tolist() for ids in prompts())
    model = opened("llama")
    with pytest.raises(UsageError, match="a receiver of their own"):
        model.patch_paths(first, second, ["L0H1"], [("logits", "L1.mlp.input")], "id:3", "id:7")
    with pytest.raises(UsageError, match="a sender and a receiver"):
        model.patch_paths(first, second, ["L0H1"], [], "id:3", "id:7")
    with pytest.raises(PairError, match="6 tokens and the corrupted one 5"):
        model.patch_paths(first, second[1:], ["L0H1"], ["logits"], "id:3", "id:7")
    with pytest.raises(LevelRefusedError, match="computes the pattern itself"):
        opened("post_norm").patch_paths(first, second, ["L0H1"], ["L2H1.query"], "id:3", "id:7")


@pytest.mark.slow
def test_the_name_is_moved_by_one_head(demo_model: Model) -> None:
    made: PathEffects = demo_model.patch_paths(
        "When Mary and John went to the store, John gave a drink to",
        "When Mary and John went to the store, Mary gave a drink to",
        ["L23H3", "L23H1", "L20H0", "L12H4"],
        ["logits"],
        answers=" Mary",
        wrong_answers=" John",
    )
    assert made.clean > 1 and made.other < -1
    assert made.top(1)[0][0] == "L23H3" and float(made.effects[0, 0]) < -0.25 * (made.clean - made.other)
    assert float(made.effects[1:].abs().max()) < 0.2 * abs(float(made.effects[0, 0]))
