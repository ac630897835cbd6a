"""A trace: what one run of a model wrote into its stream, kept for the destinations that were asked for.

Asking a trace for another destination runs the model again for it; nothing is approximated. Hook-style names
(`blocks.5.hook_resid_post`) are accepted for whole tensors.
"""

import re
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.errors import ChoiceError, NotFiniteError, PromptError, RunError, UnitError
from mainstem.model.anatomy import Anatomy
from mainstem.model.graph import evaluate
from mainstem.model.outputs import logits_of
from mainstem.run.capture import Captured, capture
from mainstem.run.inputs import Inputs, base_arguments
from mainstem.run.moment import Moment, moment
from mainstem.run.operands import AttentionOperands, attention_operands
from mainstem.units import Unit

MOMENTS = 8
HOOK = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_post|resid_mid|attn_out|mlp_out)$")


class RunTrace:
    """One run; `captures` hold its destinations.

    Args:
        module: the model; it is left as it was.
        anatomy: its anatomy.
        inputs: the batch.
        positions: destinations to keep from the first run, negative ones counted from the end.
        edits: tells the edits that hold when it is called; runs of one trace are made under the same.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        anatomy: Anatomy,
        inputs: Inputs,
        positions: Sequence[int],
        edits: Callable[[], tuple] = tuple,
    ) -> None:
        self.module, self.anatomy, self.inputs = module, anatomy, inputs
        self.edits, self._edits_now = edits(), edits
        self._captures: list[Captured] = []
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        self._moments: dict[tuple[int, int], Moment] = {}
        self._operands: dict[tuple[int, int], AttentionOperands] = {}
        self._run(list(positions))

    def require_same_edits(self) -> None:
        """Refuses to run the model again for this trace under other edits than it was made under.

        Raises:
            RunError: if other edits hold now.
        """
        if self._edits_now() != self.edits:
            made = "under edits that do not hold now" if self.edits else "without the edits that hold now"
            raise RunError(
                f"This trace was made {made}, and what is asked needs another run",
                None,
                "Ask inside the same `edited` block, or trace the destinations you need with positions=.",
            )

    def _run(self, positions: list[int]) -> None:
        self.require_same_edits()
        destinations = self.inputs.destinations(positions)
        captured = capture(self.module, self.anatomy, self.inputs.ids, destinations, **self.inputs.forward)
        _require_finite(self.anatomy, captured, self.inputs.padding, bool(self.edits))
        if not self._captures:
            self._require_rows_alone(captured)
        self._captures.append(captured)
        for row in range(self.inputs.ids.shape[0]):
            for column, position in enumerate(positions):
                key = (row, self.inputs.place(position, row))
                self._known.setdefault(key, (len(self._captures) - 1, column))

    @torch.no_grad()
    def _require_rows_alone(self, captured: Captured) -> None:
        """Padded rows must get what they get alone: some models number padded positions in a way of their own."""
        for row, padding in enumerate(self.inputs.padding):
            if not padding:
                continue
            ids = self.inputs.ids[row : row + 1, padding:]
            logits = logits_of(self.module(input_ids=ids, **base_arguments(self.module)))
            expected = logits[0, captured.destinations[row] - padding].double()
            seen = captured.logits[row].double()
            slack = max(1e-3, 16 * torch.finfo(logits.dtype).eps)
            if not float((seen - expected).norm()) <= slack * float(expected.norm()):
                raise PromptError(
                    "This model does not give a padded prompt what it gives it alone",
                    f"prompt {row} of the batch",
                    "Trace prompts of different lengths one at a time.",
                )

    def moment(self, position: int = -1, row: int = 0) -> Moment:
        """What the run left at one destination; runs the model again if it was not kept.

        Raises:
            PositionError: if the prompt has no such position.
        """
        place = self.inputs.place(position, row)
        if (row, place) not in self._known:
            self._run([place - self.inputs.length(row)])
        if (row, place) not in self._moments:
            if len(self._moments) == MOMENTS:
                self._moments.pop(next(iter(self._moments)))
            which, column = self._known[(row, place)]
            made = moment(self.anatomy, self._captures[which], row, column, self.inputs.padding[row])
            self._moments[(row, place)] = made
        return self._moments[(row, place)]

    def keep(self, positions: Sequence[int], row: int = 0) -> None:
        """Runs the model once for those destinations of a row that were not kept, so that no run is made for each."""
        places = sorted({self.inputs.place(position, row) for position in positions})
        wanted = [place - self.inputs.length(row) for place in places if (row, place) not in self._known]
        if wanted and min(wanted) >= -min(map(self.inputs.length, range(self.inputs.ids.shape[0]))):
            self._run(wanted)

    def operands(self, write: int, row: int = 0) -> AttentionOperands:
        """Query, key and value of the attention behind write number `write`; runs the model again when first asked.

        Raises:
            LevelRefusedError: if the attention call is not found again.
        """
        if (write, row) not in self._operands:
            self.require_same_edits()
            ids = self.inputs.ids[row : row + 1, self.inputs.padding[row] :]
            made = attention_operands(self.module, self.anatomy, write, ids, **base_arguments(self.module))
            self._operands[write, row] = made
        return self._operands[write, row]

    def write(self, unit: Unit | str, row: int = 0) -> Float[Tensor, "pos d_model"]:
        """What a sublayer or embedding wrote at every position, before any tail.

        Raises:
            UnitError: if the model has no such sublayer.
        """
        wanted = Unit.parse(unit) if isinstance(unit, str) else unit
        indices = self.anatomy.writes_of(wanted)
        if not indices:
            known = ", ".join(str(u) for u in self.anatomy.sublayers()[:8])
            raise UnitError(f"The model has no sublayer {wanted}", None, f"It has {known}, ...")
        return torch.stack([self._tokens(self._captures[0].writes[i], row) for i in indices]).sum(0)

    def stream(self, layer: int, row: int = 0) -> Float[Tensor, "pos d_model"]:
        """resid_pre of a block: the stream that enters it, at every position; layer n_layers is the final stream."""
        if layer == len(self.anatomy.blocks):
            return self._tokens(self._captures[0].stream, row)
        return self._node(self.anatomy.blocks[layer].input_node, row)

    def _node(self, node: int, row: int) -> Float[Tensor, "pos d_model"]:
        captured = self._captures[0]
        writes = [self._tokens(write, row) for write in captured.writes]
        gates = {gate: self._tokens(value, row) for gate, value in captured.gates.items()}
        value = evaluate(self.anatomy.graph, writes, gates).values[node]
        return value.clone()  # a write as it is would hold the memory of others

    def _tokens(self, tensor: Tensor, row: int) -> Tensor:
        return tensor[row, self.inputs.padding[row] :]

    def __getitem__(self, name: str) -> Float[Tensor, "pos d_model"]:
        """A whole tensor by its hook-style name or a sublayer's address, for the first prompt."""
        found = HOOK.match(name)
        if found is None:
            return self.write(name)
        layer, what = int(found[1]), found[2]
        if layer >= len(self.anatomy.blocks):
            last = len(self.anatomy.blocks) - 1
            raise UnitError(f"The model has no block {layer}", name, f"Blocks go from 0 to {last}.")
        if what in ("attn_out", "mlp_out"):
            return self.write(f"L{layer}.{what.removesuffix('_out')}")
        if what == "resid_pre":
            return self.stream(layer)
        if what == "resid_post":
            return self.stream(layer + 1)
        return self._node(self._middle(layer), 0)

    def _middle(self, layer: int) -> int:
        """The stream after a block's attention, where that is a state of its own."""
        anatomy = self.anatomy
        nodes = [n for n in anatomy.spine if str(anatomy.owners[n]) == f"L{layer}.attn"]
        if not nodes:
            raise ChoiceError("stream value", f"blocks.{layer}.hook_resid_mid", ("hook_resid_pre", "hook_resid_post"))
        return nodes[-1]

    @property
    def first(self) -> Captured:
        """The capture of the first run."""
        return self._captures[0]


def _require_finite(anatomy: Anatomy, captured: Captured, padding: tuple[int, ...], edited: bool) -> None:
    for i, write in enumerate(captured.writes):
        rows = [tensor[pad:] for tensor, pad in zip(write, padding, strict=True)]
        if not all(bool(torch.isfinite(row).all()) for row in rows):
            raise NotFiniteError(
                f"{anatomy.writes[i].unit} wrote NaN or infinity into the stream",
                anatomy.writes[i].module,
                f"Check {'the edits that hold, ' if edited else ''}the weights of this layer, or use a wider dtype.",
            )
