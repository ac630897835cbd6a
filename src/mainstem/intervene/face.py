"""What can be done to a model while it runs: edits, patching, knocking out, tracing causes, circuits.

Each answer is made by a module of this package; see there for options, formulas and sources.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mainstem.causal.causal_tracing import CausalTrace
from mainstem.causal.edge_attribution import EdgeScores
from mainstem.causal.edges import EdgeGraph, edge_graph
from mainstem.causal.edited import edited, edits_of, unedited
from mainstem.causal.edits import Edit
from mainstem.causal.knockouts import Knockouts
from mainstem.causal.patching import Sweep
from mainstem.causal.path_patching import PathEffects
from mainstem.causal.subspaces import Subspace
from mainstem.face import Face
from mainstem.intervene.attributing import (
    Circuit,
    PatchingEstimates,
    PatchPair,
    attribution_patching,
    circuit,
    edge_scores,
)
from mainstem.intervene.following_paths import patch_paths
from mainstem.intervene.generating import compare, generate
from mainstem.intervene.knocking_out import knock_out_attention
from mainstem.intervene.learning_subspaces import learn_subspace
from mainstem.intervene.patching import patch
from mainstem.intervene.steering import edit_of
from mainstem.intervene.tracing_causes import causal_trace
from mainstem.model.discovery import short_probe_ids
from mainstem.points import Point
from mainstem.results.generation import Compared, Generated
from mainstem.run.inputs import base_arguments

if TYPE_CHECKING:
    from mainstem.session import Model, Prompt


class InterventionsFace(Face):
    """Runs of the model in which something is changed."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that hold now (see `edited`), in their order."""
        return edits_of(self._model.module)

    @contextmanager
    def edited(self, *edits: Edit, prompt: int | None = None) -> Iterator["Model"]:
        """Every run of the model inside, traces and generations included, is made under the edits.

        Args:
            edits: in the order in which they are made; contexts may be nested, the outer one's come first.
            prompt: how many tokens count as the prompt; by default those of a generation's first pass.

        Raises:
            EditError, UnitError, LevelRefusedError: if an edit cannot be made, or two contradict each other.
        """
        model = self._model
        with edited(model.module, model.anatomy, edits, model.inputs, prompt):
            yield model

    def edit(self, written: str) -> Edit:
        """The edit that a text describes, such as "scale L9H8 0.5 @-1".

        See `mainstem.intervene.edit_text` for how to write one.

        Raises:
            EditError, UnitError, TargetError, PromptError: as `mainstem.intervene.steering.edit_of`.
        """
        return edit_of(self._model, written)

    def generate(self, prompt: "Prompt", count: int = 20, *edits: Edit, **options: Any) -> Generated:
        """What the model writes, under edits; see `mainstem.intervene.generating.generate` for the options."""
        return generate(self._model, prompt, count, edits, **options)

    def compare(self, prompt: "Prompt", *edits: Edit, **options: Any) -> Compared:
        """What the model writes with edits and without; see `mainstem.intervene.generating.compare` for the options."""
        return compare(self._model, prompt, edits, **options)

    def patch(
        self,
        clean: "Prompt",
        corrupted: "Prompt",
        answers: str | Sequence[str] = (),
        wrong_answers: str | Sequence[str] = (),
        **options: Any,
    ) -> Sweep:
        """A patching sweep between two prompts.

        See `mainstem.intervene.patching.patch` for metrics, grids and options.
        """
        return patch(self._model, clean, corrupted, answers, wrong_answers, **options)

    def patch_paths(self, clean: "Prompt", corrupted: "Prompt", *paths: Any, **options: Any) -> PathEffects:
        """Effects along direct paths; see `mainstem.intervene.following_paths.patch_paths` for paths and options."""
        return patch_paths(self._model, clean, corrupted, *paths, **options)

    def knock_out_attention(self, prompt: "Prompt", *sources: Any, **options: Any) -> Knockouts:
        """Attention to some sources knocked out, layer by layer.

        See `mainstem.intervene.knocking_out.knock_out_attention`.
        """
        return knock_out_attention(self._model, prompt, *sources, **options)

    def causal_trace(
        self, clean: "Prompt", corrupted: "Prompt | None" = None, *answers: Any, **options: Any
    ) -> CausalTrace:
        """Which states bring the answer back to a corrupted run.

        See `mainstem.intervene.tracing_causes.causal_trace`.
        """
        return causal_trace(self._model, clean, corrupted, *answers, **options)

    def learn_subspace(self, at: Point | str, counterfactuals: Sequence[Any], *size: int, **options: Any) -> Subspace:
        """A subspace that holds a variable, or not; see `mainstem.intervene.learning_subspaces.learn_subspace`."""
        return learn_subspace(self._model, at, counterfactuals, *size, **options)

    @cached_property
    def edges(self) -> EdgeGraph:
        """Who writes and who reads the stream, found once, by a run of each block with attention.

        Raises:
            LevelRefusedError: if a sublayer's reads cannot be told apart; names it.
        """
        module = self._model.module
        with unedited(module):
            return edge_graph(module, self._model.anatomy, short_probe_ids(module), **base_arguments(module))

    def attribution_patching(self, pair: PatchPair, **options: Any) -> PatchingEstimates:
        """What patching each unit would do, estimated; see `mainstem.intervene.attributing.attribution_patching`."""
        return attribution_patching(self._model, pair, **options)

    def edge_scores(self, pairs: PatchPair | Sequence[PatchPair], **options: Any) -> EdgeScores:
        """What corrupting each edge alone would do, estimated; see `mainstem.intervene.attributing.edge_scores`."""
        return edge_scores(self._model, pairs, **options)

    def circuit(self, pairs: PatchPair | Sequence[PatchPair], size: int, **options: Any) -> Circuit:
        """The circuit of a size, and what it does by itself.

        See `mainstem.intervene.attributing.circuit` for the options.
        """
        return circuit(self._model, pairs, size, **options)
