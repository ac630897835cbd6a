"""Reading single units by their address: tokens promoted and suppressed beside a null, sigmoids of chosen tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.parts import Subvalues, carry, summed
from mainstem.analysis.unit_tokens import (
    DIRECTIONS,
    Part,
    Spread,
    centred_logits,
    require_part,
    spread,
    token_sigmoid,
    top_tokens,
)
from mainstem.errors import LevelRefusedError, UsageError
from mainstem.results.unit import Null, Sigmoid, TokenLogit, UnitReading
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.tracing import Trace

LEVEL_OF = {
    "embedding": "sublayers",
    "sublayer": "sublayers",
    "bias": "units",
    "rounding": "sublayers",
    "head": "heads",
    "attention_subvalue": "subvalues",
    "attention_neuron": "attention_neurons",
    "ffn_neuron": "neurons",
    "expert_neuron": "neurons",
}
"""For each kind of unit the decomposition that its part is looked up in."""


class UnitReader:
    """Reads units of one destination; decompositions and random directions are made once.

    Raises:
        UsageError: if there is nothing to list, or no direction to compare with.
    """

    def __init__(
        self,
        trace: "Trace",
        top: int = 10,
        position: int = -1,
        row: int = 0,
        directions: int = DIRECTIONS,
        seed: int | None = None,
    ) -> None:
        if top < 1 or directions < 2:
            raise UsageError("Nothing to list or to compare with", None, "List at least 1 token, draw 2 directions.")
        self.trace, self.top, self.position, self.row, self.directions = trace, top, position, row, directions
        self.seed = trace.model.seed if seed is None else seed
        self.made: dict[str, Decomposition] = {}
        self.drawn: Spread | None = None

    def decomposition(self, level: str) -> Decomposition:
        """The decomposition at the destination."""
        if level not in self.made:
            self.made[level] = self.trace.decompose(level, self.position, self.row)  # type: ignore[arg-type]
        return self.made[level]

    def part(self, address: Unit | str) -> Part:
        """The part with an address.

        Raises:
            UnitError: if it is no address, or there is no such unit; says which there are.
            LevelRefusedError: if its sublayer cannot be split so.
        """
        unit = Unit.parse(address) if isinstance(address, str) else address
        if unit.kind == "attention_neuron" and unit.source is not None:
            return self._from_one_source(unit)
        return require_part(self.decomposition(LEVEL_OF[unit.kind]), unit)

    def _from_one_source(self, unit: Unit) -> Part:
        """One entry of a head's value from one source: pattern weight x value entry x a column of W_O."""
        assert unit.layer is not None and unit.head_index is not None and unit.source is not None
        whole = Unit.subvalue(unit.layer, unit.head_index, unit.source, unit.nth)
        decomposition = self.decomposition("subvalues")
        part = require_part(decomposition, whole)
        neuron = Unit.attention_neuron(unit.layer, unit.head_index, unit.neuron or 0, nth=unit.nth)
        column = require_part(self.decomposition("attention_neurons"), neuron)
        group = part.group
        first: Subvalues = group.pieces[0]  # type: ignore[assignment]
        values = first.values[first.group[unit.head_index], unit.source].double()
        coefficient = part.coefficient * float(values[unit.neuron])
        index = torch.tensor([column.index], device=values.device)
        columns = [carry(piece.tail, piece.directions(index))[0] for piece in column.group.pieces]
        vector = coefficient * summed(columns)
        return Part(unit, group, part.index, coefficient, vector)

    def read(self, address: Unit | str, tokens: Sequence[int] = ()) -> UnitReading:
        """One unit's tokens with the null, and its sigmoid for each of `tokens` (ids).

        Raises:
            UnitError, LevelRefusedError: as `part`; LevelRefusedError if the readout is not linear after its norm.
        """
        part = self.part(address)
        decomposition = self.decomposition("sublayers")
        logits = centred_logits(decomposition, part.vector[None])[0]
        up, down = top_tokens(logits, self.top)
        source = part.unit.source
        return UnitReading(
            unit=str(part.unit),
            kind=part.unit.kind,
            coefficient=part.coefficient,
            size=float(part.vector.norm()),
            promotes=self._tokens(logits, up),
            suppresses=self._tokens(logits, down),
            null=self._null(decomposition, float(part.vector.norm()), float(logits.max()), -float(logits.min())),
            sigmoids=self.sigmoids(part, tokens),
            source=None if source is None else self.trace.tokens(self.row)[source],
        )

    def _tokens(self, logits: torch.Tensor, ids: torch.Tensor) -> list[TokenLogit]:
        name = self.trace.model.token
        return [TokenLogit(name(token), token, float(logits[token])) for token in ids.tolist()]

    def _null(self, decomposition: Decomposition, size: float, largest: float, smallest: float) -> Null:
        if self.drawn is None:
            self.drawn = spread(decomposition, self.directions, self.seed)
        null = self.drawn.largest * size
        mean, deviation, limit = float(null.mean()), float(null.std()), self.drawn.threshold(size)
        unit = max(deviation, 1e-300)
        return Null(
            directions=self.directions,
            null_max_mean=mean,
            null_max_deviation=deviation,
            z_promotes=(largest - mean) / unit if size else 0.0,
            z_suppresses=(smallest - mean) / unit if size else 0.0,
            promotes_beyond=largest > limit,
            suppresses_beyond=smallest > limit,
            beyond_null=max(largest, smallest) > limit,
        )

    def sigmoids(self, part: Part, tokens: Sequence[int]) -> list[Sigmoid]:
        """The part's sigmoid for each token; none where logits are capped or not linear."""
        try:
            return [self.sigmoid(part, token) for token in tokens]
        except LevelRefusedError:
            return []

    def sigmoid(self, part: Part, token: int) -> Sigmoid:
        """The part's sigmoid for one token.

        Raises:
            LevelRefusedError: if logits are capped or not linear after the norm.
        """
        level = "subvalues" if part.group.kind == "attention_subvalue" else LEVEL_OF[part.unit.kind]
        curve = token_sigmoid(self.decomposition(level), part, token)
        return Sigmoid(
            token=self.trace.model.token(token),
            id=token,
            log_a=curve.log_a,
            log_b=curve.log_b,
            values=curve.values.tolist(),
            probabilities=curve.probabilities.tolist(),
            value=curve.value,
            alone=curve.alone,
            others=curve.others,
            before=curve.before,
            probability=curve.probability,
        )
