"""Losses of a model and of its rotated copy in every precision: what rounding makes of a change of basis.

In exact numbers the two are one. In float64 with the model's casts lifted they agree to 1e-12 or so, in float64 as the
model runs to what its float32 norms leave, and in half precision each rounds in its own basis. A run that overflows is
said with the state of the stream after which it does.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mainstem.basis.reference import Reference
from mainstem.causal.evaluation import evaluate
from mainstem.causal.rotated import Rotated, in_dtype, plain_run
from mainstem.causal.stream_points import StreamPoint, stream_points, tap_at
from mainstem.errors import NotFiniteError
from mainstem.model.hooks import tapped
from mainstem.model.widened import widened
from mainstem.results.basis_rotations import PrecisionRow

if TYPE_CHECKING:
    from mainstem.session import Model

Say = Callable[[str], None]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_TOKENS = 128
"""How many tokens are run in half precision, which many CPUs only emulate."""

_NO_KERNEL = re.compile(r"not implemented for|Expected \w+ to be .*, got (Double|Float|Half|BFloat16)")
"""What torch says where this device has no kernel in a dtype; the second is of grouped products."""


def precision_rows(model: "Model", plain: nn.Module, wide: Rotated, on: Reference, say: Say) -> list[PrecisionRow]:
    """Losses in float64 with casts lifted, float64, float32, bfloat16 and float16.

    Args:
        model: the model.
        plain: it in float64.
        wide: its rotated copy in float64.
        on: the text; half precision is run on its beginning.
        say: is told what is going on.
    """
    points = stream_points(model.anatomy, "stream")
    rows = [_precision(plain, wide, on, points, say, lifted) for lifted in (True, False)]
    for dtype in DTYPES:
        narrow = in_dtype(model.module, dtype, model.module, wide.turning)
        shorter = on if dtype.itemsize > 2 else on.first(HALF_TOKENS)
        rows.append(_precision(narrow, wide.to(dtype, model.module), shorter, points, say))
    return rows


class _Apart:
    """The largest difference of logits of two runs of the same tokens, relative to the largest logit."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.difference = self.largest = 0.0

    def keep(self, logits: Tensor) -> Tensor:
        self.first = logits
        self.largest = max(self.largest, float(logits.abs().max()))
        return logits

    def compare(self, logits: Tensor) -> Tensor:
        assert self.first is not None
        self.difference = max(self.difference, float((logits.double() - self.first.double()).abs().max()))
        return logits


def _precision(
    plain: nn.Module, other: Rotated, on: Reference, points: list[StreamPoint], say: Say, lifted: bool = False
) -> PrecisionRow:
    """Both on the text; what is not finite is said with the first of `points` where it is not."""
    dtype = str(next(p.dtype for p in plain.parameters() if p.is_floating_point())).removeprefix("torch.")
    say(f"Comparing in {dtype}" + (", casts lifted" if lifted else ""))
    apart, around = _Apart(), widened if lifted else nullcontext
    first, second = plain_run(plain), plain_run(other.model)

    def run(ids: Tensor) -> Tensor:
        with around():
            return apart.keep(first(ids))

    def run_rotated(ids: Tensor) -> Tensor:
        with around(), other.running():
            return apart.compare(second(ids))

    try:
        made = evaluate({"the model": run, "the rotated copy": run_rotated}, on.windows)
    except NotFiniteError as error:
        return _failed(dtype, lifted, f"not finite: {_where(error, plain, other, on, points)}")
    except RuntimeError as error:
        if not _NO_KERNEL.search(str(error)):
            raise
        return _failed(dtype, lifted, str(error).splitlines()[0])
    mine, turned = made["the model"], made["the rotated copy"]
    return PrecisionRow(
        dtype,
        lifted,
        mine.loss,
        turned.loss,
        turned.loss - mine.loss,
        float(turned.kl.mean()),
        turned.flip_rate,
        apart.difference / apart.largest,
        tokens=len(mine.nats),
    )


def _failed(dtype: str, lifted: bool, reason: str) -> PrecisionRow:
    return PrecisionRow(dtype, lifted, None, None, None, None, None, None, reason)


def _where(error: NotFiniteError, plain: nn.Module, other: Rotated, on: Reference, points: list[StreamPoint]) -> str:
    """Which run, and the first point of the stream that is not finite in it."""
    run = str(error.where)
    module = plain if run == "the model" else other.model
    around = nullcontext if run == "the model" else other.running
    found = next(_not_finite(module, points, on, around), None)
    return f"{run}, {found or 'after the last state of the stream'}"


def _not_finite(
    module: nn.Module, points: list[StreamPoint], on: Reference, around: Callable[[], AbstractContextManager]
) -> Iterator[str]:
    """The names of the points that are not finite, in the order of the run."""
    for ids in on.windows.ids:
        names: list[str] = []
        taps = [_finite_tap(point, names, len(ids)) for point in points]
        with around(), tapped(module, taps), torch.no_grad():
            plain_run(module)(ids[None])
        yield from names


def _finite_tap(point: StreamPoint, names: list[str], length: int):
    def see(x: Tensor) -> None:
        if not bool(torch.isfinite(x).all()):
            names.append(point.name)

    return tap_at(point, see, lambda: (1, length))
