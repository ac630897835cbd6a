"""Query, key and value of attention calls in one run: what was received, and the maps from what reads the stream.

The blocks that hold the attention calls are recorded while the model runs on the prompt, so rotary embedding is that of
the real positions.

Cost: one forward pass, and the intermediate values of one block at a time.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, AttentionCore, Write
from mainstem.model.operands import OperandMap, operand_map
from mainstem.model.reads import score_product
from mainstem.model.recorder import recorded_call
from mainstem.model.recording import Call, Frame, Recording, Value
from mainstem.model.score_products import ScoreFactor, score_factor, side_layouts
from mainstem.model.trees import leaves_of


@dataclass(frozen=True, eq=False)
class AttentionOperands:
    """The operands of the attention behind write number `write`.

    Attributes:
        maps: for "query", "key" and "value" the map, or why there is none.
        reads: for each map the index of its read in the anatomy.
        sides: of "query" and "key" the map as far as the operand itself, before the two are multiplied.
        scaling: what query . key is multiplied with before the softmax.
        capped: whether that is so for small scores only, because a function bends larger ones.
        fused: whether attention receives queries and keys; else the maps of both go on to their product.
    """

    write: int
    maps: dict[str, OperandMap | LevelRefusedError] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)
    sides: dict[str, OperandMap | LevelRefusedError] = field(default_factory=dict)
    scaling: float = 1.0
    capped: bool = False
    fused: bool = True

    def of(self, role: str) -> tuple[OperandMap, int]:
        """The map of a role and its read.

        Raises:
            LevelRefusedError: if there is none.
        """
        return _found(self.maps, role), self.reads[role]

    def side(self, role: str) -> tuple[OperandMap, int]:
        """The map of a role as far as the operand itself, and its read.

        Raises:
            LevelRefusedError: if there is none.
        """
        return _found(self.maps if role == "value" else self.sides, role), self.reads[role]


def _found(maps: dict[str, OperandMap | LevelRefusedError], role: str) -> OperandMap:
    found = maps.get(role)
    if found is None:
        reason = "the product of queries and keys behind the pattern was not found"
        raise LevelRefusedError(f"No {role} side", None, reason, "Ask about the value side, or another unit.")
    if isinstance(found, LevelRefusedError):
        raise found
    return found


def attention_operands(
    module: torch.nn.Module, anatomy: Anatomy, index: int, input_ids: Int[Tensor, "1 pos"], **forward: Any
) -> AttentionOperands:
    """The operands of the attention behind write number `index` of the anatomy, on one prompt without padding.

    Raises:
        LevelRefusedError: if the attention call is not found again.
    """
    made = operands_of(module, anatomy, [index], input_ids, **forward)[index]
    if isinstance(made, LevelRefusedError):
        raise made
    return made


@torch.inference_mode(False)  # as for a discovery
@torch.no_grad()
def operands_of(
    module: torch.nn.Module, anatomy: Anatomy, writes: Iterable[int], input_ids: Int[Tensor, "1 pos"], **forward: Any
) -> dict[int, AttentionOperands | LevelRefusedError]:
    """For each of some writes the operands of the attention behind it, in one run; or why there are none."""
    made: dict[int, AttentionOperands | LevelRefusedError] = {}
    with ExitStack() as stack:
        for index in writes:
            write = anatomy.writes[index]
            block = next((block for block in anatomy.blocks if index in block.writes), None)
            reason = "no attention in a block is known here"
            if block is not None and write.attention is not None:
                done = _keep(anatomy, index, write, write.attention, block.path, made)
                stack.enter_context(recorded_call(module, block.path, block.call, done))
                reason = "the attention call was not found again in its block"
            made[index] = LevelRefusedError("No keys", str(write.unit), reason)
        if any(anatomy.writes[index].attention is not None for index in made):
            module(input_ids=input_ids, **forward)
    return made


def _keep(anatomy: Anatomy, index: int, write: Write, core: AttentionCore, path: str, made: dict):
    def done(recording: Recording, frame: Frame) -> None:
        call = _core_call(recording, core, path)
        if call is not None:
            made[index] = _operands(anatomy, index, write, core, call, path)

    return done


def _core_call(recording: Recording, core: AttentionCore, path: str) -> Call | None:
    """The attention call in the recording of the block at `path`; None if it is not there just once."""
    found: dict[int, Call] = {}
    for value in recording.values:
        call = value.call
        if call is None or call.frame is None or call.func is None:
            continue
        same = _joined(path, call.frame.path) == core.site.path
        if same and call.key == core.site.function and call.ordinal == core.site.ordinal:
            found[id(call)] = call
    return next(iter(found.values())) if len(found) == 1 else None


def _joined(path: str, inner: str) -> str:
    return f"{path}.{inner}".strip(".")


def _operands(
    anatomy: Anatomy, index: int, write: Write, core: AttentionCore, call: Call, path: str
) -> AttentionOperands:
    leaves = leaves_of((call.args, call.kwargs))
    wanted: dict[str, tuple[Any, str, Value | None]] = {}
    for role in ("query", "key", "value"):
        if role in core.slots:
            wanted[role] = (leaves[core.slots[role]], core.layouts[role], None)
    factor, layouts = ScoreFactor(1.0, False), {}
    if core.fused:
        factor = ScoreFactor(_scale(call, core, wanted), False)
    else:
        pattern = leaves[core.slots["pattern"]]
        scores = score_product(pattern)
        if scores is not None and len(scores.active_operands()) == 2 and len(scores.outputs) == 1:
            for role, operand in zip(("query", "key"), scores.active_operands(), strict=True):
                wanted[role] = (operand, core.layouts["pattern"], scores.outputs[0])
            factor = score_factor(pattern, scores.outputs[0], core)
            layouts = side_layouts(scores, core)
    out = AttentionOperands(index, scaling=factor.value, capped=factor.capped, fused=core.fused)
    for role, (operand, layout, product) in wanted.items():
        reads = _reads_of(anatomy, write, role)

        def is_read(value: Value, reads=reads) -> bool:
            frame = value.call.frame if value.call is not None else None
            return frame is not None and _joined(path, frame.path) in reads

        try:
            made = operand_map(role, operand, layout, core.sizes, is_read, product)
            out.reads[role] = reads[_joined(path, made.module)]
            out.maps[role] = made
        except LevelRefusedError as error:
            out.maps[role] = error
    if core.fused:
        return replace(out, sides={role: out.maps[role] for role in ("query", "key") if role in out.maps})
    return replace(out, sides=_sides(out.maps, wanted, layouts, core, factor))


def _sides(maps, wanted, layouts: dict[str, str], core: AttentionCore, factor: "ScoreFactor") -> dict:
    """Of maps that go on to the product of queries and keys, the part before it."""
    sides: dict[str, OperandMap | LevelRefusedError] = {}
    for role in ("query", "key"):
        found = maps.get(role)
        if isinstance(found, OperandMap) and (role not in layouts or factor.refusal is not None):
            reason = factor.refusal or "how queries and keys are laid out in their product is not understood"
            sides[role] = LevelRefusedError(f"No {role} side", None, reason, "Ask about the value side.")
        elif isinstance(found, OperandMap):
            operand = wanted[role][0].tensor.detach().double()
            sides[role] = found.before_product(operand, layouts[role], core.sizes)
        elif found is not None:
            sides[role] = found
    return sides


def _scale(call: Call, core: AttentionCore, wanted: dict[str, tuple[Any, str, Value | None]]) -> float:
    given = call.kwargs.get("scale", call.args[6] if len(call.args) > 6 else core.scaling)
    return wanted["query"][0].shape[-1] ** -0.5 if given is None else float(given)


def _reads_of(anatomy: Anatomy, write: Write, role: str) -> dict[str, int]:
    """The reads that may be an operand's, by their modules; a module with several is none of them."""
    found: dict[str, list[int]] = {}
    for i, read in enumerate(anatomy.reads):
        if read.unit == write.unit and role in read.roles:
            found.setdefault(read.module, []).append(i)
    return {module: several[0] for module, several in found.items() if len(several) == 1}
