"""Optimisers by name: torch's own, SOAP from `pytorch_optimizer`, and Adam in a rotated basis.

    adam, adamw, sgd, rmsprop   torch.optim
    muon         torch.optim.Muon on matrices, and AdamW on everything else: embeddings, the unembedding, vectors,
                 convolutions (Jordan et al. 2024 say so, because these are not maps between hidden states). Its rate is
                 scaled to match AdamW's step (Liu et al. 2025, "Muon is Scalable for LLM Training"), so that both can
                 share one.
    soap         Adam in the eigenbases of Shampoo's preconditioner (Vyas et al. 2024). Plain Shampoo is left out: the
                 library's version takes the preconditioned step for the momentum of the raw gradient.
    ortho_adam   `mainstem.lab.ortho_adam`

What can make a basis special is a step that depends on it. adam, adamw and rmsprop divide coordinate by coordinate;
soap and ortho_adam divide in a basis of their own; sgd, and muon on its matrices, commute with rotations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.errors import ChoiceError, UsageError
from mainstem.lab.ortho_adam import OrthoAdam
from mainstem.lab.recipes import Recipe

Optimiser = torch.optim.Optimizer
Make = Callable[[nn.Module, Recipe], list[Optimiser]]


def optimisers(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    """Those that a recipe names, over all parameters that need a gradient: one, for muon two.

    Raises:
        ChoiceError: an unknown name.
        UsageError: it comes from a package that is not installed, or from a newer torch.
    """
    if recipe.optimiser not in OPTIMISERS:
        raise ChoiceError("optimiser", recipe.optimiser, OPTIMISERS)
    return OPTIMISERS[recipe.optimiser](module, recipe)


def _weights(module: nn.Module) -> list[Tensor]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _common(recipe: Recipe) -> dict[str, Any]:
    return {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}


def _like_adam(recipe: Recipe) -> dict[str, Any]:
    return {**_common(recipe), "betas": recipe.betas, "eps": recipe.eps}


def _adam(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    return [torch.optim.Adam(_weights(module), **_like_adam(recipe))]


def _adamw(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    return [torch.optim.AdamW(_weights(module), **_like_adam(recipe))]


def _sgd(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    return [torch.optim.SGD(_weights(module), **_common(recipe), momentum=recipe.momentum)]


def _rmsprop(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    common = {**_common(recipe), "momentum": recipe.momentum}
    return [torch.optim.RMSprop(_weights(module), **common, alpha=recipe.betas[1], eps=recipe.eps)]


def _muon(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        remedy = "Install torch 2.9 or newer, or use another optimiser."
        raise UsageError(f"The optimiser muon is not in torch {torch.__version__}", None, remedy)
    outer = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    unembedding = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    outer |= {id(unembedding.weight)} if unembedding is not None else set()
    hidden = [weight for weight in _weights(module) if weight.ndim == 2 and id(weight) not in outer]
    rest = [weight for weight in _weights(module) if weight.ndim != 2 or id(weight) in outer]
    made: list[Optimiser] = []
    if hidden:
        made.append(muon(hidden, **_common(recipe), momentum=recipe.momentum, adjust_lr_fn="match_rms_adamw"))
    if rest:
        made.append(torch.optim.AdamW(rest, **_like_adam(recipe)))
    return made


def _soap(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        what = "The optimiser soap comes from a package that is not installed"
        raise UsageError(what, "pytorch_optimizer", "Install it with `pip install 'mainstem[lab]'`.") from error
    return [SOAP(_weights(module), **_like_adam(recipe))]


def _ortho_adam(module: nn.Module, recipe: Recipe) -> list[Optimiser]:
    return [OrthoAdam(_weights(module), **_like_adam(recipe), seed=recipe.seed)]


OPTIMISERS: dict[str, Make] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "muon": _muon,
    "soap": _soap,
    "ortho_adam": _ortho_adam,
}
"""What makes each."""
