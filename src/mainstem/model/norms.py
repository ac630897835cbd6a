"""A normalisation as a formula, and how to tell from its behaviour that a piece of a model is one.

y = gain * (x - c mean(x)) / sqrt(mean((x - c mean(x))^2) + eps) + bias, with c = 1 for LayerNorm and 0 for RMSNorm.
With its scale frozen at the value of a run it is linear in x, and that is how contributions are carried through it.
`fit_norm` runs the piece on probes of several sizes and fits centring, gain, bias and eps; so it does not matter
whether the model calls a fused kernel or writes the norm out, with a gain of w or of 1 + w.

Limits: norms over groups of dimensions, p-norms and saturating functions fit none of this and are not norms here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.program import Program, probe_dtype
from mainstem.model.trees import leaves_of

SCALES = (1.0, 1e-2, 1e-4, 1e-6)


@dataclass(frozen=True, eq=False)
class Norm:
    """A fitted norm; `gain` and `bias` are [d_model] or None, `eps` is in squared units of the stream."""

    centred: bool
    gain: Tensor | None
    bias: Tensor | None
    eps: float

    def centre(self, x: Tensor) -> Tensor:
        """x without its mean over the last axis, if this norm removes it."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def scale(self, x: Tensor) -> Tensor:
        """1 / root mean square of `x` [..., d_model], as [..., 1]."""
        return (self.centre(x).pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()

    def linear(self, v: Tensor, scale: Tensor) -> Tensor:
        """The norm's linear part with its scale frozen, applied to `v`; the bias is not added."""
        out = self.centre(v) * scale
        return out if self.gain is None else out * self.gain.to(out.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` with its own scale, in the dtype of x."""
        out = self.linear(x, self.scale(x))
        return out if self.bias is None else out + self.bias.to(out.dtype)


PROBE = torch.finfo(torch.float32).eps
"""Relative error to expect of one operation on probes: they run in float32 at least (see `Program`), and stock norms
compute in float32 in float64 models too."""


def recorded_error(dtype: torch.dtype) -> float:
    """Relative error to allow between a formula and what a few operations in `dtype` gave in the recorded run."""
    return max(8 * torch.finfo(dtype).eps, 300 * PROBE)


def fit_norm(
    run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, constants: list[Tensor], numbers: list[float]
) -> Norm | None:
    """The norm that `run` computes, or None if it is none.

    Args:
        run: the piece, taking a tensor of x's shape.
        x: what the piece read in the recorded run, [..., d_model].
        y: what it returned.
        constants: tensors that the piece uses; a gain or bias found among them is taken exactly.
        numbers: numbers that the piece uses; eps is taken exactly from them.
    """
    if x.shape[-1] != y.shape[-1] or x.numel() != y.numel() or x.numel() // x.shape[-1] < 4:
        return None
    tolerance, dtype = 300 * PROBE, probe_dtype(x.dtype)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) + 0.5
    try:
        large = (probe * 100).to(dtype)
        seen = run(large).double()
        if not _close(run(large * 2).double(), seen, 0.1 * tolerance**0.5):  # nearly blind to its input's size
            return None
        for centred in (False, True):
            norm = _fit(run, probe, large, seen, centred, tolerance, constants, numbers)
            if norm is not None and _close(norm(x.double()), y.double().reshape(x.shape), recorded_error(y.dtype)):
                return norm
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return None


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


def _fit(run, probe, large, seen, centred, tolerance, constants, numbers) -> Norm | None:
    width = large.shape[-1]
    plain = Norm(centred, None, None, 0.0)
    seen = seen.reshape(-1, width)
    unit = plain(large.double().reshape(-1, width))
    mean_unit, mean_seen = unit.mean(0), seen.mean(0)
    spread = (unit - mean_unit).pow(2).mean(0).clamp_min(1e-30)
    gain = ((unit - mean_unit) * (seen - mean_seen)).mean(0) / spread
    bias = mean_seen - gain * mean_unit
    if not torch.isfinite(gain).all() or not _close(gain * unit + bias, seen, tolerance):
        return None
    if gain.abs().max() == 0:
        return None
    snapped_gain = _snap(gain, constants, tolerance)
    snapped_bias = _snap_bias(bias, gain, constants, tolerance)
    eps = _fit_eps(run, probe, large.dtype, plain, gain, bias, numbers)
    return Norm(centred, snapped_gain, snapped_bias, eps)


def _snap(gain: Tensor, constants: list[Tensor], tolerance: float) -> Tensor | None:
    """The model's own tensor where it is the gain; None for a gain of one."""
    if torch.allclose(gain, torch.ones_like(gain), rtol=tolerance, atol=tolerance):
        return None
    fitting = [t.detach().reshape(-1) for t in constants if t.numel() == gain.numel()]
    nearest = min(fitting, key=lambda tensor: float((tensor.double() - gain).norm().detach()), default=None)
    return nearest if nearest is not None and _close(nearest.double(), gain, 10 * tolerance) else gain


def _snap_bias(bias: Tensor, gain: Tensor, constants: list[Tensor], tolerance: float) -> Tensor | None:
    if bias.norm() <= tolerance * gain.norm():
        return None
    return _snap(bias + 0.0, constants, tolerance) if bias.norm() > 0 else None


def _fit_eps(run, probe, dtype, plain: Norm, gain: Tensor, bias: Tensor, numbers: list[float]) -> float:
    """eps from how much less a small vector is enlarged than a large one."""
    width = probe.shape[-1]
    for size in SCALES:
        small = (probe * size).to(dtype)
        out = run(small).double().reshape(-1, width) - bias
        centred = plain.centre(small.double().reshape(-1, width)) * gain
        ratio = (out * centred).sum(-1) / centred.pow(2).sum(-1)
        square = plain.centre(small.double().reshape(-1, width)).pow(2).mean(-1)
        eps = float((1 / ratio.pow(2) - square).median().detach())
        if eps > 0.02 * float(square.median()):
            close = [n for n in numbers if n > 0 and abs(n - eps) < 0.05 * eps]
            return min(close, key=lambda n: abs(n - eps)) if close else eps
    return 0.0


def constants_of(program: Program) -> tuple[list[Tensor], list[float]]:
    """The tensors and numbers that a program's calls use, to take gains and eps from exactly."""
    tensors, numbers = [], []
    for _, args, kwargs, _ in program.calls:
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                if leaf.numel() == 1:
                    numbers.append(float(leaf.detach()))
            elif isinstance(leaf, float):
                numbers.append(leaf)
    return tensors, numbers
