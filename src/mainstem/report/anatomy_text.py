"""An anatomy in words: what both its tables and its page say of sizes, writes, reads, steps and levels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mainstem.report.alike import BlockGroup, units_text
from mainstem.report.text import compact, count, plural, sizes, span
from mainstem.results.description import AnatomyDescription, LevelRow, NormRow, ReadRow, StepRow, WriteRow

EMBEDDED = {
    "embed": "a row for each token",
    "embed.pos": "a row for each position",
    "embed.type": "one row",
}


@dataclass(frozen=True)
class Line:
    """A line of the data's way through a block: who, reads or writes or passes through, what, by which matrix."""

    unit: str
    verb: str
    what: str
    matrix: str = ""
    module: str = ""


def sizes_text(values: dict[str, Any]) -> str:
    """All sizes that the model has, by the field's names; layer by layer where they differ."""
    shown = []
    for name, value in values.items():
        if value is not None and name != "n_layers":
            text = count(value) if isinstance(value, int) else "/".join(count(n) for n in value)
            shown.append(f"{name}={text}")
    return ", ".join(shown)


def facts_text(a: AnatomyDescription) -> str:
    """Embeddings, causality and positions in a sentence."""
    tied = "embedding and unembedding are one matrix" if a.tied else "embedding and unembedding are two matrices"
    causal = "causal" if a.causal else "not causal: attends both ways"
    return f"{tied}; {causal}; positions are {a.positions}"


# --- blocks -----------------------------------------------------------------------------------------------


def embedding_lines(a: AnatomyDescription) -> list[Line]:
    """The writes before the blocks."""
    return [
        line
        for write in a.writes
        if write.layer is None
        for line in _write_lines(write, [write.coefficient], first=True)
    ]


def block_lines(group: BlockGroup) -> list[Line]:
    """The data's way through each sublayer: norm, reads, write, and what the write passes before the addition."""
    lines: list[Line] = []
    for unit in dict.fromkeys(write.unit for write in group.writes):
        before = None
        for read in group.reads:
            if read.unit != unit:
                continue
            steps = read_steps(read)
            if steps != before:
                lines.append(Line(unit, "through", steps))
            before = steps
            norm = "" if read.head_norm is None else f", then {norm_text(read.head_norm)}"
            lines.append(Line("", "reads", ", ".join(read.roles) + norm, _matrix(read.matrix, read.bias), read.module))
        for write, factors in zip(group.writes, group.factors, strict=True):
            if write.unit == unit:
                lines += _write_lines(write, factors, first=before is None)
    return lines


def _write_lines(write: WriteRow, factors: Sequence[float], first: bool) -> list[Line]:
    unit = write.unit if first else ""
    lines = [Line(unit, "writes", writes_text(write), _matrix(write.matrix, write.bias), write.module)]
    if tail := tail_text(write, factors):
        lines.append(Line("", "through", tail))
    return lines + [Line("", "refused", f"{level}: {reason}") for level, reason in write.refused.items()]


def _matrix(shape: Sequence[int] | None, bias: bool) -> str:
    return "" if shape is None else sizes(shape) + (" + bias" if bias else "")


def read_steps(read: ReadRow) -> str:
    """What stands between the stream and what reads it."""
    steps = ([norm_text(read.norm)] if read.norm is not None else []) + [step_text(step) for step in read.factors]
    return ", ".join(steps) or "nothing: the stream as it is"


def tail_text(write: WriteRow, factors: Sequence[float]) -> str:
    """What a write passes before it is added: norms, gates, factors; empty for a plain addition."""
    tail = [step_text(step) for step in write.tail if step.kind != "factor" or step.dimensions is not None]
    if any(factor != 1.0 for factor in factors):
        tail.append(f"× {span(factors)}")
    return ", ".join(tail)


def writes_text(write: WriteRow) -> str:
    """What a write is a sum of."""
    if write.heads is not None:
        h = write.heads
        shared = "" if h.n_key_value_heads == h.n_heads else f" ({h.n_key_value_heads} key/value)"
        return f"{plural(h.n_heads, 'head')} of {h.d_head}{shared}"
    if write.experts:
        return "a sum over experts"
    if write.neurons is not None:
        expert = "" if write.shared_expert is None else f" of shared expert {write.shared_expert}"
        return plural(write.neurons, "neuron") + expert
    return EMBEDDED.get(write.unit, "as a whole")


def norm_text(norm: NormRow) -> str:
    """rms norm (gain 0.42 … 1.58)."""
    inside = [f"gain {span(norm.gain)}"] if norm.gain is not None else []
    inside += ["bias"] if norm.bias else []
    return f"{norm.kind} norm" + (f" ({', '.join(inside)})" if inside else "")


def step_text(step: StepRow, factors: Sequence[float] = ()) -> str:
    """A step of a tail in words; `factors` are its numbers where several alike steps are shown as one."""
    if step.norm is not None:
        return norm_text(step.norm)
    if step.gate is not None:
        return f"a gate at {step.gate}"
    if step.dimensions is not None:
        return f"a factor per dimension ({span(step.dimensions)})"
    return f"× {span(factors)}" if factors else f"× {compact(step.factor)}"


# --- readout and levels -----------------------------------------------------------------------------------


def readout_entries(a: AnatomyDescription) -> list[tuple[str, str]]:
    """What lies between the stream and the logits, each with its name."""
    f = a.final
    entries = [("final norm", "none" if f.norm is None else f"{norm_text(f.norm)}, eps {f.norm.eps:.0e}")]
    if f.before is not None:
        entries.append(("projection", sizes(f.before)))
    entries.append(("unembedding", _matrix(f.unembedding, f.bias)))
    if f.scale != 1.0:
        entries.append(("scale", compact(f.scale)))
    if f.softcap is not None:
        entries.append(("softcap", f"{compact(f.softcap)}: logits are c tanh(u / c)"))
    if f.opaque is not None:
        entries.append(("no direct attribution", f.opaque))
    return entries


def number_text(level: LevelRow) -> str:
    """How many units a level has."""
    return f"{count(level.units)}{' × sources' if level.per_source else ''}" if level.units else "none"


def refusal_text(level: LevelRow) -> str:
    """Where a level was refused and why; empty where it was not."""
    reasons: dict[str, list[str]] = {}
    for refusal in level.refused:
        reasons.setdefault(refusal.reason, []).append(refusal.unit)
    return "; ".join(f"refused at {units_text(units)}: {reason}" for reason, units in reasons.items())
