"""What rounding takes from a sum: one addition, and a stream that is added up write by write.

A floating-point number near x has neighbours `spacing(x)` away, so what is added to it is lost where it is smaller than
half of that: float32(1e8) + float32(1e-2) is 1e8, because float32 has a number every 8 there. A stream is such a sum.
`added_up` adds its writes one after another in a dtype, s' = fl(s + fl(w)), and holds each step against the write, and
each state against the exact sum.

Of a write, at one position, `lost` is |w - (s' - s)| / |w|: what did not arrive, whether rounding the write or rounding
the sum took it. `vanished` is the share of its coordinates, zeros left out, whose addition changed nothing. `error` is
|s' - S| / |S| with the exact sum S: what all roundings so far have left. Exact means float64, which is 2^29 times finer
than float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE, SMALL = 1e8, 1e-2


def spacing(x: float, dtype: torch.dtype) -> float:
    """The distance from |x|, rounded to `dtype`, to the next larger number (one unit in the last place); NaN beyond."""
    size, info = abs(float(torch.tensor(x, dtype=dtype))), torch.finfo(dtype)
    if not math.isfinite(size):
        return math.nan
    return max(2.0 ** math.floor(math.log2(size)) if size else 0.0, info.smallest_normal) * info.eps


@dataclass(frozen=True)
class Addition:
    """One sum in a dtype: what comes out, and the spacing there (NaN where it overflows)."""

    dtype: torch.dtype
    large: float
    small: float
    total: float
    spacing: float

    @property
    def lost(self) -> bool:
        """Whether adding the small number changed nothing."""
        return self.total == float(torch.tensor(self.large, dtype=self.dtype))


def addition(large: float, small: float, dtype: torch.dtype) -> Addition:
    """Adds two numbers in a dtype."""
    total = torch.tensor(large, dtype=dtype) + torch.tensor(small, dtype=dtype)
    return Addition(dtype, large, small, float(total), spacing(large, dtype))


def one_is_lost_from(dtype: torch.dtype) -> float:
    """The smallest power of two to which 1 is added in vain: 2^24 in float32, 2^11 in float16, 2^8 in bf16."""
    return 2.0 / torch.finfo(dtype).eps


@dataclass(frozen=True, eq=False)
class Step:
    """One write added, at every position; see the module for what each is."""

    lost: Float[Tensor, " pos"]
    vanished: Float[Tensor, " pos"]
    error: Float[Tensor, " pos"]


@dataclass(frozen=True, eq=False)
class AddedUp:
    """A stream added up in a dtype.

    Attributes:
        steps: one for each write but the first.
        largest: the largest magnitude of the exact sum on the way.
        overflow: the number of the write that left the dtype's range, which ends the sum; None: none did.
    """

    steps: list[Step]
    largest: float
    overflow: int | None = None


def added_up(writes: Sequence[Float[Tensor, "pos d_model"]], dtype: torch.dtype) -> AddedUp:
    """Adds writes in a dtype, in their order.

    Args:
        writes: in float64; the first is what the stream begins with.
        dtype: of the stream and of each write.
    """
    exact, state = torch.zeros_like(writes[0]), torch.zeros_like(writes[0], dtype=dtype)
    largest, steps = 0.0, []
    for number, write in enumerate(writes):
        exact = exact + write
        largest = max(largest, float(exact.abs().max()))
        after = state + write.to(dtype)
        if not bool(torch.isfinite(after).all()):
            return AddedUp(steps, largest, number)
        if number:
            steps.append(_step(state.double(), after.double(), write, exact))
        state = after
    return AddedUp(steps, largest)


def _step(state: Tensor, after: Tensor, write: Tensor, exact: Tensor) -> Step:
    there = write != 0
    vanished = ((after == state) & there).sum(-1) / there.sum(-1).clamp_min(1)
    return Step(_relative(write - (after - state), write), vanished.double(), _relative(after - exact, exact))


def _relative(part: Float[Tensor, "pos d_model"], whole: Float[Tensor, "pos d_model"]) -> Float[Tensor, " pos"]:
    """The norm of one over that of the other; 0 of nothing."""
    return part.norm(dim=-1) / whole.norm(dim=-1).clamp_min(torch.finfo(whole.dtype).tiny)
