"""Rotations of the stream: orthogonal matrices that spread a privileged basis over all dimensions.

Three kinds. `random`: uniform over the orthogonal group, by QR of a Gaussian matrix with the signs of R's diagonal
(Mezzadri 2007, "How to generate random matrices from the classical compact groups", section 5). `hadamard`: H D with
D random signs (QuaRot: Ashkboos et al. 2024, section 3), where H has entries of equal size as far as d allows: H is a
Kronecker product of Hadamard matrices (Sylvester's of order 2, Paley's first and second kind) and, for what is left
of d, one random orthogonal matrix. `learned`: a start times the Cayley transform (I - A)^-1 (I + A) of a skew A, which
gradient descent moves (SpinQuant: Liu et al. 2024, section 3; there on the Stiefel manifold, here by Adam on A).

LayerNorm takes the mean away, and only rotations with R 1 = 1 commute with that. For `random` and `learned` such an R
turns the complement of the vector of ones; for `hadamard` it is H D H^T, whose first column of H is constant and whose
first sign is +1: then R 1 = 1, and entries stay of the size 1 / sqrt(d).

Everything is float64. A stream vector x becomes R x; rows of vectors become X R^T.
Cost: one QR of d x d; a learned rotation one d x d solve for each step (0.1 s at d = 576 on one core).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.kurtosis import token_kurtosis
from mainstem.errors import ChoiceError, UsageError

KINDS = ("random", "hadamard", "learned")
OBJECTIVES = ("kurtosis", "rounding")
Rotation = Float[Tensor, "d_model d_model"]
RATE = 0.02


def rotation(kind: str, d_model: int, seed: int = 0, fix_ones: bool = False) -> Rotation:
    """A random rotation: `random` or `hadamard`.

    Args:
        kind: which of the two; a learned one needs a sample (`learned`).
        d_model: its size.
        seed: the same seed gives the same rotation.
        fix_ones: whether R 1 = 1, which LayerNorm needs.

    Raises:
        ChoiceError: another kind.
        UsageError: a size below 1.
    """
    if d_model < 1:
        raise UsageError(f"A rotation of {d_model} dimensions", None, "Give a size of at least 1.")
    if kind == "random":
        return fixing_ones(random_rotation(d_model - 1, seed)) if fix_ones else random_rotation(d_model, seed)
    if kind == "hadamard":
        spread = _spread(d_model, seed)
        signs = torch.randint(0, 2, (d_model,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        if fix_ones:
            signs[0] = 1
            return (spread * signs) @ spread.T
        return spread * signs
    raise ChoiceError("rotation", kind, ("random", "hadamard"), None, "A learned rotation is made from a sample.")


def random_rotation(d_model: int, seed: int) -> Float[Tensor, "d_model d_model"]:
    """An orthogonal matrix, uniformly distributed (Haar), in float64: QR of a Gaussian one with its signs made fair."""
    gaussian = torch.randn(d_model, d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def hadamard(order: int) -> Float[Tensor, "row row"] | None:
    """A Hadamard matrix (entries +1 and -1, H H^T = order I) whose first column is ones; None where none is known here.

    Sylvester's doubling, Paley's two constructions over prime fields, and Kronecker products of these.
    """
    if order in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:order, :order]
    if order % 4:
        return None
    found = _paley(order)
    for factor in range(2, int(order**0.5) + 1):
        if found is not None:
            break
        if order % factor == 0 and (a := hadamard(factor)) is not None and (b := hadamard(order // factor)) is not None:
            found = torch.kron(a, b)
    return None if found is None else found * found[:, :1]


def learned(
    sample: Float[Tensor, "row d_model"],
    start: Rotation,
    objective: str = "kurtosis",
    fix_ones: bool = False,
    steps: int = 60,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Rotation:
    """A rotation under which rows of the stream have small kurtosis, or lose little when they are rounded.

    Args:
        sample: values of the stream.
        start: where to begin, such as a `hadamard` rotation; with `fix_ones` it must itself keep the ones.
        objective: `kurtosis`, the mean over rows of E[(x - mean)^4] / E[(x - mean)^2]^2; `rounding`, the mean of
            max |x|^2 / mean x^2, to which the relative squared error of rounding to an absolute maximum is
            proportional.
        fix_ones: whether R 1 = 1.
        steps: of Adam.
        report: receives how many steps are done, and how many there are.

    Raises:
        ChoiceError: an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise ChoiceError("objective", objective, OBJECTIVES)
    measure = _kurtosis if objective == "kurtosis" else _peak
    rows = sample.detach().double() @ start.T
    size = start.shape[0] - 1 if fix_ones else start.shape[0]
    free = torch.zeros(size, size, dtype=torch.float64, requires_grad=True)
    best, least = start, float(measure(rows))
    descent = torch.optim.Adam([free], lr=RATE / size**0.5)
    with torch.enable_grad():
        for step in range(steps):
            turn = _cayley(free)
            turn = fixing_ones(turn) if fix_ones else turn
            loss = measure(rows @ turn.T)
            if float(loss.detach()) < least:
                best, least = (turn.detach() @ start), float(loss.detach())
            descent.zero_grad()
            loss.backward()
            descent.step()
            report(step + 1, steps)
    return best


def fixing_ones(small: Float[Tensor, "row row"]) -> Rotation:
    """The rotation of one dimension more that keeps the vector of ones and acts as `small` on its complement.

    With Q the reflection that exchanges the first axis and the ones' direction: Q diag(1, small) Q.
    """
    size = small.shape[0] + 1
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    between = torch.full((size,), size**-0.5, dtype=torch.float64)
    between[0] -= 1
    between = between / between.norm()
    out = torch.block_diag(torch.ones(1, 1, dtype=small.dtype), small)
    out = out - 2 * torch.outer(between, between @ out)
    return out - 2 * torch.outer(out @ between, between)


def orthogonality(matrix: Rotation) -> float:
    """The largest entry of |R R^T - I|."""
    return float((matrix @ matrix.T - torch.eye(matrix.shape[0], dtype=matrix.dtype)).abs().max())


def _spread(size: int, seed: int) -> Float[Tensor, "row row"]:
    """The Hadamard matrix of the largest order that divides `size`, normalised, times a random one for the rest.

    The first column is constant.
    """
    order = next(order for order in range(size, 0, -1) if size % order == 0 and hadamard(order) is not None)
    whole = hadamard(order)
    assert whole is not None
    whole = whole / order**0.5
    rest = size // order
    if rest == 1:
        return whole
    own = fixing_ones(random_rotation(rest - 1, seed))  # its first column must be constant: turn the first axis to ones
    between = torch.full((rest,), rest**-0.5, dtype=torch.float64)
    between[0] -= 1
    between = between / between.norm()
    return torch.kron(whole, own - 2 * torch.outer(own @ between, between))


def _paley(order: int) -> Float[Tensor, "row row"] | None:
    """Paley's matrix of the first kind (order - 1 a prime 3 mod 4) or the second (order / 2 - 1 a prime 1 mod 4)."""
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        skew = _bordered(order - 1)
        skew[1:, 0] = -1
        return torch.eye(order, dtype=torch.float64) + skew
    half = order // 2
    if _is_prime(half - 1) and (half - 1) % 4 == 1:
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        cross = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(_bordered(half - 1), plus) + torch.kron(torch.eye(half, dtype=torch.float64), cross)
    return None


def _bordered(prime: int) -> Float[Tensor, "row row"]:
    """Jacobsthal's matrix of quadratic residues mod `prime`, with a border of ones and a zero corner."""
    squares = {i * i % prime for i in range(1, prime)}
    residue = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)], dtype=torch.float64)
    out = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    index = torch.arange(prime)
    out[1:, 1:] = residue[(index[:, None] - index[None]) % prime]
    out[0, 0] = 0
    return out


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def _cayley(free: Float[Tensor, "row row"]) -> Float[Tensor, "row row"]:
    skew = free - free.T
    eye = torch.eye(len(skew), dtype=skew.dtype)
    return torch.linalg.solve(eye - skew, eye + skew)


def _kurtosis(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, ""]:
    return token_kurtosis(rows).mean()


def _peak(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, ""]:
    return (rows.abs().amax(-1).pow(2) / rows.pow(2).mean(-1)).mean()
