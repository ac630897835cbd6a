"""Turning an anatomy into a description: plain rows of what was discovered, for people and programs to read.

Each row repeats what the anatomy holds, with tensors reduced to their shapes and to their least and largest entry.
Cost: nothing is run, apart from the labels certificate and, for the shapes, one forward pass (see `shape_trace`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mainstem.analysis import warnings as warn
from mainstem.model.anatomy import Anatomy, Readout, Write
from mainstem.model.graph import NormNode, SumNode, Term, behind, children
from mainstem.model.norms import Norm
from mainstem.read.shape_trace import shape_rows
from mainstem.results.description import (
    AnatomyDescription,
    BlockRow,
    FinalRow,
    HeadsRow,
    LevelRow,
    NormRow,
    ReadRow,
    RefusalRow,
    StepRow,
    StreamRow,
    WriteRow,
)
from mainstem.results.reading import CheckSummary

if TYPE_CHECKING:
    from mainstem.session import Model

LEVELS = ("sublayers", "heads", "subvalues", "attention_neurons", "neurons")


def describe_anatomy(
    model: "Model", prompt: "str | Sequence[int] | None" = None, chat: bool = False
) -> AnatomyDescription:
    """The anatomy of a model as plain rows.

    Args:
        model: the model.
        prompt: with text or token ids, the shapes of the tensors of a real run of it are listed too.
        chat: whether to wrap the prompt in the model's chat template.

    Raises:
        AnatomyError: if the stream cannot be discovered.
        PromptError, TokenError: if the prompt cannot be run.
    """
    anatomy, loaded, labels = model.anatomy, model.loaded, model.labels
    shown, shapes = (None, None) if prompt is None else shape_rows(model, prompt, chat)
    return AnatomyDescription(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in _warnings(anatomy)],
        model={
            "name": loaded.name,
            "class": type(model.module).__name__,
            "parameters": sum(p.numel() for p in model.module.parameters()),
            "n_layers": anatomy.sizes.n_layers,
            "d_model": anatomy.sizes.d_model,
            "dtype": loaded.dtype,
        },
        sizes=_sizes(anatomy),
        tied=anatomy.tied,
        causal=anatomy.causal,
        positions=anatomy.positions,
        blocks=[_block(anatomy, block) for block in anatomy.blocks],
        writes=[_write(anatomy, i) for i in range(len(anatomy.writes))],
        reads=[_read(anatomy, read) for read in anatomy.reads],
        stream=_stream(anatomy),
        final=_final(anatomy.readout),
        levels=[_level(anatomy, level) for level in LEVELS],
        labels=CheckSummary(labels.checked, labels.worst, labels.tolerance, labels.holds, labels.where),
        prompt=shown,
        shapes=shapes,
        notes=list(anatomy.notes),
    )


def _warnings(anatomy: Anatomy) -> list[warn.Warning]:
    if anatomy.causal:
        return []
    text = "this model attends both ways: a prediction may depend on tokens after it."
    return [warn.Warning("both-ways", text, 1.0)]


def _sizes(anatomy: Anatomy) -> dict[str, Any]:
    sizes = vars(anatomy.sizes)
    return {name: list(size) if isinstance(size, tuple) else size for name, size in sizes.items()}


def _range(tensor: Tensor) -> list[float]:
    return [float(tensor.min()), float(tensor.max())]


def _norm(norm: Norm | None) -> NormRow | None:
    if norm is None:
        return None
    gain = None if norm.gain is None else _range(norm.gain)
    return NormRow("layer" if norm.centred else "rms", norm.eps, gain, norm.bias is not None)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- rows -------------------------------------------------------------------------------------------------


def _block(anatomy: Anatomy, block) -> BlockRow:
    sublayers = list(dict.fromkeys(str(anatomy.writes[i].unit) for i in block.writes))
    return BlockRow(block.layer, block.path, block.call, sublayers, _owner(anatomy, block.input_node))


def _owner(anatomy: Anatomy, node: int) -> str | None:
    owner = anatomy.owners[node]
    return None if owner is None else str(owner)


def _write(anatomy: Anatomy, index: int) -> WriteRow:
    write = anatomy.writes[index]
    tail = _tail(anatomy, anatomy.write_nodes[index])
    coefficient = 1.0
    for step in tail:
        coefficient *= 1.0 if step.factor is None else step.factor
    return WriteRow(
        unit=str(write.unit),
        layer=write.unit.layer,
        module=write.module,
        dtype=_dtype(write.dtype),
        matrix=_matrix(write),
        coefficient=coefficient,
        tail=tail,
        bias=write.bias is not None,
        heads=_heads(write),
        neurons=write.projection.n_in if write.neurons and write.projection is not None else None,
        shared_expert=write.shared_expert,
        experts=write.experts is not None,
        refused=dict(write.refusals),
    )


def _matrix(write: Write) -> list[int] | None:
    if write.projection is None:
        return None
    return [write.projection.columns(slice(0, 0)).shape[0], write.projection.n_in]


def _heads(write: Write) -> HeadsRow | None:
    core = write.attention
    if core is None:
        return None
    return HeadsRow(
        n_heads=core.n_heads,
        n_key_value_heads=core.n_key_value_heads,
        d_head=core.channels.shape[1],
        scaling=core.scaling,
        fused=core.fused,
    )


def _read(anatomy: Anatomy, read) -> ReadRow:
    steps = _way(anatomy, read.node, read.stream_node)
    norms = [step.norm for step in steps if step.norm is not None]
    return ReadRow(
        unit=str(read.unit),
        layer=read.unit.layer,
        roles=list(read.roles),
        module=read.module,
        matrix=list(read.weight.shape),
        bias=read.bias is not None,
        after=_owner(anatomy, read.stream_node),
        norm=norms[0] if norms else None,
        factors=[step for step in steps if step.norm is None],
        head_norm=_norm(read.head_norm),
        dtype=_dtype(read.dtype),
    )


def _final(readout: Readout) -> FinalRow:
    before = None
    if readout.before is not None:
        matrices = [factor for factor in readout.before.factors if factor.dim() == 2]
        before = [matrices[-1].shape[0], matrices[0].shape[1]] if matrices else None
    return FinalRow(
        norm=_norm(readout.norm),
        before=before,
        unembedding=list(readout.unembedding.shape),
        bias=readout.bias is not None,
        scale=readout.scale,
        softcap=readout.softcap,
        opaque=readout.opaque,
    )


def _level(anatomy: Anatomy, level: str) -> LevelRow:
    refused = [RefusalRow(str(unit), reason) for unit, reason in anatomy.refusals(level).items()]
    count = 0
    for core in {id(w.attention): w.attention for w in anatomy.writes if w.attention is not None}.values():
        if level in ("heads", "subvalues"):
            count += core.n_heads
        elif level == "attention_neurons":
            count += core.channels.numel()
    if level == "sublayers":
        count = len(anatomy.sublayers())
    units = _neurons(anatomy) if level == "neurons" else count
    return LevelRow(level, units, level == "subvalues", refused)


def _neurons(anatomy: Anatomy) -> int:
    """All neurons that a run may use: of dense layers and shared experts, and of all experts that may be chosen."""
    dense = {  # pieces of one matrix, such as an adapter's, share their neurons
        (w.unit, w.shared_expert, w.first_neuron): w.projection.n_in
        for w in anatomy.writes
        if w.neurons and w.projection is not None
    }
    return sum(dense.values()) + sum(w.n_experts * w.expert_width for w in anatomy.writes)


# --- the way between a write or a read and the stream --------------------------------------------------------


def _tail(anatomy: Anatomy, node: int) -> list[StepRow]:
    """The steps from a write to the first state of the stream that holds it."""
    spine, used = set(anatomy.spine), sorted(behind(anatomy.graph, anatomy.graph.root), reverse=True)
    steps: list[StepRow] = []
    while node not in spine:
        above = next((i for i in used if node in children(anatomy.graph, i)), None)
        if above is None:
            break
        steps += _steps(anatomy, above, node)
        node = above
    return _with_gain(steps)


def _way(anatomy: Anatomy, node: int, stream: int) -> list[StepRow]:
    """The steps from a state of the stream to a value that is read; none where the stream itself is read."""
    steps: list[StepRow] = []
    while node != stream and node not in anatomy.spine:
        below = children(anatomy.graph, node)
        if len(below) != 1:
            break
        steps = _steps(anatomy, node, below[0]) + steps
        node = below[0]
    return _with_gain(steps)


def _steps(anatomy: Anatomy, above: int, below: int) -> list[StepRow]:
    """What the value of node `below` passes on its way into node `above`."""
    made = anatomy.graph.nodes[above]
    if isinstance(made, NormNode):
        return [StepRow("norm", norm=_norm(made.norm))]
    if isinstance(made, SumNode):
        return [step for term in made.terms if term.node == below for step in _term_steps(term)]
    return []


def _with_gain(steps: list[StepRow]) -> list[StepRow]:
    """A norm without gain and the factor after it are one norm with a gain: where models apply the two apart."""
    out: list[StepRow] = []
    for step in steps:
        last = out[-1].norm if out else None
        if last is not None and last.gain is None and not last.bias and step.dimensions is not None:
            out[-1] = StepRow("norm", norm=replace(last, gain=step.dimensions))
        else:
            out.append(step)
    return out


def _term_steps(term: Term) -> list[StepRow]:
    steps: list[StepRow] = []
    if isinstance(term.factor, Tensor) and term.factor.numel() > 1:
        steps.append(StepRow("factor", dimensions=_range(term.factor)))
    elif float(term.factor) != 1.0:
        steps.append(StepRow("factor", factor=float(term.factor)))
    if term.gate is not None:
        power = "" if term.gate.power > 0 else "1 / "
        constant = None if term.gate.factor == 1.0 else term.gate.factor
        steps.append(StepRow("gate", factor=constant, gate=f"{power}{term.gate.site}"))
    return steps


def _stream(anatomy: Anatomy) -> list[StreamRow]:
    """Norms, factors and gates on the stream's own way from one state to the next."""
    found: dict[str, list[StepRow]] = {}
    for before, after in zip(anatomy.spine, anatomy.spine[1:], strict=False):
        found.setdefault(_owner(anatomy, after) or "", []).extend(_steps(anatomy, after, before))
    return [StreamRow(unit, step) for unit, steps in found.items() for step in _with_gain(steps)]
