"""A learned subspace: where it is known it is found, and where the variable is not the verdict is negative."""

import random
from functools import cache

import handmade
import pytest
import torch

import mainstem
from mainstem.causal import interchange
from mainstem.causal.edits import Edit
from mainstem.causal.subspaces import Subspace, lower_bound
from mainstem.errors import LevelRefusedError, PairError, PositionError, UsageError
from mainstem.lab.pairs import Text
from mainstem.lab.planted import CASE, D_MODEL, LETTERS, PREDICTED_CASE, PlantedModel, planted_pairs, token
from mainstem.points import Point
from mainstem.session import Model


@cache
def planted() -> Model:
    """The planted circuit: the last token's case is one direction before block 1, the prediction's one after it."""
    return mainstem.open(PlantedModel())


def ids_of(prompt: Text) -> list[int]:
    """A prompt of token ids."""
    return [int(one) for one in prompt]


@cache
def cases(count: int = 160) -> list[tuple[list[int], list[int], int]]:
    """Bases with the case of another prompt's last token, which is the other case for half of them."""
    rng, found = random.Random(0), []
    for base, other in zip(planted_pairs(count, 1), planted_pairs(count, 2), strict=True):
        ids, source = ids_of(base.clean), ids_of(rng.choice([other.clean, other.corrupted]))
        found.append((ids, source, token((int(base.answers[0]) - 1) % LETTERS, source[-1] > LETTERS)))
    return found


@cache
def learned(at: str, size: int = 1, position: int = -1) -> Subspace:
    """The subspace for the case at one point."""
    return planted().learn_subspace(at, cases(), size, positions=position, steps=120)


def named(made: Subspace) -> dict[str, float]:
    """The largest accuracy of each control."""
    return {control.name: control.max for control in made.controls}


@pytest.mark.parametrize(("at", "known"), [("L1.resid_pre", CASE), ("embed", CASE), ("L1.mlp", PREDICTED_CASE)])
def test_a_planted_direction_is_found(at: str, known: slice) -> None:
    made = learned(at)
    assert made.accuracy > 0.95 and made.verdict == "found"
    assert made.overlap(torch.eye(D_MODEL)[known]) > 0.9 and 1 < made.active < D_MODEL
    others = named(made)
    assert max(others["random"], others["dormant"], others["unchanged"]) < 0.7
    assert (made.trained, made.held_out) == (112, 48) and made.losses[-1] < 0.2 * made.losses[0]
    assert torch.allclose(made.directions @ made.directions.T, torch.eye(1), atol=1e-5)


@pytest.mark.parametrize(("at", "position"), [("L0.attn", -1), ("L1.attn", -1), ("L1.resid_pre", 3)])
def test_where_the_case_is_not_nothing_is_found(at: str, position: int) -> None:
    made = learned(at, 1, position)
    assert made.verdict == "not found" and made.accuracy < 0.7


@pytest.mark.slow
def test_an_illusion_needs_dormant_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, way_in = learned("L1.attn"), torch.eye(D_MODEL)[PREDICTED_CASE]
    monkeypatch.setattr(interchange, "ACTIVE", 2.0)  # as if every direction varied
    made = planted().learn_subspace("L1.attn", cases(), steps=120)
    assert made.active > D_MODEL and made.accuracy > named(made)["unchanged"]  # by a way that the model does not use
    assert made.overlap(way_in) > 0.05 and honest.overlap(way_in) < 1e-6


def test_its_directions_are_those_of_an_edit() -> None:
    model, made = planted(), learned("L1.resid_pre")
    right = 0
    for base, source, expected in cases()[:40]:
        with model.edited(Edit.replace_in(made.at, made.directions, source, made.positions)):
            right += int(model.trace(base).logits().argmax()) == expected
    assert right >= 38


def test_the_model_is_left_alone_and_seeds_repeat() -> None:
    model = planted()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.module.parameters()]
    state = torch.random.get_rng_state()
    one, again = (model.learn_subspace("L1.resid_pre", cases()[:20], steps=3) for _ in range(2))
    assert torch.equal(one.directions, again.directions) and one.losses == again.losses
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.module.state_dict().items())
    assert flags == [parameter.requires_grad for parameter in model.module.parameters()] and all(flags)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.module.modules())


def test_wilsons_bound() -> None:
    assert lower_bound(1.0, 48) == pytest.approx(0.926, abs=1e-3)  # 48 / (48 + 1.96 ^ 2)
    assert lower_bound(0.5, 100) == pytest.approx(0.404, abs=1e-3)


def test_a_head_and_a_model_that_changes_in_place_will_do() -> None:
    model = mainstem.open(handmade.ALL["in_place"]())
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200, (24, 5), generator=draw).tolist()
    made = model.learn_subspace("L1H2", list(zip(ids[:12], ids[12:], range(12), strict=True)), 3, steps=2)
    assert made.directions.shape == (3, 16) and made.verdict == "not found"


@pytest.mark.parametrize(
    ("at", "size", "options", "error", "message"),
    [
        ("L1.resid_pre", 64, {}, UsageError, "from 1 to 63"),
        ("L1.resid_pre", 0, {}, UsageError, "from 1 to 63"),
        ("L1.resid_pre", 1, {"steps": 0}, UsageError, "1 or more steps"),
        ("L1.resid_pre", 1, {"held_out": 0.001}, UsageError, "cannot be split"),
        ("L1.resid_pre", 1, {"positions": 9}, PositionError, "outside the prompt"),
        ("L1H2.query", 1, {}, LevelRefusedError, "not one vector"),
    ],
)
def test_what_cannot_be_learned_is_refused(at: str, size: int, options: dict, error, message: str) -> None:
    with pytest.raises(error, match=message):
        planted().learn_subspace(at, cases()[:20], size, **options)


def test_counterfactuals_that_do_not_fit_are_refused() -> None:
    base, source, expected = cases()[0]
    with pytest.raises(PairError, match="7, 8 tokens"):
        planted().learn_subspace("L1.resid_pre", [(base, source[1:], expected)] * 4)
    with pytest.raises(UsageError, match="Give some"):
        planted().learn_subspace("L1.resid_pre", [])


def test_points_are_watched_together_and_after_an_interchange() -> None:
    model = planted()
    ids = torch.tensor([ids_of(pair.clean) for pair in planted_pairs(6, 1)])
    last = ids.shape[1] - 1
    early, late, neuron = (
        interchange.Interchange(model.module, model.anatomy, Point.parse(at), [last], last)
        for at in ("L1.resid_pre", "L2.resid_pre", "L1N3")
    )
    own, after, activation = early.values_beside(ids, [early, late, neuron])
    assert torch.equal(after, late.values(ids)) and activation.shape == (6, 1, 1)
    same, plain = early.values_after(ids, own, None, [late, neuron])
    assert torch.allclose(same, after) and torch.allclose(plain, activation)
    (put,) = early.values_after(ids, own.roll(1, 0), None, [early])
    assert torch.allclose(put, own.roll(1, 0))
    (part,) = early.values_after(ids, own.roll(1, 0), torch.eye(D_MODEL)[:3], [early])
    assert torch.allclose(part[..., :3], own.roll(1, 0)[..., :3]) and torch.allclose(part[..., 3:], own[..., 3:])


def test_rows_that_a_model_mixes_are_run_one_by_one() -> None:
    model = mainstem.open(handmade.Mixing().double())
    draw = torch.Generator().manual_seed(0)
    ids, sources = (torch.randint(5, 60, (4, 6), generator=draw) for _ in range(2))
    here = interchange.Interchange(model.module, model.anatomy, Point.parse("L2.resid_pre"), [2], 5)
    together, theirs = here.values(ids), here.values(sources)
    assert here.mixes and torch.equal(together, torch.cat([here.values(row[None]) for row in ids]))
    made = here.logits(ids, theirs, None)
    assert torch.equal(made, torch.cat([here.logits(a[None], b[None], None) for a, b in zip(ids, theirs, strict=True)]))
    plain = interchange.Interchange(planted().module, planted().anatomy, Point.parse("L1.resid_pre"), [2], 5)
    assert plain.values(ids % 20).shape[0] == 4 and plain.mixes is False
