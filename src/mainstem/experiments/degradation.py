"""Degradation: deeper plain networks train worse, and what adding a block's input to its output changes.

He et al. 2015, "Deep Residual Learning for Image Recognition": of networks of 20 and 56 layers the deeper has the
higher training error, though it could do all that the other does and leave the rest of its layers alone. It is not
overfitting, for it fails on the images it is trained with; nor do gradients vanish, for batch norm keeps them up. With
shortcuts around blocks of layers (`mainstem.lab.convnets`) the deeper network trains as well as the other, from the
same weights and with the same parameters.

Here: the same networks, narrower, on scikit-learn's digits; SGD with momentum and a one-cycle rate. Arms of one seed
start from the same weights, block for block, and see the same batches. What is compared is the mean loss of the last
epoch's batches, as they were trained on. The published training has 64,000 steps and a weight decay of 1e-4; this one
some 200 steps and 5e-3, so that weight decay has its say on the norms' gains, of which responses are made.

The rules, fixed before the runs that the documentation quotes. "Always" is in every seed.

1. Depth hurts plain networks. reproduced: the lowest loss of plain-56 is above the highest of plain-20, so that what
   seeds differ by cannot be the reason; in part: plain-56's is always above plain-20's.
2. It is not overfitting. reproduced: plain-56 always has the higher training error and the higher test error; in part:
   always the higher training error. (Overfitting: the lower training error and the higher test error.)
3. Shortcuts remove it. reproduced: residual-56's loss is always below plain-56's, and depth always costs residual
   networks at most a tenth of what it costs plain ones; in part: always below.
4. Gradients do not vanish. The norm of the first convolution's gradient over the last's, in plain-56, before the first
   step and after each epoch. reproduced: the geometric mean over these is always at least 0.1, and in the control, the
   same network with sigmoids and without batch norm, below 0.001; in part: always at least 0.01, the control below.
5. Layers respond less. The standard deviation of each convolution's output after batch norm, which is 1 before
   training, as a mean over layers. reproduced: always smaller in residual networks than in plain ones, at both depths,
   and in residual-56 than in residual-20; in part: always smaller in residual networks than in plain ones.
6. Blocks of one layer do not help. The gain of blocks is what they take off plain-56's loss. reproduced: the gain of
   blocks of one layer is always at most half that of two; in part: always at most nine tenths.
7. Blocks of three layers do (full form only). reproduced: their gain is always at least half that of two layers; in
   part: always above 0.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mainstem.experiments.degradation_claims import (
    PLAIN_20,
    PLAIN_56,
    RESIDUAL_20,
    RESIDUAL_56,
    SINGLE,
    TRIPLE,
    Run,
    claims,
    summary,
)
from mainstem.experiments.degradation_figures import figures
from mainstem.experiments.outcome import Experiment
from mainstem.experiments.settings import Settings
from mainstem.lab.checkpoints import digest
from mainstem.lab.convnets import ConvNetConfig, convnet, error_rate, gradient_norms, responses
from mainstem.lab.images import Images, digits, image_batches
from mainstem.lab.recipes import Recipe
from mainstem.lab.training import train

LEARNING_RATE, MOMENTUM = 0.1, 0.9
MEASURED, GRADIENTS = 512, 128
"""Of how many training images responses and gradients are taken."""


@dataclass(frozen=True)
class Arm:
    """One kind of network."""

    depth: int
    residual: bool
    block_layers: int = 2


ARMS = {
    PLAIN_20: Arm(20, False),
    PLAIN_56: Arm(56, False),
    RESIDUAL_20: Arm(20, True),
    RESIDUAL_56: Arm(56, True),
    SINGLE: Arm(56, True, 1),
    TRIPLE: Arm(56, True, 3),
}


@dataclass(frozen=True)
class Form:
    """How large networks are and how long they are trained.

    The published one, for CIFAR-10 and an accelerator, is `Form(164, 128, (16, 32, 64), 1e-4)`.
    """

    epochs: int
    batch: int = 64
    widths: tuple[int, int, int] = (8, 16, 32)
    weight_decay: float = 5e-3

    def __str__(self) -> str:
        widths = "-".join(map(str, self.widths))
        return f"{self.epochs}-epochs-of-{self.batch}-widths-{widths}-decay-{self.weight_decay:g}"


QUICK, FULL = Form(5), Form(10)


def run(settings: Settings, images: Images | None = None, form: Form | None = None) -> Experiment:
    """Runs the experiment.

    Args:
        settings: how; quick has 5 epochs, one seed, and no blocks of three layers.
        images: what to train on; the digits if not given.
        form: another size than the settings' own.

    Raises:
        ImagesError: scikit-learn, which has the digits, is not installed.
        UsageError: the images fill no batch.
        DivergedError: a loss became infinite.
    """
    images = images or digits()
    form = form or (QUICK if settings.quick else FULL)
    seeds = settings.seed_list(quick=1, full=3)
    names = [name for name in ARMS if name != TRIPLE or not settings.quick]
    pixels = digest((images.train_x, images.train_y, images.test_x, images.test_y))
    found = settings.each(
        names,
        seeds,
        lambda name, seed: trained(ARMS[name], seed, images, form, settings),
        label=lambda name: f"{images.name}-{pixels}-{form}-{name}",
    )
    runs = {name: [Run(**made) for made in kept] for name, kept in found.items()}
    vanishing = [_vanishing(seed, images, form) for seed in seeds]
    return Experiment(
        name="degradation",
        title="Degradation of plain networks",
        question="Do deeper networks train worse, and not once a block's input is added to its output?",
        provenance=settings.provenance(seeds),
        model={"name": f"plain and residual networks, images of {images.name}"},
        claims=claims(runs, vanishing),
        tables=[summary(runs, seeds)],
        figures=figures(runs, seeds),
        notes=[
            f"{images.source}: {len(images.train_x):,} images for training, {len(images.test_x):,} for testing.",
            f"{form.epochs} epochs of batches of {form.batch}, widths {', '.join(map(str, form.widths))}, SGD with a "
            f"one-cycle rate up to {LEARNING_RATE}, momentum {MOMENTUM}, weight decay {form.weight_decay:g}.",
            "Blocks are of two layers; by ones they are of one, by threes of three.",
            "The control of gradients is plain-56 with sigmoids and without batch norm, before training.",
            *settings.notes(),
        ],
    )


def trained(arm: Arm, seed: int, images: Images, form: Form, settings: Settings) -> dict[str, Any]:
    """Trains one network, and what is measured of it: the fields of a `Run`."""
    net = convnet(_config(arm, images, form), seed)
    batches = image_batches(images, form.batch, seed)
    steps = len(images.train_x) // form.batch
    recipe = Recipe(
        form.epochs * steps,
        "sgd",
        LEARNING_RATE,
        form.weight_decay,
        MOMENTUM,
        schedule="one_cycle",
        clip=None,
        seed=seed,
    )

    def ends(_: nn.Module) -> dict[str, float]:
        norms = gradient_norms(net, images.train_x[:GRADIENTS], images.train_y[:GRADIENTS])
        return {"first": norms[0], "last": norms[-1]}

    training = train(
        net,
        _loss,
        batches,
        recipe,
        probes={"gradient": ends},
        every=steps,
        device=settings.device,
        report=settings.report,
    )
    losses = training.losses
    return {
        "epochs": [fmean(losses[start : start + steps]) for start in range(0, len(losses), steps)],
        "training_error": error_rate(net, images.train_x, images.train_y),
        "test_error": error_rate(net, images.test_x, images.test_y),
        "responses": responses(net, images.train_x[:MEASURED]),
        "gradients": [[row["gradient.first"], row["gradient.last"]] for row in training.probes],
    }


def _config(arm: Arm, images: Images, form: Form) -> ConvNetConfig:
    return ConvNetConfig(
        arm.depth, arm.residual, arm.block_layers, form.widths, images.train_x.shape[1], images.classes
    )


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y)


def _vanishing(seed: int, images: Images, form: Form) -> float:
    """The first gradient over the last in the control."""
    config = ConvNetConfig(
        56, False, 2, form.widths, images.train_x.shape[1], images.classes, normalised=False, activation="sigmoid"
    )
    norms = gradient_norms(convnet(config, seed), images.train_x[:GRADIENTS], images.train_y[:GRADIENTS])
    return norms[0] / norms[-1]
