"""What a model says of its weights: circuits, composition, subspaces; and its heads by behaviour.

Each answer is made by a module of this package; see there for options, formulas and sources.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mainstem.analysis.certificate import Check
from mainstem.analysis.stream_weights import Operands, StreamWeights
from mainstem.analysis.weights_of_model import stream_weights
from mainstem.causal.edited import unedited
from mainstem.errors import PositionError
from mainstem.face import Face
from mainstem.model.discovery import SHORT_PROBE, probe_ids, short_probe_ids
from mainstem.results.circuits import CircuitReading
from mainstem.results.composition import CompositionReading
from mainstem.results.heads import HeadsReading
from mainstem.results.subspace import SubspaceReading
from mainstem.results.trigram import TrigramReading
from mainstem.run.inputs import base_arguments, context_length
from mainstem.run.operands import operands_of
from mainstem.units import Unit
from mainstem.weights.bandwidth_reading import read_bandwidth
from mainstem.weights.circuit_reading import read_circuits
from mainstem.weights.comparing_subspaces import compare_subspaces
from mainstem.weights.composing import composition
from mainstem.weights.head_reading import read_heads
from mainstem.weights.managing_memory import find_erasers
from mainstem.weights.trigram_reading import read_trigram
from mainstem.weights.weights_checking import weights_certificate

if TYPE_CHECKING:
    from mainstem.session import Prompt


class WeightsFace(Face):
    """Questions about the weights."""

    @cached_property
    def weights(self) -> StreamWeights:
        """Every unit's read and write matrices as the stream sees them; see `mainstem.analysis.stream_weights`.

        Raises:
            RefusedError: if the stream cannot be discovered. What single heads lack is said when they are asked for.
        """
        return stream_weights(self._model.anatomy, self._operands, SHORT_PROBE)

    @cached_property
    def weights_check(self) -> Check:
        """The certificate of `weights`: some sublayers rebuilt from a run (see `mainstem.weights.weights_checking`)."""
        return weights_certificate(self._model, short_probe_ids(self._model.module)[0].tolist())

    def heads(self, *addresses: str, **options: Any) -> HeadsReading:
        """What every head does, by behaviour; see `mainstem.weights.head_reading.read_heads` for the options."""
        return read_heads(self._model, addresses, **options)

    def composition(self, kinds: Sequence[str] = ("q", "k", "v"), **options: Any) -> CompositionReading:
        """Who reads what whom wrote, from the weights; see `mainstem.weights.composing.composition` for the options."""
        return composition(self._model, kinds, **options)

    def head_circuits(self, head: Unit | str, *skip_trigram: str, **options: Any) -> CircuitReading:
        """QK and OV circuits of a head in the vocabulary.

        See `mainstem.weights.circuit_reading.read_circuits` for options.
        """
        return read_circuits(self._model, head, skip_trigram, **options)

    def skip_trigram(self, source: str, destination: str, out: str, **options: Any) -> TrigramReading:
        """All heads by a skip trigram; see `mainstem.weights.trigram_reading.read_trigram` for the options."""
        return read_trigram(self._model, source, destination, out, **options)

    def compare_subspaces(self, first: str, second: str, **options: Any) -> SubspaceReading:
        """How what two sets of units read or write overlaps.

        See `mainstem.weights.comparing_subspaces.compare_subspaces`.
        """
        return compare_subspaces(self._model, first, second, **options)

    def erasers(self, text: "Prompt | None" = None, **options: Any) -> SubspaceReading:
        """Units that write against what they read.

        See `mainstem.weights.managing_memory.find_erasers` for the options.
        """
        return find_erasers(self._model, text, **options)

    def bandwidth(self, text: "Prompt | None" = None) -> SubspaceReading:
        """Effective ranks of the stream, and who writes its variance; see `mainstem.weights.bandwidth_reading`."""
        return read_bandwidth(self._model, text)

    def _operands(self, positions: int) -> Operands:
        """The operands of every attention, of a run of the model itself on so many positions."""
        module, anatomy = self._model.module, self._model.anatomy
        limit = context_length(module)
        if limit is not None and positions > limit:
            raise PositionError(
                f"An offset of {positions - 1} is outside the model's context", None, f"It has {limit} positions."
            )
        ids = probe_ids(module)
        ids = ids.repeat(1, -(-positions // ids.shape[1]))[:, :positions]
        writes = [i for i, write in enumerate(anatomy.writes) if write.attention is not None]
        with unedited(module):
            return operands_of(module, anatomy, writes, ids, **base_arguments(module))
