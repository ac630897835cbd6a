"""How much of each write a narrow stream loses: the writes of a real run, added up again in float32, bf16 and fp16.

The run itself is made in the model's dtype, once. Its writes are taken as they are, and only the additions to the
stream are made again, in each dtype, against the exact sum (`mainstem.analysis.rounding`): a run in that dtype would
also round inside sublayers, and that is not measured here. Where the stream is not a plain sum (norms after an
addition, factors of the skip connection), the change of the stream from one state to the next stands for the write.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.rounding import (
    DTYPES,
    LARGE,
    SMALL,
    AddedUp,
    Addition,
    added_up,
    addition,
    one_is_lost_from,
)
from mainstem.analysis.warnings import Warning, overflow_warning
from mainstem.basis.reference import Reference, reference
from mainstem.lab.texts import Text
from mainstem.model.graph import NormNode, StreamGraph, SumNode, behind, evaluate
from mainstem.model.spine import spine_states
from mainstem.results.basis_report import BasisReport
from mainstem.results.basis_rounding import AdditionRow, DtypeRow, RoundingSection, WriteRow
from mainstem.run.inputs import context_length
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS = 256


def read_rounding(model: "Model", text: Text | str | Path = "drama", tokens: int = TOKENS) -> BasisReport:
    """Adds a run's writes up again in each dtype.

    Args:
        model: the model; it is not changed.
        text: what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of it are the prompt; the model's context at most.

    Raises:
        UsageError: fewer than two tokens.
        TextError: the text cannot be had, or is shorter than that.
        NotFiniteError: the run writes NaN or infinity; names the layer.
    """
    whole_number("tokens", tokens, 2)
    length = min(tokens, context_length(model.module) or tokens)
    on = reference(model, text, length, length)
    section = rounding_section(model, on)
    return BasisReport(
        provenance=model.provenance(),
        warnings=[warning.as_dict() for warning in overflows(section)],
        model=model.summary,
        text=on.summary(),
        rounding=section,
        command="basis rounding",
    )


def rounding_section(model: "Model", on: Reference) -> RoundingSection:
    """The section of the report, on the first window of a text."""
    ids = on.windows.ids[0].tolist()
    states, units = stream_states(model, ids)
    writes = [states[0], *(after - before for before, after in zip(states, states[1:], strict=False))]
    made = {_name(dtype): added_up(writes, dtype) for dtype in DTYPES}
    sizes = [_size(before, write) for before, write in zip(states, writes[1:], strict=False)]
    return RoundingSection(
        tokens=len(ids),
        additions=[_addition(each) for each in _additions()],
        dtypes=[_dtype(name, added, units) for name, added in made.items()],
        writes=[row for name, added in made.items() for row in _writes(name, added, units[1:], sizes)],
        plain_sum=_plain(model.anatomy.graph),
    )


@torch.no_grad()
def stream_states(model: "Model", ids: list[int]) -> tuple[list[Float[Tensor, "pos d_model"]], list[str]]:
    """The stream after each unit wrote, in float64 and without any rounding of sums, and these units."""
    captured = model.trace(ids).run.first
    graph = model.anatomy.graph
    wide = StreamGraph(tuple(replace(node, dtype=torch.float64) for node in graph.nodes), graph.root)
    gates = {gate: value[0].double() for gate, value in captured.gates.items()}
    values = evaluate(wide, [write[0].double() for write in captured.writes], gates).values
    nodes, units = spine_states(model.anatomy)
    return [values[node] for node in nodes], [str(unit) for unit in units]


def _plain(graph: StreamGraph) -> bool:
    """Whether nothing but additions happens to the stream."""
    nodes = [graph.nodes[i] for i in behind(graph, graph.root)]
    if any(isinstance(node, NormNode) for node in nodes):
        return False
    terms = [term for node in nodes if isinstance(node, SumNode) for term in node.terms]
    return all(term.gate is None and isinstance(term.factor, float) and term.factor == 1.0 for term in terms)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _additions() -> list[Addition]:
    """The published pair, and for each dtype the first power of two to which 1 is added in vain."""
    pairs = [addition(LARGE, SMALL, dtype) for dtype in DTYPES]
    return pairs + [addition(one_is_lost_from(dtype), 1.0, dtype) for dtype in DTYPES]


def _addition(one: Addition) -> AdditionRow:
    total, spacing = (value if math.isfinite(value) else None for value in (one.total, one.spacing))
    return AdditionRow(_name(one.dtype), one.large, one.small, total, total is not None and one.lost, spacing)


def _size(before: Tensor, write: Tensor) -> float:
    return float((write.norm(dim=-1) / before.norm(dim=-1))[1:].mean())


def _dtype(name: str, added: AddedUp, units: list[str]) -> DtypeRow:
    if added.overflow is not None:
        return DtypeRow(name, None, None, None, None, added.largest, units[added.overflow])
    lost = torch.stack([step.lost[1:].mean() for step in added.steps]).mean()
    vanished = torch.stack([step.vanished[1:].mean() for step in added.steps]).mean()
    last = added.steps[-1].error
    return DtypeRow(name, float(lost), float(vanished), float(last[1:].mean()), float(last[0]), added.largest, None)


def _writes(name: str, added: AddedUp, units: list[str], sizes: list[float]) -> list[WriteRow]:
    return [
        WriteRow(
            name, unit, size, float(step.lost[1:].mean()), float(step.lost[0]), float(step.vanished[1:].mean()),
            float(step.error[1:].mean()), float(step.error[0]),
        )
        for step, unit, size in zip(added.steps, units, sizes, strict=False)
    ]  # fmt: skip


def overflows(section: RoundingSection) -> list[Warning]:
    """A warning for each dtype that cannot hold the stream."""
    return [
        warning
        for row in section.dtypes
        if row.overflow is not None
        for warning in overflow_warning(row.dtype, row.overflow, row.largest)
    ]
