"""One run of a model, and everything that can be asked of it.

A `Trace` holds what one run on a prompt, or on a left-padded batch of prompts, wrote into the stream. Everything else
is in the layers below, which this module only calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.attribution import Attribution, Score, attribute
from mainstem.analysis.certificate import Check, certify, check_reads, stream_errors
from mainstem.analysis.decompose import Decomposition, Level, decompose
from mainstem.analysis.lens import Lens, lens
from mainstem.analysis.path_expansion import PathExpansion
from mainstem.analysis.readout import NormConvention
from mainstem.analysis.scores import Scores
from mainstem.analysis.unit_tokens import DIRECTIONS
from mainstem.causal.outcomes import Verification
from mainstem.causal.query_check import QueryCheck
from mainstem.causal.repair import Repairs
from mainstem.errors import CertificateError
from mainstem.explain.explaining import explain
from mainstem.explain.querying import check, queries, totals
from mainstem.explain.scoring import scores
from mainstem.explain.unit_keys import input_key, input_target
from mainstem.explain.verifying import verify_trace
from mainstem.intervene.repairing import repair_trace
from mainstem.read.unit_reading import UnitReader
from mainstem.results.explanation import Explanation, Queries, QueryTotals
from mainstem.results.unit import Sigmoid, UnitReading
from mainstem.run.inputs import Inputs
from mainstem.run.trace import RunTrace
from mainstem.targets import Target
from mainstem.units import Unit
from mainstem.weights.expanding import path_expansion

if TYPE_CHECKING:
    from mainstem.session import Model


class Trace:
    """One run of a model on a prompt or a batch of prompts."""

    def __init__(
        self, model: "Model", inputs: Inputs, positions: Sequence[int], chat: bool = False, text: str | None = None
    ) -> None:
        self.model, self.inputs, self.chat, self.text = model, inputs, chat, text
        self.run = RunTrace(model.module, model.anatomy, inputs, positions, lambda: model.edits)

    def ids(self, row: int = 0) -> list[int]:
        """The token ids of one prompt, without padding."""
        return self.inputs.ids[row, self.inputs.padding[row] :].tolist()

    def tokens(self, row: int = 0) -> list[str]:
        """The tokens of one prompt as text."""
        return [self.model.token(token) for token in self.ids(row)]

    def decompose(self, level: Level = "sublayers", position: int = -1, row: int = 0) -> Decomposition:
        """The stream at one destination as a sum of parts, with its sum certificate.

        Args:
            level: sublayers, heads, subvalues, attention_neurons, neurons, or units (subvalues and neurons).
            position: the destination, negative from the end.
            row: which prompt of a batch.

        Raises:
            LevelRefusedError: if a sublayer cannot be split so.
            CertificateError: if the parts are not what the model computed; names the first layer and part.
        """
        made = decompose(self.run.moment(position, row), level)
        certificate = certify(made)
        try:
            certificate.require()
        except CertificateError as error:
            if not self.run.edits:
                raise
            points = ", ".join(str(edit.at) for edit in self.run.edits)
            remedy = f"The run was made under edits of {points}: parts no longer add up to what was given as a whole."
            raise CertificateError(error.what, error.where, remedy) from None
        return replace(made, certificate=certificate)

    def reads(self, position: int = -1, row: int = 0) -> Check:
        """The reads certificate at one destination."""
        return check_reads(decompose(self.run.moment(position, row), "sublayers"))

    def stream_errors(self, row: int = 0) -> Float[Tensor, " pos"]:
        """The relative error of the sum of all writes at every position."""
        captured, padding = self.run.first, self.inputs.padding[row]
        writes = [write[row, padding:] for write in captured.writes]
        gates = {gate: value[row, padding:] for gate, value in captured.gates.items()}
        return stream_errors(self.model.anatomy, writes, gates, captured.stream[row, padding:])

    def logits(self, position: int = -1, row: int = 0) -> Float[Tensor, " d_vocab"]:
        """The model's own logits at one destination."""
        return self.run.moment(position, row).logits

    def attribute(
        self, target: Target, level: Level = "units", score: Score = "direct", position: int = -1, row: int = 0
    ) -> Attribution:
        """Every part's share of a target under a linear score (`direct` or `additive`), frozen norm."""
        return attribute(self.decompose(level, position, row), target, score)

    def scores(self, target: Target, names: Sequence[str], **options: Any) -> Scores:
        """Several scores of every unit; see `mainstem.explain.scoring.scores` for the options."""
        return scores(self, target, names, **options)

    def lens(self, position: int = -1, row: int = 0, norm: NormConvention = "recompute") -> Lens:
        """The logit lens after every addition to the stream."""
        return lens(decompose(self.run.moment(position, row), "sublayers"), norm)

    def explain(self, **options: Any) -> Explanation:
        """Who wrote a prediction; see `mainstem.explain.explaining.explain` for the options."""
        return explain(self, **options)

    def verify(self, target: Target | str, counts: Mapping[str, int] | None = None, **options: Any) -> Verification:
        """A causal verdict on the units that a score names.

        See `mainstem.explain.verifying.verify_trace` for the options.
        """
        wanted = self.model.target(target) if isinstance(target, str) else target
        return verify_trace(self, wanted, counts, **options)

    def repair(self, units: Sequence[Unit | str], target: Target | str | None = None, **options: Any) -> Repairs:
        """Direct and total effects of units, and what later layers make good.

        See `mainstem.intervene.repairing.repair_trace`.
        """
        return repair_trace(self, units, target, **options)

    def unit_tokens(
        self, unit: Unit | str, top: int = 10, position: int = -1, row: int = 0, directions: int = DIRECTIONS
    ) -> UnitReading:
        """The tokens that a unit promotes and suppresses, beside what random directions of its norm would.

        Logits are centred, under the frozen norm, and the coefficient's sign is in them.

        Args:
            unit: an address of any level, such as L24N1005, L23H4@3, L5.mlp or embed.
            top: how many tokens to list on each side.
            position: the destination, negative from the end.
            row: which prompt of a batch.
            directions: how many random directions to draw, by the model's seed.

        Raises:
            UnitError: if there is no such unit; says which there are.
            LevelRefusedError: if its sublayer cannot be split so, or the readout is not a norm and an unembedding.
        """
        return UnitReader(self, top, position, row, directions).read(unit)

    def token_sigmoid(self, unit: Unit | str, token: str, position: int = -1, row: int = 0) -> Sigmoid:
        """A token's probability as the unit's before-softmax value on it grows from 0, and where the unit takes it.

        Raises:
            UnitError, TokenError: if there is no such unit or token.
            LevelRefusedError: if logits are capped or not linear after the norm, so that no sigmoid follows.
        """
        reader = UnitReader(self, position=position, row=row)
        return reader.sigmoid(reader.part(unit), self.model.target(token).token_id)

    def direction(self, unit: Unit | str, position: int = -1, row: int = 0) -> Target:
        """What a unit reads in the stream at the destination, as a target: `explain(direction="L27N846")` in two steps.

        For a neuron its key there (see `queries`), for a head and a source (L23H4@3) what the head's query side of
        the pattern's score reads, both through the norm before them at its scale.

        Raises:
            UnitError: if there is no such unit, or it does not read one direction.
            LevelRefusedError: if it has no key.
        """
        wanted = Unit.parse(unit) if isinstance(unit, str) else unit
        return input_target(input_key(self, wanted, position, row))

    def queries(self, unit: Unit | str, level: Level = "units", **options: Any) -> Queries:
        """Which earlier units activate a value unit; see `mainstem.explain.querying.queries` for the options."""
        return queries(self, unit, level, **options)

    def query_totals(
        self, values: Sequence[tuple[Unit | str, float]], over: str = "layers", **options: Any
    ) -> QueryTotals:
        """Query layers, heads or neurons over several value units; see `mainstem.explain.querying.totals`."""
        return totals(self, values, over, **options)

    def check_queries(self, unit: Unit | str, count: int = 10, **options: Any) -> QueryCheck:
        """Takes the first `count` queries of a value unit away in a real run; see `mainstem.explain.querying.check`."""
        return check(self, unit, count, **options)

    def path_expansion(self, row: int = 0) -> PathExpansion:
        """The logits of an attention-only model as sums over paths; see `mainstem.weights.expanding.path_expansion`."""
        return path_expansion(self, row)

    def write(self, unit: Unit | str, row: int = 0) -> Float[Tensor, "pos d_model"]:
        """What a sublayer wrote at every position, before post-norms and multipliers."""
        return self.run.write(unit, row)

    def __getitem__(self, name: str) -> Float[Tensor, "pos d_model"]:
        """A whole tensor by hook-style name (`blocks.5.hook_resid_post`) or sublayer address."""
        return self.run[name]
