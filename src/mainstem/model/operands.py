"""From the result of a matrix that reads the stream to what attention receives: a linear map, found in a real run.

What stands between a query, key or value projection and attention (views, rotary embedding at the positions of the
prompt, further matrices, norms) is kept as programs of that very run. Without a norm it has to be linear; norms on the
way are split off and keep their scale, and what is between them has to be linear, also where it goes around them.
Directions of what attention receives are pulled back by one gradient, which of a linear map is exact. Where the model
multiplies queries with keys by itself, the map goes on to their product, the other side as it is.

Limits: what comes from the stream by several matrices at once, or mixes positions, is refused with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.model.head_norms import norm_at
from mainstem.model.norms import PROBE, Norm, recorded_error
from mainstem.model.program import Program, dependents, extract, one_call, probe_like
from mainstem.model.quantised import quantised_reason
from mainstem.model.recording import Value
from mainstem.model.stream import is_weight_product
from mainstem.model.views import heads_first, pattern_rows, query_rows

MOST_NORMS = 3


@dataclass(frozen=True, eq=False)
class Stage:
    """`program` of a norm's result and the projection's rows, or of the rows alone where `norm` is None.

    The norm, at its `scale`, is of what the stage before gives, or of the rows themselves where there is none.
    """

    program: Program | None
    norm: Norm | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class OperandMap:
    """The map of one operand ("query", "key" or "value") of one run.

    Attributes:
        module: the module of the projection, relative to the recorded one.
        shape: of the projection's result.
        stages: from the projection's result to the operand.
        product: of the operand with the other side, where the model computes it itself.
        arrange: from the result's own axes to [heads, pos, coordinate]; for a product of queries and keys the
            coordinates are the other side's positions.
        received: [heads, pos, coordinate] float64, what attention received.
    """

    role: str
    module: str
    shape: tuple[int, ...]
    stages: tuple[Stage, ...]
    product: Program | None
    arrange: Callable[[Tensor], Tensor]
    received: Float[Tensor, "n_heads pos d_head"]

    @property
    def positions(self) -> int:
        """The number of positions of the run."""
        return self.received.shape[1]

    def linear(self, rows: Float[Tensor, "pos _"]) -> Float[Tensor, "n_heads pos d_head"]:
        """What rows of the projection's result add to what attention receives, biases of norms left out."""
        return self._run(rows.reshape(self.shape), False)

    @torch.no_grad()
    def constant(self) -> Float[Tensor, "n_heads pos d_head"]:
        """What the norms' biases add."""
        return self._run(torch.zeros(self.shape, dtype=torch.float64, device=self.received.device), True)

    def _run(self, rows: Tensor, biases: bool) -> Tensor:
        x = rows
        for stage in self.stages:
            if stage.norm is None or stage.scale is None:
                x = x if stage.program is None else stage.program(rows)
                continue
            x = stage.norm.linear(x, stage.scale)
            if biases and stage.norm.bias is not None:
                x = x + stage.norm.bias.to(x)
            x = x if stage.program is None else stage.program(x, rows)
        return self.arrange(x if self.product is None else self.product(x))

    @property
    def normed(self) -> bool:
        """Whether a norm of queries or keys is on the way."""
        return any(stage.norm is not None for stage in self.stages)

    def unscaled(self) -> "OperandMap":
        """The same with the scale of the norm on the way left out, its gain kept.

        Raises:
            LevelRefusedError: if something goes around a norm, or there are several, so that no one factor is left out.
        """
        if not self.normed:
            return self
        stages = [
            replace(stage, scale=torch.ones_like(stage.scale)) if stage.scale is not None else stage
            for stage in self.stages
        ]
        last = stages[-1]
        zeros, rows = torch.zeros_like(self._operand_rows(stages)), self.probe()
        around = last.program is not None and last.norm is not None and bool(last.program(zeros, rows).any())
        if around or sum(stage.norm is not None for stage in stages) > 1:
            raise _refused(self.role, "something goes around the norm on the way, so its scale is no factor of all")
        return replace(self, stages=tuple(stages))

    def probe(self) -> Tensor:
        """Random numbers of the shape of the projection's result, the same each time."""
        generator = torch.Generator().manual_seed(3)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.received.device)

    def _operand_rows(self, stages: Sequence[Stage]) -> Tensor:
        """What the last norm is of, for random rows."""
        rows = x = self.probe()
        for stage in stages[:-1]:
            x = x if stage.program is None else stage.program(rows)
        return x

    def before_product(self, operand: Tensor, layout: str, sizes: Mapping[str, int]) -> "OperandMap":
        """The map as far as the operand that is multiplied with the other side; `layout` is the operand's."""
        arrange = _arrangement(self.role, layout, sizes, False)
        return replace(self, product=None, arrange=arrange, received=arrange(operand))

    def matrices(
        self, heads: Sequence[int], position: int
    ) -> list[tuple[Int[Tensor, " row"], Float[Tensor, "d_head row"]]]:
        """Of some heads at one position: which entries of the projection's result each comes from, and the linear map.

        `heads` counts the operand's own heads; float64.

        Raises:
            LevelRefusedError: if what attention receives at a position comes from several.
        """
        with torch.enable_grad():
            rows = torch.zeros(self.shape, dtype=torch.float64, device=self.received.device)
            rows = rows.reshape(self.positions, -1).requires_grad_()
            out = self.linear(rows)[list(heads), position]
            used = self._used(out, rows, position)
            alone = bool((used.sum(0) > 1).any())  # heads that share entries are asked one by one
            parts = out.split(1 if alone else len(out))
            unit = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None]
            found = [
                torch.autograd.grad(part, rows, unit.expand(-1, len(part), -1), True, is_grads_batched=True)[0]
                for part in parts
            ]
        index = [torch.nonzero(own).flatten() for own in used]
        return [(own, found[h if alone else 0][:, position, own]) for h, own in enumerate(index)]

    def _used(self, out: Float[Tensor, "n_heads d_head"], rows: Tensor, position: int) -> Bool[Tensor, "n_heads row"]:
        """Which entries of the projection's result each head comes from."""
        heads = torch.eye(len(out), dtype=out.dtype, device=out.device)[..., None]
        random = torch.randn(out.shape[1], generator=torch.Generator().manual_seed(4), dtype=out.dtype).to(out.device)
        (found,) = torch.autograd.grad(out, rows, heads * random, True, is_grads_batched=True)
        used = found.ne(0)
        if int(used.any(0).any(1).sum()) > int(used[:, position].any()):
            raise LevelRefusedError(f"No {self.role} side", None, "it comes from several positions at once")
        return used[:, position]

    def head(self, head: int, n_heads: int) -> int:
        """Which of the operand's heads a query head reads."""
        return head * self.received.shape[0] // n_heads

    def pull_back(
        self, direction: Float[Tensor, " d_head"], head: int, position: int
    ) -> tuple[Float[Tensor, " _"], float]:
        """The direction of the projection's result at `position` that has the inner product of `direction`.

        `head` counts the operand's own heads. The second is what the norm's bias adds to the inner product.

        Raises:
            LevelRefusedError: if what attention receives at a position comes from several.
        """
        with torch.enable_grad():
            rows = torch.zeros(self.shape, dtype=torch.float64, device=direction.device)
            rows = rows.reshape(self.positions, -1).requires_grad_()
            (gradient,) = torch.autograd.grad(self.linear(rows)[head, position] @ direction, rows)
        others = torch.arange(self.positions, device=gradient.device) != position
        if gradient[others].any():
            raise LevelRefusedError(f"No {self.role} side", None, "it comes from several positions at once")
        return gradient[position], float(self.constant()[head, position] @ direction)


def operand_map(
    role: str,
    operand: Value,
    layout: str,
    sizes: Mapping[str, int],
    is_read: Callable[[Value], bool],
    product: Value | None = None,
) -> OperandMap:
    """The map of an operand of a recorded run.

    Args:
        role: query, key or value.
        operand: what attention receives.
        layout: of the operand's axes, or of the product's.
        sizes: of the axes that are made of several.
        is_read: whether a product with a weight reads the stream.
        product: of queries and keys, where the model computes it itself: then the map goes on to it.

    Raises:
        LevelRefusedError: if it does not come from one read by linear maps and norms.
    """
    found = _reads_behind(operand, is_read)
    if len(found) != 1:
        modules = ", ".join(value.call.frame.path for value in found if value.call is not None and value.call.frame)
        reason = f"it comes from the stream by {len(found) or 'no'} matrices that are known, not by one"
        reason += f" ({modules}); merge an adapter into its matrix first" if modules else ""
        raise _refused(role, quantised_reason(operand) or reason)
    read, end = found[0], operand if product is None else product
    stages = tuple(_stages(role, operand, read, MOST_NORMS))
    last = None if product is None else one_call(product, [operand])
    if product is not None and (last is None or not _is_linear(last, [operand])):
        raise _refused(role, "the scores are not the product of queries and keys alone")
    arrange = _arrangement(role, layout, sizes, product is not None)
    received = arrange(end.tensor.detach().double())
    assert read.call is not None
    module = read.call.frame.path if read.call.frame is not None else ""
    last = None if last is None else last.in_float64
    made = OperandMap(role, module, read.shape, stages, last, arrange, received)
    rows = read.tensor.detach().double().reshape(received.shape[1], -1)
    error = float((made.linear(rows) + made.constant() - received).norm())
    if not error <= recorded_error(end.tensor.dtype) * float(received.norm()):
        raise _refused(role, "what attention receives is more than linear maps and norms of one matrix's result")
    return made


def _arrangement(role: str, layout: str, sizes: Mapping[str, int], scores: bool) -> Callable[[Tensor], Tensor]:
    def arrange(tensor: Tensor) -> Tensor:
        if scores:
            rows = pattern_rows(tensor, layout, sizes, 1)[0]
            return rows if role == "query" else rows.transpose(1, 2)
        return (query_rows if role == "query" else heads_first)(tensor, layout, sizes, 1)[0]

    return arrange


def _reads_behind(value: Value, is_read: Callable[[Value], bool]) -> list[Value]:
    """The products that read the stream behind `value`, the latest on each way."""
    found: dict[int, Value] = {}
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current.id in seen or current.call is None:
            continue
        seen.add(current.id)
        if is_weight_product(current.call) and is_read(current):
            found[current.id] = current
        else:
            pending.extend(current.call.active_operands())
    return [found[i] for i in sorted(found)]


def _stages(role: str, end: Value, read: Value, norms: int) -> list[Stage]:
    if end is read:
        return [Stage(None)]
    whole = extract(end, [read])
    if whole is not None and _is_linear(whole, [read]):
        return [Stage(whole.in_float64)]
    for value in reversed(dependents(end, [read])) if norms else ():
        found = norm_at(value, read)
        if found is None:
            continue
        norm, source = found
        after = None if value is end else extract(end, [value, read])
        if value is end or (after is not None and _is_linear(after, [value, read])):
            scale = norm.scale(source.tensor.detach().double())
            return [
                *_stages(role, source, read, norms - 1),
                Stage(None if after is None else after.in_float64, norm, scale),
            ]
    raise _refused(role, "between its matrix and attention lies more than linear maps and norms")


def _is_linear(program: Program, sources: list[Value]) -> bool:
    a, b = ([probe_like(source, seed + i) for i, source in enumerate(sources)] for seed in (7, 17))
    try:
        one, other = program(*a), program(*b)
        both = program(*[x + y for x, y in zip(a, b, strict=True)])
        twice = program(*[2 * x for x in a])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    slack = 100 * PROBE * (one.norm() + other.norm())
    return bool(((both - one - other).norm() <= slack) & ((twice - 2 * one).norm() <= slack))


def _refused(role: str, reason: str) -> LevelRefusedError:
    return LevelRefusedError(f"No {role} side", None, reason, "Ask about the value side, or another unit.")
