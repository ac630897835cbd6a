"""Degradation: claims that can fail, on numbers made by hand; networks trained small; the quick form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mainstem.errors import UsageError
from mainstem.experiments import degradation
from mainstem.experiments import degradation_claims as case
from mainstem.experiments.degradation_claims import PLAIN_20, PLAIN_56, RESIDUAL_20, RESIDUAL_56, SINGLE, TRIPLE, Run
from mainstem.experiments.degradation_figures import figures, gradients
from mainstem.experiments.settings import Settings
from mainstem.lab.images import Images
from mainstem.report import as_html, as_json, as_text

SEEDS = [0, 1, 2]

# --- the rules, by hand -------------------------------------------------------------------------------------


def run(loss: float, training: float = 0.0, test: float = 0.1, response: float = 1.0, gradient: float = 1.0) -> Run:
    return Run([2.3, loss], training, test, [response - 0.1, response + 0.1], [[gradient, 1.0], [2 * gradient, 2.0]])


def as_published(**changes: list[Run]) -> dict[str, list[Run]]:
    """Three seeds of every arm in which all claims hold; arms are replaced by their names in capitals."""
    made = {
        PLAIN_20: [run(0.10 + 0.01 * seed, 0.01, 0.03, 1.0) for seed in SEEDS],
        PLAIN_56: [run(1.00 + 0.1 * seed, 0.30, 0.35, 1.5, 0.5) for seed in SEEDS],
        RESIDUAL_20: [run(0.05, 0.0, 0.03, 0.9) for seed in SEEDS],
        RESIDUAL_56: [run(0.04 + 0.01 * seed, 0.0, 0.02, 0.7) for seed in SEEDS],
        SINGLE: [run(0.95, 0.25, 0.35, 1.2) for seed in SEEDS],
        TRIPLE: [run(0.05, 0.0, 0.02, 0.8) for seed in SEEDS],
    }
    return made | {getattr(case, name): runs for name, runs in changes.items()}


def with_loss(losses: list[float]) -> list[Run]:
    return [run(loss) for loss in losses]


VANISHING = [1e-9, 0.0, 1e-12]


def test_all_hold_where_all_is_as_published() -> None:
    found = case.claims(as_published(), VANISHING)
    assert [claim.finding for claim in found] == ["reproduced"] * 7
    quick = {name: runs for name, runs in as_published().items() if name != TRIPLE}
    assert len(case.claims(quick, VANISHING)) == 6


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.13, 0.14, 0.15], "reproduced"),
        ([0.11, 0.12, 0.13], "in part"),  # in every seed, but no more than seeds differ by
        ([0.09, 1.0, 1.0], "not reproduced"),
        ([0.05, 0.05, 0.05], "not reproduced"),
    ],
)
def test_depth_must_cost_more_than_seeds_differ_by(losses: list[float], expected: str) -> None:
    assert case.depth_claim(as_published(PLAIN_56=with_loss(losses))).finding == expected


@pytest.mark.parametrize(
    ("training", "test", "expected"),
    [(0.3, 0.35, "reproduced"), (0.3, 0.02, "in part"), (0.0, 0.35, "not reproduced"), (0.01, 0.35, "not reproduced")],
)
def test_what_overfits_is_told_apart(training: float, test: float, expected: str) -> None:
    deep = [run(1.0, training, test) for _ in SEEDS]
    assert case.fitting_claim(as_published(PLAIN_56=deep)).finding == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.04, 0.05, 0.03], "reproduced"),
        ([0.5, 0.04, 0.04], "in part"),
        ([0.04, 0.04, 1.3], "not reproduced"),
    ],
)
def test_shortcuts_must_make_depth_nearly_free(losses: list[float], expected: str) -> None:
    assert case.shortcut_claim(as_published(RESIDUAL_56=with_loss(losses))).finding == expected


def test_where_depth_costs_plain_networks_nothing_shortcuts_remove_nothing() -> None:
    runs = as_published(PLAIN_56=with_loss([0.09] * 3), RESIDUAL_56=with_loss([0.05] * 3))
    assert case.shortcut_claim(runs).finding == "in part"


@pytest.mark.parametrize(
    ("gradient", "control", "expected"),
    [
        (0.5, 1e-9, "reproduced"),
        (0.05, 1e-9, "in part"),
        (1e-4, 1e-9, "not reproduced"),
        (0.0, 1e-9, "not reproduced"),
        (0.5, 0.5, "not reproduced"),  # a measure that sees nothing vanish says nothing
    ],
)
def test_gradients_are_held_against_some_that_vanish(gradient: float, control: float, expected: str) -> None:
    deep = [run(1.0, gradient=gradient) for _ in SEEDS]
    assert case.gradient_claim(as_published(PLAIN_56=deep), [0.0, control, 0.0]).finding == expected


@pytest.mark.parametrize(
    ("arm", "response", "expected"),
    [
        ("RESIDUAL_56", 0.95, "in part"),
        ("RESIDUAL_56", 1.6, "not reproduced"),
        ("PLAIN_20", 0.8, "not reproduced"),
        ("PLAIN_56", 0.6, "not reproduced"),
    ],
)
def test_responses_must_fall_with_shortcuts_and_with_depth(arm: str, response: float, expected: str) -> None:
    changed = [run(0.1, response=response) for _ in SEEDS]
    assert case.response_claim(as_published(**{arm: changed})).finding == expected


@pytest.mark.parametrize(
    ("loss", "single", "triple"),
    [
        (0.95, "reproduced", "in part"),
        (0.4, "in part", "reproduced"),
        (0.05, "not reproduced", "reproduced"),
        (1.3, "reproduced", "not reproduced"),
    ],
)
def test_gains_of_blocks_are_compared(loss: float, single: str, triple: str) -> None:
    changed = with_loss([loss] * 3)
    runs = as_published(PLAIN_56=with_loss([1.0, 1.1, 1.2]), SINGLE=changed, TRIPLE=changed)
    assert (case.single_claim(runs).finding, case.triple_claim(runs).finding) == (single, triple)


def test_without_a_gain_of_two_layers_nothing_is_said_of_one_or_three() -> None:
    runs = as_published(RESIDUAL_56=with_loss([1.5] * 3))
    assert case.single_claim(runs).finding == "not reproduced" != case.triple_claim(runs).finding
    worse = as_published(RESIDUAL_56=with_loss([1.5] * 3), TRIPLE=with_loss([2.0] * 3))
    assert case.triple_claim(worse).finding == "not reproduced"


def test_one_seed_must_be_clearly_above_another() -> None:
    runs = as_published(PLAIN_56=with_loss([0.11]), PLAIN_20=with_loss([0.109]))
    assert case.depth_claim(runs).finding == "in part"


def test_gradients_that_are_nothing_at_all_are_said() -> None:
    dead = [replace(each, gradients=[[1.0, 0.0], [0.0, 0.0]]) for each in with_loss([1.0, 1.0, 1.0])]
    runs = as_published(PLAIN_56=dead)
    assert case.gradient_claim(runs, [0.0] * 3).finding == "not reproduced"
    assert gradients(runs, [0, 1, 2]).lines["plain-56, seed 1"] == [(0.0, 0.0), (1.0, 0.0)]


def test_a_layer_is_sorted_among_others_but_stays_in_its_own_line() -> None:
    shapes = {name: [replace(one, responses=[0.5, 2.0, 1.0]) for one in runs] for name, runs in as_published().items()}
    _, own, ordered, gradients = figures(shapes, SEEDS)
    assert own.lines[PLAIN_20] == [(1.0, 0.5), (2.0, 2.0), (3.0, 1.0)]
    assert [y for _, y in ordered.lines[PLAIN_20]] == [2.0, 1.0, 0.5]
    assert gradients.lines[f"{PLAIN_56}, seed 2"] == [(0.0, 0.5), (1.0, 0.5)]


# --- trained ------------------------------------------------------------------------------------------------


def stripes(count: int = 64, seed: int = 0) -> Images:
    """Three classes: stripes across, down, and none."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    wave = torch.tensor([1.0, -1.0]).repeat(4)
    patterns = torch.stack([wave[:, None].expand(8, 8), wave[None].expand(8, 8), torch.zeros(8, 8)])
    x = (patterns[y] + 0.3 * torch.randn(count, 8, 8, generator=generator))[:, None]
    return Images(x[:48], y[:48], x[48:], y[48:], "stripes", "made by hand")


TINY = degradation.Form(2, 16, (2, 3, 4))


def test_an_arm_depends_on_its_seed_alone() -> None:
    arm, images = degradation.Arm(8, True), stripes()
    one, same, other = (degradation.trained(arm, seed, images, TINY, Settings()) for seed in (0, 0, 1))
    assert one == same != other and json.loads(json.dumps(one)) == one
    assert len(one["epochs"]) == 2 and len(one["responses"]) == 7 and len(one["gradients"]) == 3
    assert 0 <= one["training_error"] <= 1


def test_what_is_kept_is_of_its_images_form_arm_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def made(arm: degradation.Arm, seed: int, *_: object) -> dict:
        calls.append((arm, seed))
        found = as_published()[next(name for name, one in degradation.ARMS.items() if one == arm)][seed]
        return {name: getattr(found, name) for name in Run.__dataclass_fields__}

    monkeypatch.setattr(degradation, "trained", made)
    for again in range(2):
        found = degradation.run(Settings(folder=tmp_path), stripes(), TINY)
        assert len(calls) == 18 and [claim.finding for claim in found.claims] == ["reproduced"] * 7, again
    assert found.notes[-1].startswith("18 of 18 results were kept")
    degradation.run(Settings(folder=tmp_path), stripes(), replace(TINY, epochs=3))
    assert len(calls) == 36
    degradation.run(Settings(folder=tmp_path), stripes(seed=1), TINY)  # other pixels under the same name
    assert len(calls) == 54
    for shown in (as_text(found), as_html(found), as_json(found)):
        assert "residual-56 by threes" in shown


def test_a_batch_that_the_images_do_not_fill_is_refused() -> None:
    with pytest.raises(UsageError, match="Batches of 64"):
        degradation.run(Settings(quick=True), stripes())


@pytest.mark.slow
def test_degradation_shows_in_the_quick_form() -> None:
    found = degradation.run(Settings(quick=True))
    depth, fitting, shortcut, gradient, response, single = found.claims
    assert depth.finding == fitting.finding == shortcut.finding == "reproduced"
    assert min(gradient.values["plain-56"]) > 100 * max(gradient.values["control"])
    assert all(a > b for a, b in zip(response.values[PLAIN_56], response.values[RESIDUAL_56], strict=True))
    assert single.finding in ("reproduced", "in part", "not reproduced")
