"""Query, key and value of one attention call in one run: what was received, and the maps from what reads the stream.

The block that holds the attention call is recorded while the model runs on the prompt, so rotary embedding is that of
the real positions.

Cost: one forward pass for a block, and the block's intermediate values while it runs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, AttentionCore, Write
from mainstem.model.operands import OperandMap, operand_map
from mainstem.model.reads import score_product
from mainstem.model.recorder import Call, Frame, Recording, Value, recorded_call
from mainstem.model.trees import leaves_of


@dataclass(frozen=True, eq=False)
class AttentionOperands:
    """The operands of the attention behind write number `write`.

    Attributes:
        maps: for "query", "key" and "value" the map, or why there is none.
        reads: for each map the index of its read in the anatomy.
        scaling: what query . key is multiplied with.
        fused: whether attention receives queries and keys; else the maps of both go on to their product.
    """

    write: int
    maps: dict[str, OperandMap | LevelRefusedError] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)
    scaling: float = 1.0
    fused: bool = True

    def of(self, role: str) -> tuple[OperandMap, int]:
        """The map of a role and its read.

        Raises:
            LevelRefusedError: if there is none.
        """
        found = self.maps.get(role)
        if found is None:
            reason = "the product of queries and keys behind the pattern was not found"
            raise LevelRefusedError(f"No {role} side", None, reason, "Ask about the value side, or another unit.")
        if isinstance(found, LevelRefusedError):
            raise found
        return found, self.reads[role]


@torch.no_grad()
def attention_operands(
    module: torch.nn.Module, anatomy: Anatomy, index: int, input_ids: Int[Tensor, "1 pos"], **forward: Any
) -> AttentionOperands:
    """The operands of the attention behind write number `index` of the anatomy, on one prompt without padding.

    Raises:
        LevelRefusedError: if the attention call is not found again.
    """
    write = anatomy.writes[index]
    block = next((block for block in anatomy.blocks if index in block.writes), None)
    if block is None or write.attention is None:
        raise LevelRefusedError("No keys", str(write.unit), "no attention in a block is known here")
    core, made = write.attention, []

    def done(recording: Recording, frame: Frame) -> None:
        call = _core_call(recording, core, block.path)
        if call is not None:
            made.append(_operands(anatomy, index, write, core, call, block.path))

    with recorded_call(module, block.path, block.call, done):
        module(input_ids=input_ids, **forward)
    if not made:
        raise LevelRefusedError("No keys", str(write.unit), "the attention call was not found again in its block")
    return made[0]


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
    scores = None if core.fused else score_product(leaves[core.slots["pattern"]])
    if scores is not None and len(scores.active_operands()) == 2 and len(scores.outputs) == 1:
        for role, operand in zip(("query", "key"), scores.active_operands(), strict=True):
            wanted[role] = (operand, core.layouts["pattern"], scores.outputs[0])
    out = AttentionOperands(index, scaling=1.0 if not core.fused else _scale(call, core, wanted), fused=core.fused)
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
    return out


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
