"""The attention behind a write: which call mixes positions, how its operands are laid out, how its result reaches W_O.

Two forms are known: the fused kernel (scaled dot-product attention), whose pattern rows are recomputed from the query
and key that it received, and a pattern times values, whose rows are taken as they are (so sinks, softcaps, ALiBi and
dropped keys need no formula). Head h and coordinate j are found in W_O's input by following every element through the
model's own views. Raises `UnsplittableError` with the reason where the structure shows something else.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainstem.model.anatomy import AttentionCore, PreStep
from mainstem.model.function_taps import FUSED
from mainstem.model.layouts import PositionAxis, by_position, fit_output_layout, repeats
from mainstem.model.paths import Path, PathStep, pattern_operands
from mainstem.model.program import argument_slot
from mainstem.model.recording import Call, Value
from mainstem.model.sites import SiteFinder
from mainstem.model.trees import leaves_of
from mainstem.model.views import heads_first

SIGNATURE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class UnsplittableError(Exception):
    """Attention that cannot be split into heads; the message is the reason."""


def attention_core(path: Path, finder: SiteFinder, positions: int) -> AttentionCore:
    """The attention core of a path that ends at one."""
    assert path.core is not None
    before = path.steps[path.products[-1] + 1 :] if path.products else path.steps
    before = before[::-1]  # from attention's result to W_O's input
    if not path.source.tensor.is_floating_point() or path.source.tensor.numel() % positions:
        raise UnsplittableError("attention's result does not have one row for each position")
    index = _follow(path.source, before).reshape(positions, -1)
    found = _fit(path.source, index, positions)
    if found is None:
        raise UnsplittableError("attention's result reaches the output matrix in no order of heads and positions")
    layout, channels, sizes = found
    steps = tuple(_pre_step(i, before, finder, positions) for i, s in enumerate(before) if s.kind != "view")
    operands = _fused(path.core, layout) if path.core.name == FUSED else _unfused(path.core, path.source, layout)
    operands.layouts["result"] = f"{layout} j"
    return _assemble(path.core, operands, channels, sizes, steps, positions)


def joint_core(path: Path, positions: int) -> tuple[AttentionCore, Tensor]:
    """The core of a contraction of pattern, values and output matrix at once, and its matrix.

    The matrix is [out, heads x coordinates]. What it reads is seen nowhere in the run, and is computed from pattern
    and values.
    """
    call = path.core
    assert call is not None
    weight = next(o for o in call.operands() if not o.active)
    found = pattern_operands(call)
    assert found is not None
    terms, output = einsum_terms(call)
    if any(step.kind != "view" for step in path.steps):
        raise UnsplittableError("attention and its output matrix are one operation, and more follows")
    p, v, w = (terms[value.id] for value in (*found, weight))
    names: dict[str, str] = {}
    for char in dict.fromkeys(p + v + w):
        belongs = (char in p, char in v, char in w, char in output)
        names[char] = JOINT_AXES.get(belongs, "?")
    if sorted(names.values()) != ["b", "d", "h", "j", "s", "t"] or names[output[-1]] != "d":
        raise UnsplittableError("attention and its output matrix are one operation of an unknown form")
    letter = {name: char for char, name in names.items()}
    matrix = torch.einsum(f"{w}->{letter['d']}{letter['h']}{letter['j']}", weight.tensor.detach()).flatten(1)
    n_heads, width = found[1].shape[v.index(letter["h"])], found[1].shape[v.index(letter["j"])]
    operands = _Operands(
        {"pattern": found[0], "value": found[1]},
        {"pattern": " ".join(names[c] for c in p), "value": " ".join(names[c] for c in v)},
        False,
        {},
        {name: argument_slot(call, value) for name, value in zip(("pattern", "value"), found, strict=True)},
    )
    channels = torch.arange(n_heads * width).reshape(n_heads, width)
    return _assemble(call, operands, channels, {"h": n_heads}, (), positions), matrix


JOINT_AXES = {
    (True, True, False, True): "b",
    (True, False, False, True): "t",
    (True, True, False, False): "s",
    (True, True, True, False): "h",
    (False, True, True, False): "j",
    (False, False, True, True): "d",
}
"""What an index of a joint contraction is, from whether pattern, values, output matrix and result have it."""


def is_joint(call: Call) -> bool:
    """Whether an attention product also multiplies with a matrix."""
    return call.name == "einsum" and any(not o.active and o.tensor.dim() >= 2 for o in call.operands())


def _follow(start: Value, steps: list[PathStep], index: Tensor | None = None) -> Tensor:
    """Where each element of the last step's result comes from, as flat indices into `start` (or into `index`)."""
    current = torch.arange(start.tensor.numel()).reshape(start.shape) if index is None else index
    for step in steps:
        if step.kind == "view":
            assert step.index is not None
            current = current.reshape(-1)[step.index.reshape(-1)].reshape(step.value.shape)
        else:
            current = current.reshape(step.value.shape)
    return current


def _fit(result: Value, index: Tensor, positions: int) -> tuple[str, Tensor, dict[str, int]] | None:
    count = result.tensor.numel() // (positions * result.shape[-1])
    tensor = result.tensor.detach().cpu()
    splits: list[dict[str, int]] = [{"h": count, "t": positions}]
    splits += [{"k": k, "g": count // k, "t": positions} for k in range(1, count) if count % k == 0]
    for sizes in splits:
        fitted = fit_output_layout(tensor, index, sizes)
        if fitted is not None:
            return *fitted, {name: size for name, size in sizes.items() if name != "t"}
    return None


def _pre_step(number: int, steps: list[PathStep], finder: SiteFinder, positions: int) -> PreStep:
    """Step `number` between attention's result and W_O, carried to the channels of W_O's input."""
    step, later = steps[number], steps[number + 1 :]

    def channels(values: Tensor) -> Tensor:
        return _follow(step.value, later, values.expand(step.value.shape)).reshape(positions, -1)

    if step.kind == "factor":
        assert step.factor is not None
        return PreStep(factor=_constant_row(_gather(step.factor, channels)))
    if step.kind == "gate":
        assert step.gate is not None
        gate = step.gate
        axes = [axis for axis, size in enumerate(gate.shape) if size == positions]
        if len(axes) != 1:
            raise UnsplittableError("a gate on attention's result has no axis of positions")
        numbers = torch.arange(gate.tensor.numel()).reshape(gate.shape)
        wanted = channels(numbers)
        axis = PositionAxis.of(gate.shape, axes[0])
        rows = by_position(numbers, axis, 1, positions)[0]
        place = {int(value): column for column, value in enumerate(rows[0].tolist())}
        columns = torch.tensor([place.get(int(value), 0) for value in wanted[0].tolist()])
        if not torch.equal(rows[:, columns], wanted):
            raise UnsplittableError("a gate on attention's result mixes positions")
        return PreStep(gate_site=finder.site(gate), gate_axis=axis, columns=columns)
    assert step.norm is not None
    if step.norm.centred or step.norm.bias is not None:
        raise UnsplittableError("a centring norm between attention and its output matrix mixes the heads")
    width = step.value.shape[-1]
    groups = channels((torch.arange(step.value.tensor.numel()) // width).reshape(step.value.shape))
    gain = None if step.norm.gain is None else _constant_row(_gather(step.norm.gain, channels))
    _, first = torch.unique(groups[0], return_inverse=True)
    return PreStep(factor=gain, groups=first, eps=step.norm.eps)


def _gather(values: Tensor, channels) -> Tensor:
    flat = values.detach().reshape(-1)
    return flat[channels(torch.arange(flat.numel())).to(flat.device)]


def _constant_row(rows: Tensor) -> Tensor:
    return rows[0]


@dataclass(frozen=True)
class _Operands:
    values: dict[str, Value]
    layouts: dict[str, str]
    fused: bool
    constants: dict[str, Any]
    slots: dict[str, int]


def _fused(call: Call, layout: str) -> _Operands:
    bound: dict[str, Any] = dict(zip(SIGNATURE, call.args, strict=False)) | call.kwargs
    leaves = leaves_of((call.args, call.kwargs))
    values = {name: bound[name] for name in ("query", "key", "value")}
    slots = {name: argument_slot(call, value) for name, value in values.items()}
    names = list(SIGNATURE[: len(call.args)]) + list(call.kwargs)
    for name in ("attn_mask", "is_causal"):
        if name in names and len(leaves) == len(names):
            slots[name] = names.index(name)
    axes = layout.split(" ")
    if axes[-1] != "t" or "(" in layout and axes[-1].endswith(")"):
        raise UnsplittableError("the fused attention's rows are not positions")
    lead = layout[: -len(" t")] if layout != "t" else ""
    layouts = {"query": f"{lead} t d", "key": f"{lead} s d", "value": f"{lead} s j"}
    return _Operands(values, layouts, True, bound, slots)


def _unfused(call: Call, result: Value, layout: str) -> _Operands:
    found = pattern_operands(call)
    assert found is not None
    pattern, value = found
    axes = axes_of(layout)
    if call.name == "einsum":
        layouts = _einsum_layouts(call, axes, pattern, value)
    else:
        batch = axes[:-1]
        own = batch[len(batch) - (value.tensor.dim() - 2) :] if value.tensor.dim() > 2 else []
        named = ["1" if size == 1 and name != "b" else name for name, size in zip(own, value.shape, strict=False)]
        layouts = {"pattern": " ".join([*axes, "s"]), "value": " ".join([*named, "s", "j"])}
    values = {"pattern": pattern, "value": value}
    slots = {name: argument_slot(call, v) for name, v in values.items()}
    return _Operands(values, layouts, False, {}, slots)


def axes_of(layout: str) -> list[str]:
    """The axes of a pattern; merged axes stay in their brackets."""
    axes, depth = [""], 0
    for char in layout:
        depth += (char == "(") - (char == ")")
        if char == " " and depth == 0:
            axes.append("")
        else:
            axes[-1] += char
    return axes


def einsum_terms(call: Call) -> tuple[dict[int, str], str]:
    """The indices of each operand of an einsum, by its value's id, and those of the result."""
    equation = next((a for a in call.args if isinstance(a, str)), None)
    if equation is None or "->" not in equation or "." in equation:
        raise UnsplittableError("an einsum without explicit output axes")
    inputs, output = equation.replace(" ", "").split("->")
    tensors = [leaf for leaf in leaves_of(call.args[1:]) if isinstance(leaf, Value)]
    return {value.id: term for value, term in zip(tensors, inputs.split(","), strict=True)}, output


def _einsum_layouts(call: Call, axes: list[str], pattern: Value, value: Value) -> dict[str, str]:
    by_value, output = einsum_terms(call)
    names = dict(zip(output, [*axes, "j"], strict=True))
    summed = [c for c in by_value[pattern.id] if c in by_value[value.id] and c not in output]
    if len(summed) != 1:
        raise UnsplittableError("an einsum that sums over more than the source positions")
    names[summed[0]] = "s"
    return {
        "pattern": " ".join(names[c] for c in by_value[pattern.id]),
        "value": " ".join(names[c] for c in by_value[value.id]),
    }


def _assemble(call, operands: _Operands, channels, sizes, steps, positions) -> AttentionCore:
    assert call.frame is not None
    groups = {}
    n_heads = channels.shape[0]
    for name in ("key", "value"):
        if name not in operands.values:
            continue
        tensor = operands.values[name].tensor
        layout = operands.layouts[name]
        if operands.fused:
            layout = _with_own_heads(layout, sizes)
            operands.layouts[name] = layout
        heads = heads_first(tensor, layout, sizes, 1)
        if heads.shape[2] != positions:
            raise UnsplittableError(
                f"attention reads {heads.shape[2]} sources for {positions} positions, so subvalues have no meaning"
            )
        groups[name] = repeats(heads)
        groups[f"{name}_heads"] = heads.shape[1]
    n_value = groups["value_heads"] // groups["value"]
    if n_heads % n_value:
        raise UnsplittableError(f"{n_heads} heads do not share {n_value} key/value heads evenly")
    scale = operands.constants.get("scale")
    leaves = leaves_of((call.args, call.kwargs))
    seen = {name: leaves[slot] for name, slot in operands.slots.items()}
    return AttentionCore(
        site=call.site("arguments", 0),
        fused=operands.fused,
        slots=operands.slots,
        layouts=operands.layouts,
        sizes=sizes,
        channels=channels,
        n_key_value_heads=n_value,
        n_keys=groups.get("key_heads", 1) // groups.get("key", 1),
        value_groups=groups["value"],
        causal=bool(operands.constants.get("is_causal", False)),
        scaling=None if scale is None or isinstance(scale, Value) else float(scale),
        steps=steps,
        overwritten=frozenset(name for name, leaf in seen.items() if isinstance(leaf, Value) and leaf.overwritten),
    )


def _with_own_heads(layout: str, sizes: dict[str, int]) -> str:
    """The layout of keys or values of the fused kernel, whose number of heads is the tensor's own.

    It may be that of the key/value heads in one run and that of the heads in the next, as it takes a mask or not.
    """
    axes = axes_of(layout)
    for i, axis in enumerate(axes):
        if any(name in sizes for name in axis.strip("()").split(" ")):
            axes[i] = "own" if "b" not in axis.strip("()").split(" ") else "(b own)"
    return " ".join(axes)
