"""The norm of queries or keys that stands between their projection and attention, if there is one.

    q [pos, n_heads d_head]  ->  norm over d_head of each head (or over all of them)  ->  gain, bias  ->  rotary

It is found like all norms, from what the recorded operations do; the outermost piece that fits is taken, so that a
gain that is applied after the norm belongs to it. A gain may be common to all heads [d_head] or each head's own
[n_heads, d_head].

Cost: a few runs of single operations on probes. Limits: a projection that serves queries and keys at once has one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mainstem.model.norms import PROBE, Norm, constants_of, fit_norm
from mainstem.model.program import Program, dependents, extract, probe_dtype, probe_like
from mainstem.model.recording import Value

MAX_STEPS = 10


def head_norm(operand: Value, product: Value) -> Norm | None:
    """The norm between `product` and attention's `operand`, or None."""
    whole = extract(operand, [product])
    if whole is None or _linear(whole, product):
        return None
    pieces = [piece for value in reversed(dependents(operand, [product])) for piece in _pieces(value, product)]
    common = next((norm for value, source, piece in pieces if (norm := _fit(value, source, piece)) is not None), None)
    if common is not None and common.gain is not None:
        return common
    own = (_fit_by_head(value, source, piece) for value, source, piece in pieces)
    return next((norm for norm in own if norm is not None), common)


def norm_at(value: Value, product: Value) -> tuple[Norm, Value] | None:
    """The norm over the last axis whose result is `value`, somewhere behind `product`, and what it is the norm of.

    A gain or bias that follows is left to what follows.
    """
    for end, source, piece in _pieces(value, product):
        norm = _fit(end, source, piece)
        if norm is not None:
            return norm, source
    return None


def _linear(program: Program, source: Value) -> bool:
    """Whether twice the input gives twice the result: then there is no norm in between."""
    probe = probe_like(source, 7)
    try:
        one, two = program(probe), program(2 * probe)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return bool((two - 2 * one).norm() <= 100 * PROBE * one.norm())


def _pieces(value: Value, product: Value) -> Iterator[tuple[Value, Value, Program]]:
    """(value, source, program) for each earlier value of the same shape that all of `value` comes from."""
    frontier = {value.id: value}
    for _ in range(MAX_STEPS):
        latest = frontier.pop(max(frontier))
        if latest.call is None or latest.id <= product.id:
            return
        frontier |= {o.id: o for o in latest.call.active_operands()}
        source = next(iter(frontier.values()))
        if len(frontier) == 1 and source.shape == value.shape and value.tensor.is_floating_point():
            program = extract(value, [source])
            if program is None or not program.calls:
                return
            yield value, source, program


def _fit(value: Value, source: Value, program: Program) -> Norm | None:
    return fit_norm(program, source.tensor, value.tensor, *constants_of(program))


def _fit_by_head(value: Value, source: Value, program: Program) -> Norm | None:
    """The norm of [batch, pos, head, d_head] in any order, where each head has a gain and a bias of its own."""
    tensor = source.tensor
    if tensor.dim() != 4 or tensor.shape[0] != 1:
        return None
    for axis in (2, 1):
        found: list[Norm] = []
        for head in range(tensor.shape[axis]):
            norm = _fit_one(value, source, program, axis, head)
            if norm is None or (found and norm.centred != found[0].centred):
                break
            found.append(norm)
        if len(found) == tensor.shape[axis]:
            return Norm(found[0].centred, _stacked(found, "gain", 1.0), _stacked(found, "bias", 0.0), found[0].eps)
    return None


def _fit_one(value: Value, source: Value, program: Program, axis: int, head: int) -> Norm | None:
    """The norm of one head, by running the piece with all other heads zero."""
    tensor = source.tensor

    def run(x: Tensor) -> Tensor:
        whole = torch.zeros(tensor.shape, dtype=probe_dtype(tensor.dtype), device=tensor.device)
        whole.select(axis, head).copy_(x)
        return program(whole).select(axis, head)

    return fit_norm(run, tensor.select(axis, head), value.tensor.select(axis, head), *constants_of(program))


def _stacked(norms: list[Norm], name: str, neutral: float) -> Tensor | None:
    """[n_heads, d_head] of the heads' gains or biases; None where no head has any."""
    given = [getattr(norm, name) for norm in norms]
    like = next((tensor for tensor in given if tensor is not None), None)
    if like is None:
        return None
    return torch.stack([torch.full_like(like, neutral) if tensor is None else tensor.to(like) for tensor in given])
