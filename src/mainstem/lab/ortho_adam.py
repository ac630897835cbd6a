"""Adam in a fixed rotated basis: what is left of Adam when its coordinates are not the model's.

Adam divides each coordinate of the gradient by a running root mean square of that coordinate, and so treats the
coordinates of the stream, which the forward pass does not know, as special. OrthoAdam (Kaul et al. 2025, "From
Attention to Activation: Unraveling the Enigmas of Large Language Models") keeps both moments of a rotated gradient and
rotates the step back, so that the special basis is another one, in which no activation is measured:

    G' = Q_L G Q_R        m, v = moments of G'        W <- W - rate * Q_L^T (m^ / (sqrt(v^) + eps)) Q_R^T

There Q rotates the flattened tensor; a random rotation of all entries of a matrix needs a matrix of (d_out d_in)^2
entries, which is out of reach at any width, so here both sides are rotated, each by a matrix of its own for each
tensor, drawn from a seed. A vector is rotated by Q_L alone; a tensor of more than two axes is seen as a matrix of its
first axis by all others. A side longer than `largest` (1,024: the vocabulary of an embedding) is left as it is.

With rotations that are identities this is torch's Adam (AdamW's decay); the rotations are kept in the state, so that a
training that goes on from a checkpoint has the same ones to the last bit. Cost: two products of a matrix with a square
one each way, a step.
"""

from collections.abc import Callable, Iterable
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.rotations import random_rotation

LARGEST = 1024
"""Sides longer than this are not rotated."""


class OrthoAdam(torch.optim.Optimizer):
    """Adam whose moments are those of Q_L G Q_R.

    Args:
        params: parameters.
        lr: learning rate.
        betas: how much of the first and second moment stays at each step.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as AdamW's.
        seed: of the rotations.
        largest: the longest side that is rotated.
        rotation: makes an orthogonal matrix of a size and a seed.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        largest: int = LARGEST,
        rotation: Callable[[int, int], Tensor] = random_rotation,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        seeds = count(1_000_003 * seed)
        for group in self.param_groups:
            for weight in group["params"]:
                sides = [_side(size, largest, rotation, next(seeds), weight) for size in _matrix(weight).shape]
                moments = {name: torch.zeros_like(_matrix(weight)) for name in ("mean", "square")}
                self.state[weight] = {"step": 0, "left": sides[0], "right": sides[1], **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients that are there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    move = self._move(self.state[weight], _matrix(weight.grad), group["betas"], group["eps"])
                    weight.add_(move.view_as(weight), alpha=-group["lr"])
        return loss

    @staticmethod
    def _move(
        state: dict, grad: Float[Tensor, "d_out d_in"], betas: tuple[float, float], eps: float
    ) -> Float[Tensor, "d_out d_in"]:
        """Adam's step in the rotated basis, rotated back."""
        first, second = betas
        state["step"] += 1
        turned = _turn(grad, state["left"], state["right"])
        state["mean"].lerp_(turned, 1 - first)
        state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
        mean = state["mean"] / (1 - first ** state["step"])
        root = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(eps)
        return _turn(mean / root, _transposed(state["left"]), _transposed(state["right"]))


def _matrix(weight: Tensor) -> Float[Tensor, "d_out d_in"]:
    """A tensor as a matrix of its first axis by all others; a vector as a column."""
    return weight.reshape(weight.shape[0] if weight.ndim else 1, -1)


def _side(size: int, largest: int, rotation: Callable[[int, int], Tensor], seed: int, like: Tensor) -> Tensor | None:
    """A side's rotation; None for one that is too long, or that has nothing to rotate."""
    if size == 1 or size > largest:
        return None
    return rotation(size, seed).to(like.device, like.dtype).contiguous()


def _turn(grad: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    grad = grad if left is None else left @ grad
    return grad if right is None else grad @ right


def _transposed(side: Tensor | None) -> Tensor | None:
    return None if side is None else side.T
