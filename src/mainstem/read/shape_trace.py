"""The trace of shapes: every tensor of one real run, from token ids to logits, with its axes and sizes.

    stream [batch, pos, d_model]  ->  q, k, v  ->  heads  ->  pattern x v  ->  W_O  ->  + stream
                                  ->  W_in  ->  non-linearity  ->  W_out  ->  + stream

All sizes are read off what a run left behind, nothing off a configuration. The one tensor that is never formed here
is a whole pattern [n_heads, pos, source]: its rows are recomputed one destination at a time.

Cost: one forward pass with the rows of every position kept.
Limits: the run's tensors are seen where the anatomy looks; what a model does inside a mixer stays inside.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.model.anatomy import Anatomy, Read, Write
from mainstem.results.description import ShapeRow
from mainstem.run.capture import Captured
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model
    from mainstem.tracing import Trace

STREAM = ["batch", "pos", "d_model"]
MATRICES = {"query": "W_Q", "key": "W_K", "value": "W_V", "gate": "W_gate", "up": "W_in", "router": "W_router",
            "output_gate": "W_output_gate"}  # fmt: skip
RESULTS = {"query": "q", "key": "k", "value": "v", "gate": "gate", "up": "up", "router": "router",
           "output_gate": "output gate"}  # fmt: skip
WIDTHS = {"query": "n_heads d_head", "key": "n_key_value_heads d_head", "value": "n_key_value_heads d_head",
          "gate": "d_mlp", "up": "d_mlp", "router": "n_experts"}  # fmt: skip

EMBEDDED = {
    "embed": "one row of the table for each token",
    "embed.pos": "one row for each position",
    "embed.type": "the same row everywhere",
}

NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "gelu (sigmoid)": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu squared": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}
"""Functions that a non-linearity is compared with, by their values in the run."""


def shape_rows(
    model: "Model", prompt: str | Sequence[int], chat: bool = False
) -> tuple[dict[str, Any], list[ShapeRow]]:
    """The prompt as it was run, and the shapes of the tensors of the run.

    Raises:
        PromptError, TokenError: if the prompt cannot be run.
    """
    ids = model.encode(prompt, chat)
    trace = model.trace(ids, positions=range(len(ids)) if ids else (-1,))
    text = prompt if isinstance(prompt, str) else None
    shown = {"text": text, "tokens": trace.tokens(), "ids": trace.ids()}
    return shown, _Rows(trace).all()


class _Rows:
    """Collects the rows of one run in the order of the data's way."""

    def __init__(self, trace: "Trace") -> None:
        self.anatomy: Anatomy = trace.model.anatomy
        self.run: Captured = trace.run.first
        self.batch, self.positions, self.width = self.run.stream.shape
        self.rows: list[ShapeRow] = []
        self.layer: int | None = None

    def all(self) -> list[ShapeRow]:
        self.add(None, "ids", "the tokens", ["batch", "pos"], [self.batch, self.positions])
        for unit in self.anatomy.sublayers():
            if unit.layer is None:
                write = self.anatomy.writes[self.anatomy.writes_of(unit)[0]]
                self.stream(unit, str(unit), EMBEDDED[unit.place], write.module)
        for block in self.anatomy.blocks:
            self.layer = block.layer
            self.stream(None, "stream", "what enters the block", block.path)
            for unit in dict.fromkeys(self.anatomy.writes[i].unit for i in block.writes):
                self.sublayer(unit)
        self.layer = None
        self.readout()
        return self.rows

    def add(
        self, unit: Unit | None, tensor: str, how: str, axes: list[str], shape: Sequence[int],
        matrix: bool = False, module: str | None = None,
    ) -> None:  # fmt: skip
        name = None if unit is None else str(unit)
        self.rows.append(ShapeRow(self.layer, name, tensor, how, axes, list(shape), matrix, module))

    def stream(self, unit: Unit | None, tensor: str, how: str, module: str | None = None) -> None:
        self.add(unit, tensor, how, STREAM, [self.batch, self.positions, self.width], module=module)

    # --- one sublayer -------------------------------------------------------------------------------------

    def sublayer(self, unit: Unit) -> None:
        indices = self.anatomy.writes_of(unit)
        reads = [(i, read) for i, read in enumerate(self.anatomy.reads) if read.unit == unit]
        if any(read.node not in self.anatomy.spine for _, read in reads):
            self.stream(unit, "normed stream", "the norm")
        for index, read in reads:
            self.read(unit, read, self.run.reads[index])
        for index in indices:
            write = self.anatomy.writes[index]
            if write.attention is not None:
                self.heads(unit, write)
            if write.neurons:
                self.neurons(unit, index, reads)
            if write.experts is not None:
                self.experts(unit, write)
            self.output(unit, index)
        self.stream(unit, "stream", f"+ {unit}")

    def read(self, unit: Unit, read: Read, result: Tensor) -> None:
        role = read.roles[0]
        name = "W_QKV" if {"query", "key", "value"} <= set(read.roles) else MATRICES.get(role, "W_in")
        many = len(read.roles) > 1
        axis = "d_out" if many else _merged(WIDTHS.get(role, "d_out"))
        if axis == "d_mlp" and self.has_experts(unit):
            axis = "d_expert"
        self.add(unit, name, "reads the stream", [axis, "d_model"], read.weight.shape, True, read.module)
        out = ", ".join(RESULTS.get(r, "input") for r in read.roles)
        self.add(unit, out, f"{name} x", ["batch", "pos", axis], [self.batch, self.positions, result.shape[-1]])

    def has_experts(self, unit: Unit) -> bool:
        """Whether a sublayer is a sum over experts, whose neurons need not be as many as a dense sublayer's."""
        writes = [self.anatomy.writes[i] for i in self.anatomy.writes_of(unit)]
        return any(write.experts is not None for write in writes)

    def heads(self, unit: Unit, write: Write) -> None:
        core = write.attention
        assert core is not None
        run = self.run.attention[core.site]
        if run.query is not None and run.key is not None:
            self.add(unit, "q of heads", "split into heads", ["batch", "n_heads", "pos", "d_head"], run.query.shape)
            self.add(
                unit,
                "k of heads",
                "split into heads",
                ["batch", "n_key_value_heads", "source", "d_head"],
                run.key.shape,
            )
        assert run.value is not None
        self.add(
            unit, "v of heads", "split into heads", ["batch", "n_key_value_heads", "source", "d_head"], run.value.shape
        )
        sources = run.value.shape[2]
        pattern = [self.batch, core.n_heads, self.positions, sources]
        how = "softmax of q . k over sources" if run.pattern is None else "as the model made it"
        self.add(unit, "pattern", how, ["batch", "n_heads", "pos", "source"], pattern)
        result = [self.batch, core.n_heads, self.positions, core.channels.shape[1]]
        self.add(unit, "z of heads", "pattern x v", ["batch", "n_heads", "pos", "d_head"], result)

    def neurons(self, unit: Unit, index: int, reads: list[tuple[int, Read]]) -> None:
        activations = self.run.sources[index]
        before = {r: self.run.reads[i] for i, read in reads for r in read.roles if len(read.roles) == 1}
        shape = [self.batch, self.positions, activations.shape[-1]]
        width = "d_expert" if self.has_experts(unit) else "d_mlp"
        self.add(unit, "activations", _neuron_formula(before, activations), ["batch", "pos", width], shape)

    def experts(self, unit: Unit, write: Write) -> None:
        site = write.experts
        assert site is not None
        parts = self.run.experts[site][0]
        for rows in parts.rows:
            chosen = (rows.weight != 0).sum(1)
            how = f"{int(chosen.min())} to {int(chosen.max())} experts for each token"
            self.add(unit, "activations of experts", how, ["token", "d_expert"], rows.hidden.shape)
            matrix = rows.of(0).shape
            self.add(unit, "W_out of an expert", "writes", ["d_model", "d_expert"], matrix, True, site.path)

    def output(self, unit: Unit, index: int) -> None:
        write = self.anatomy.writes[index]
        if write.projection is not None:
            attention = write.attention is not None
            name = "W_O" if attention else "W_out"
            axis = _merged("n_heads d_head") if attention else "d_in"
            if write.neurons:
                axis = "d_expert" if self.has_experts(unit) else "d_mlp"
            if attention:
                shape = [self.batch, self.positions, write.projection.n_in]
                self.add(unit, "z", "heads side by side", ["batch", "pos", axis], shape)
            shape = [write.projection.columns(slice(0, 0)).shape[0], write.projection.n_in]
            self.add(unit, name, "writes", ["d_model", axis], shape, True, write.module)
        tensor = self.run.writes[index]
        how = "W_O z" if write.attention is not None else "W_out activations" if write.neurons else "the write"
        self.add(unit, str(unit), how, STREAM, tensor.shape, module=write.module)

    def readout(self) -> None:
        readout = self.anatomy.readout
        self.add(None, "stream", "after the last block", STREAM, self.run.stream.shape)
        if readout.norm is not None:
            self.stream(None, "normed stream", "the final norm")
        if readout.unembedding.numel():
            self.add(None, "W_U", "reads the stream", ["d_vocab", "d_model"], readout.unembedding.shape, True)
        vocabulary = self.run.logits.shape[-1]
        self.add(None, "logits", "W_U x", ["batch", "pos", "d_vocab"], [self.batch, self.positions, vocabulary])


def _merged(axes: str) -> str:
    """Axes laid side by side in one, as einops writes them."""
    return f"({axes})" if " " in axes else axes


def _neuron_formula(before: dict[str, Tensor], activations: Tensor) -> str:
    """How activations come from what W_gate and W_in gave: compared with known functions by value."""
    after = activations.double().reshape(-1, activations.shape[-1])
    up, gate, unit = before.get("up"), before.get("gate"), torch.finfo(activations.dtype).eps
    flat = {n: t.double().reshape(-1, t.shape[-1]) for n, t in (("up", up), ("gate", gate)) if t is not None}
    if any(t.shape != after.shape for t in flat.values()) or not flat:
        return "the non-linearity"
    if "gate" in flat and "up" in flat:
        name = _nonlinearity(flat["gate"], after, flat["up"], unit)
        return f"{name}(gate) up"
    name = _nonlinearity(next(iter(flat.values())), after, None, unit)
    return f"{name}({next(iter(flat))})"


def _nonlinearity(before: Tensor, after: Tensor, factor: Tensor | None, unit: float) -> str:
    """The known function that comes nearest, entry by entry; "f" where none comes near.

    Entries count alike, by their relative error: a few massive activations would let any function pass that is right
    for large numbers.
    """
    errors = {}
    for name, function in NONLINEARITIES.items():
        expected = function(before) if factor is None else function(before) * factor
        size = expected.abs() + after.abs()
        errors[name] = float(((expected - after).abs() / size.clamp_min(1e-30)).mean())
    nearest = min(errors, key=lambda name: errors[name])
    return nearest if errors[nearest] <= max(1e-4, 8 * unit) else "f"
