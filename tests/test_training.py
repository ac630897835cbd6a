"""Training goes on from a checkpoint as if nothing had happened, and whatever goes wrong is said."""

import errno
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from mainstem.errors import CheckpointError, ChoiceError, DivergedError, UsageError
from mainstem.lab import checkpoints
from mainstem.lab.convnets import ConvNetConfig, convnet
from mainstem.lab.optimisers import OPTIMISERS
from mainstem.lab.recipes import Recipe
from mainstem.lab.training import Training, next_token_loss, train

STEPS, EVERY = 12, 4


class Small(nn.Module):
    """A language model with everything that a state can have: tied weights, dropout, statistics of batches."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.unembedding = nn.Linear(width, 9, bias=False)
        self.unembedding.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.embedding(input_ids)
        x = x + self.dropout(torch.tanh(self.norm(self.hidden(x).transpose(1, 2)).transpose(1, 2)))
        return SimpleNamespace(logits=self.unembedding(x))


def batches(step: int) -> torch.Tensor:
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(step))


def size(module: nn.Module) -> float:
    return sum(weight.square().sum().item() for weight in module.parameters())


def fit(module: nn.Module, recipe: Recipe, folder: Path | None = None, **options) -> Training:
    options = {"probes": {"size": size}, "every": EVERY, **options}
    return train(module, next_token_loss, options.pop("batches", batches), recipe, folder=folder, **options)


def stopping(at: int):
    """Batches that are interrupted at a step."""

    def batch(step: int) -> torch.Tensor:
        if step == at:
            raise KeyboardInterrupt
        return batches(step)

    return batch


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_interrupted_training_records_bitwise_what_a_whole_one_does(name: str, tmp_path: Path) -> None:
    recipe = Recipe(STEPS, name, 0.01, schedule="cosine", warmup=2, weight_decay=0.01)
    whole, model = fit(Small(), recipe), Small()
    at = random.Random(name).randrange(1, STEPS)
    with pytest.raises(KeyboardInterrupt):
        fit(model, recipe, tmp_path, batches=stopping(at))
    resumed = Small()
    found = fit(resumed, recipe, tmp_path)
    assert found.losses == whole.losses and found.probes == whole.probes, f"interrupted at {at}"
    again = Small()
    once_more = fit(again, recipe, tmp_path, batches=stopping(1))
    assert once_more == found
    for one, other in zip(resumed.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_loss_falls_and_probes_are_taken_on_the_way() -> None:
    def sums(module: nn.Module) -> dict[str, float]:
        assert not module.training
        quadratic = sum(weight.square().sum() for weight in module.parameters())
        quadratic.backward()  # what a probe leaves is cleared
        return {"all": float(quadratic.detach()), "none": 0.0}

    lines: list[str] = []
    probes = {"size": size, "sum": sums}
    fixed = {"batches": lambda step: batches(0), "report": lines.append}
    found = fit(Small(), Recipe(30, learning_rate=0.03), probes=probes, every=20, **fixed)
    assert [row["step"] for row in found.probes] == [0, 20, 30]
    assert dict(found.probe("sum.all")) == pytest.approx(dict(found.probe("size")), rel=1e-5)
    assert found.losses == fit(Small(), Recipe(30, learning_rate=0.03), batches=lambda step: batches(0)).losses
    assert found.losses[-1] < 0.8 * found.losses[0]
    assert len(lines) == 2 and "20 of 30" in lines[0] and "s left" in lines[0] and "left" not in lines[1]
    assert Training(**json.loads(json.dumps(found.as_dict()))) == found


def test_the_seed_decides_dropout_and_nothing_else_is_drawn() -> None:
    model = Small()
    before = torch.random.get_rng_state()
    one = fit(model, Recipe(STEPS, seed=1)).losses
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one == fit(Small(), Recipe(STEPS, seed=1)).losses != fit(Small(), Recipe(STEPS, seed=2)).losses


@pytest.mark.parametrize(
    ("recipe", "model", "says"),
    [
        (Recipe(STEPS, learning_rate=0.02), Small(), "recipe.learning_rate is 0.001 there and 0.02 here"),
        (Recipe(STEPS), Small(width=5), "shapes.hidden.weight is .6, 6. there"),
        (Recipe(STEPS), Small(seed=1), "weights at the start"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(recipe, model, says: str, tmp_path: Path) -> None:
    fit(Small(), Recipe(STEPS), tmp_path)
    with pytest.raises(CheckpointError, match=says):
        fit(model, recipe, tmp_path)


def test_other_data_are_another_training(tmp_path: Path) -> None:
    fit(Small(), Recipe(STEPS), tmp_path)
    with pytest.raises(CheckpointError, match="first batch"):
        fit(Small(), Recipe(STEPS), tmp_path, batches=lambda step: batches(step + 1))


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_disk_leaves_the_checkpoint_before(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first or the second file of the second checkpoint cannot be written whole."""
    calls, save = 0, checkpoints.save_file

    def full(tensors, path: Path) -> None:
        nonlocal calls
        calls += 1
        save(tensors, path)
        if calls == 2 + at:
            path.write_bytes(path.read_bytes()[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(CheckpointError, match="step 8 cannot be written.*No space left.*step 4 stays"):
        fit(Small(), Recipe(STEPS), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]
    monkeypatch.undo()
    assert fit(Small(), Recipe(STEPS), tmp_path).losses == fit(Small(), Recipe(STEPS)).losses
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimisers.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    fit(Small(), Recipe(STEPS), tmp_path)
    path = tmp_path / "step-000012" / name
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(CheckpointError, match="damaged.*step-000012"):
        fit(Small(), Recipe(STEPS), tmp_path)


def test_divergence_is_named_and_what_was_recorded_is_kept() -> None:
    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = next_token_loss(module, batch)
        return found * float("nan") if torch.equal(batch, batches(5)) else found

    with pytest.raises(DivergedError, match="nan.*step 6 of 12, sgd at 0.1") as raised:
        train(Small(), loss, batches, Recipe(STEPS, "sgd", 0.1), probes={"size": size}, every=EVERY)
    found = raised.value.training
    assert isinstance(found, Training) and len(found.losses) == 5 and [row["step"] for row in found.probes] == [0, 4]


def test_a_gradient_that_is_not_finite_is_divergence(tmp_path: Path) -> None:
    """In the last step, where no loss comes after it; the checkpoint before stays."""

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = next_token_loss(module, batch)
        return found + 1e30 * (1e30 * (found - found.detach())) if torch.equal(batch, batches(7)) else found

    with pytest.raises(DivergedError, match="The gradient is .*step 8 of 8"):
        train(Small(), loss, batches, Recipe(8, "sgd", 0.1), every=EVERY, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_an_update_that_overflows_is_divergence(tmp_path: Path) -> None:
    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return 1000 * next_token_loss(module, batch)

    with pytest.raises(DivergedError, match="largest magnitude in .*step 1 of 1"):
        train(Small(), loss, batches, Recipe(1, "sgd", 3e38, clip=None), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_may_be_a_named_tuple() -> None:
    class Two(NamedTuple):
        ids: torch.Tensor
        place: torch.Tensor

    def loss(module: nn.Module, batch: Two) -> torch.Tensor:
        return next_token_loss(module, batch.ids)

    made = train(Small(), loss, lambda step: Two(batches(step), torch.zeros(1)), Recipe(STEPS))
    assert made.losses == fit(Small(), Recipe(STEPS)).losses


def test_a_plain_network_is_not_a_residual_one(tmp_path: Path) -> None:
    """They have the same shapes and the same weights at the start."""

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()

    def go(residual: bool) -> None:
        config = ConvNetConfig(8, residual, widths=(1, 2, 3), channels=1, classes=2)
        train(convnet(config), loss, lambda step: torch.ones(2, 1, 8, 8), Recipe(2), folder=tmp_path)

    go(residual=False)
    with pytest.raises(CheckpointError, match="model.residual is False there and True here"):
        go(residual=True)


def test_gradients_are_clipped() -> None:
    start, other = Small(), Small()
    fit(other, Recipe(1, "sgd", 1.0, momentum=0.0, clip=0.01))
    moved = sum((a - b).square().sum() for a, b in zip(start.parameters(), other.parameters(), strict=True))
    assert float(moved.detach()) ** 0.5 == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("steps", [10, 33])
def test_one_cycle_is_that_of_torch(steps: int) -> None:
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.02, total_steps=steps)
    recipe = Recipe(steps, learning_rate=0.02, schedule="one_cycle")
    for step in range(steps):
        assert recipe.rate(step) == pytest.approx(optimiser.param_groups[0]["lr"])
        optimiser.step()
        if step + 1 < steps:
            theirs.step()


def test_the_rates_of_warmup_and_cosine() -> None:
    constant, cosine = (
        [Recipe(10, schedule=schedule, warmup=2).rate(step) for step in range(10)]
        for schedule in ("constant", "cosine")
    )
    assert constant == pytest.approx([1e-3 / 3, 2e-3 / 3, *[1e-3] * 8])
    assert cosine[:3] == constant[:3] and cosine[6] == pytest.approx(5e-4) and sorted(cosine[2:])[::-1] == cosine[2:]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        fit(Small(), Recipe(STEPS, mixed_precision=True))
    if not torch.cuda.is_available():
        with pytest.raises(ChoiceError, match="cuda.*cpu"):
            fit(Small(), Recipe(STEPS), device="cuda")
    with pytest.raises(ChoiceError, match="one_cycle"):
        Recipe(STEPS, schedule="cyclic")  # type: ignore[arg-type]
    for wrong in ({"steps": 0}, {"steps": 1, "learning_rate": 0}, {"steps": 1, "warmup": 2}, {"steps": 1, "clip": 0}):
        with pytest.raises(UsageError):
            Recipe(**wrong)
    with pytest.raises(UsageError, match="every 0"):
        fit(Small(), Recipe(STEPS), every=0)
