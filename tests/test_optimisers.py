"""Every optimiser lowers a loss, and what a rotation of the problem does to each is what theory says."""

import builtins

import pytest
import torch
from torch import nn

from mainstem.analysis.rotations import random_rotation
from mainstem.errors import ChoiceError, UsageError
from mainstem.lab.optimisers import OPTIMISERS, optimisers
from mainstem.lab.ortho_adam import OrthoAdam
from mainstem.lab.recipes import Recipe

D_OUT, D_IN = 6, 5
GENERATOR = torch.Generator().manual_seed(3)
START, GOAL = torch.randn(2, D_OUT, D_IN, generator=GENERATOR, dtype=torch.float64)
CURVATURE = 1 + torch.rand(D_OUT, D_IN, generator=GENERATOR, dtype=torch.float64)
LEFT, RIGHT = random_rotation(D_OUT, 1), random_rotation(D_IN, 2)


class Table(nn.Module):
    """One of each kind of parameter: an embedding, a matrix, a vector, a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, D_IN)
        self.matrix = nn.Linear(D_IN, D_OUT)
        self.kernel = nn.Conv1d(2, 3, 3)


def quadratic(module: nn.Module) -> torch.Tensor:
    return torch.stack([(weight - 0.5).square().mean() for weight in module.parameters()]).sum()


def walk(optimiser, weight: torch.Tensor, loss, steps: int = 5) -> torch.Tensor:
    for _ in range(steps):
        optimiser.zero_grad()
        loss(weight).backward()
        optimiser.step()
    return weight.detach()


def plain(weight: torch.Tensor) -> torch.Tensor:
    return (CURVATURE * (weight - GOAL).square()).sum()


def rotated(weight: torch.Tensor) -> torch.Tensor:
    """The same problem, seen in a rotated basis."""
    return plain(LEFT.T @ weight @ RIGHT.T)


def rotation(size: int, seed: int) -> torch.Tensor:
    return LEFT if size == D_OUT else RIGHT


def identity(size: int, seed: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_each_lowers_a_quadratic(name: str) -> None:
    torch.manual_seed(0)
    module = Table()
    before = [quadratic(module).item(), *((weight - 0.5).square().sum().item() for weight in module.parameters())]
    made = optimisers(module, Recipe(60, name, 0.02))
    for _ in range(60):
        quadratic(module).backward()
        for optimiser in made:
            optimiser.step()
        module.zero_grad()
    after = [quadratic(module).item(), *((weight - 0.5).square().sum().item() for weight in module.parameters())]
    assert all(late < early for early, late in zip(before, after, strict=True))
    assert after[0] < 0.7 * before[0]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_a_rotation_it_is_adam(decay: float) -> None:
    ours, theirs = START.clone().requires_grad_(), START.clone().requires_grad_()
    common = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay}
    walk(OrthoAdam([ours], **common, rotation=identity), ours, plain, 20)
    walk(torch.optim.AdamW([theirs], **common), theirs, plain, 20)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_sgd_commutes_with_a_rotation_and_adam_does_not() -> None:
    for make, commutes in ((torch.optim.SGD, True), (torch.optim.Adam, False)):
        one, other = START.clone().requires_grad_(), (LEFT @ START @ RIGHT).requires_grad_()
        walk(make([one], lr=0.05), one, plain)
        walk(make([other], lr=0.05), other, rotated)
        assert torch.allclose(LEFT @ one @ RIGHT, other, atol=1e-9) is commutes


def test_in_the_matching_basis_it_is_adam_on_the_rotated_problem() -> None:
    one, other = START.clone().requires_grad_(), (LEFT @ START @ RIGHT).requires_grad_()
    walk(OrthoAdam([one], lr=0.05, rotation=rotation), one, plain)
    walk(torch.optim.Adam([other], lr=0.05, betas=(0.9, 0.99)), other, rotated)
    torch.testing.assert_close(LEFT @ one.detach() @ RIGHT, other.detach(), rtol=0, atol=1e-7)


def test_which_sides_are_rotated() -> None:
    weights = [torch.zeros(30, 4), torch.zeros(4), torch.zeros(3, 2, 2), torch.zeros(())]
    optimiser = OrthoAdam([nn.Parameter(weight) for weight in weights], largest=20)
    shapes = [
        [None if state[side] is None else tuple(state[side].shape) for side in ("left", "right")]
        for state in optimiser.state.values()
    ]
    assert shapes == [[None, (4, 4)], [(4, 4), None], [(3, 3), (4, 4)], [None, None]]


def test_rotations_are_of_the_seed_and_differ_between_tensors() -> None:
    def lefts(seed: int) -> list[torch.Tensor]:
        made = OrthoAdam([nn.Parameter(torch.zeros(4, 4)) for _ in range(2)], seed=seed)
        return [state[side] for state in made.state.values() for side in ("left", "right")]

    one = lefts(5)
    assert all(torch.equal(a, b) for a, b in zip(one, lefts(5), strict=True))
    everything = [*one, *lefts(6)]
    assert not any(torch.allclose(a, b) for i, a in enumerate(everything) for b in everything[:i])


def test_muon_moves_only_the_maps_between_hidden_states() -> None:
    muon, adamw = optimisers(Table(), Recipe(1, "muon"))
    assert [tuple(weight.shape) for weight in muon.param_groups[0]["params"]] == [(D_OUT, D_IN)]
    assert len(adamw.param_groups[0]["params"]) == 4


def test_an_unknown_name_is_refused_with_the_names() -> None:
    with pytest.raises(ChoiceError, match="ortho_adam"):
        optimisers(Table(), Recipe(1, "orthoadam"))


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def absent(name: str, *rest, **named):
        if name == "pytorch_optimizer":
            raise ImportError(name)
        return imported(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UsageError, match=r"mainstem\[lab\]"):
        optimisers(Table(), Recipe(1, "soap"))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UsageError, match="torch"):
        optimisers(Table(), Recipe(1, "muon"))
