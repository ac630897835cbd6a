"""Factors for each dimension that a value of the stream is multiplied with, told from what they do.

A result is a gain times something that turns if it turns once the factor is one, and if the factor comes out of the
operation as it went in (`factors`). The parameter behind it may be the factor itself or any affine form of it, such as
1 + g: the value at which the factor is one is solved for (`Gains.gain`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mainstem.model.behaviour import affine
from mainstem.model.equivariance import Reflections
from mainstem.model.program import extract, one_call
from mainstem.model.recording import Call, Value
from mainstem.model.turning import Gain
from mainstem.model.turning_places import place_of, where


def is_vector(value: Value, width: int) -> bool:
    """Whether a value that does not depend on the tokens has one number for each dimension, on its last axis."""
    tensor = value.tensor
    whole = tensor.dim() > 0 and tensor.numel() == width == tensor.shape[-1]
    return whole and tensor.is_floating_point() and not value.active


def factors(
    result: Value, source: tuple[Value, int], vectors: Sequence[Value], opened: bool, reflections: Reflections
) -> Iterator[tuple[Value, Value | None, int]]:
    """The (factor, bias or None, axis of the result) out of `vectors` with which `result` is a gain times what turns.

    Args:
        result: what was made.
        source: the stream value that it was made of, and its axis.
        vectors: what may be a factor or a bias.
        opened: whether several calls made it.
        reflections: of the stream.
    """
    for factor in vectors:
        for bias in (None, *(v for v in vectors if v is not factor)):
            values = [source[0], factor] if bias is None else [source[0], factor, bias]
            program = extract(result, values) if opened else one_call(result, values)
            if program is None:
                continue
            inputs = [(value.tensor, source[1] if value is source[0] else -1) for value in values]
            axis = reflections.turns_with_ones(program, inputs)
            if axis is not None and reflections.is_factor(program, inputs, axis):
                yield factor, bias, axis


class GainBook:
    """The gains of one model: one for each parameter, however often it is used."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.found: list[Gain] = []

    def gain(self, factor: Value, call: Call) -> Gain:
        """The gain that a factor is."""
        parameter = factor
        while parameter.parameter is None and parameter.call is not None and parameter.call.func is not None:
            vectors = [o for o in parameter.call.operands() if is_vector(o, self.width)]
            if len(vectors) != 1:
                break
            parameter = vectors[0]
        if parameter.parameter is None:
            own = Gain(None, factor.tensor.double().reshape(-1), None, where(call), kept=True)
            self.found.append(own)
            return own
        place = place_of(parameter, -1, call.frame)
        value, unit = _solved(factor, parameter)
        same = [gain for gain in self.found if gain.place == place]
        known = next((gain for gain in same if torch.equal(gain.value, value)), None)
        if known is not None:
            return known
        own = Gain(place, value, unit, where(call), kept=unit is None)
        self.found.append(own)
        if same:  # one parameter, two factors: it cannot make both one
            for gain in (*same, own):
                gain.kept = True
        return own


def _solved(factor: Value, parameter: Value) -> tuple[Tensor, Tensor | None]:
    """The factor in float64, and the parameter's value at which it is one; None if it is no affine form of it."""
    own = parameter.tensor.double().reshape(-1)
    if parameter is factor:
        return own, torch.ones_like(own)
    program = extract(factor, [parameter])
    form = None if program is None else affine(program.in_float64, [parameter.tensor.double()], len(own))
    if form is None or not bool((form.factors[0] != 0).all()):
        return factor.tensor.double().reshape(-1), None
    slope, constant = form.factors[0].reshape(-1), form.constant.reshape(-1)
    return constant + slope * own, (1 - constant) / slope
