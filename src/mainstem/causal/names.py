"""Names against evidence: the second half of the labels certificate.

Zeroing a unit shows that a part is right; these checks show that it bears the right name. Parts are looked up by
address in a decomposition and compared with what the zeroed unit should take away. Sublayers must write in the order of
their numbers in a real run, belong to the block of their number, and be what they are called: attention if they carry a
pattern times values, an MLP if they carry neurons or experts. Token embeddings must change with a token, and the others
must not. An expert's number must be the place of its matrix among the model's own parameters.
"""

import torch
from torch import Tensor

from mainstem.analysis.decompose import Decomposition
from mainstem.model.anatomy import Anatomy
from mainstem.run.capture import Captured
from mainstem.units import Unit

Result = tuple[str, float, float]


def part_by_address(decomposition: Decomposition, unit: Unit) -> Tensor | None:
    """What the parts with this address write, [d_model] before any tail; None if no part has it."""
    total = None
    for group in decomposition.groups:
        if group.kind != unit.kind or group.sublayer != unit.sublayer:
            continue
        found = group.places(unit)
        if found:
            part = group.raw(torch.tensor(found, device=group.coefficients.device)).sum(0)
            total = part if total is None else total + part
    return total


def name_results(anatomy: Anatomy, run: Captured) -> list[Result]:
    """Order, block and kind of every sublayer; error 1 where a name is wrong."""
    results = [(str(write.unit), _misnamed(anatomy, i), 0.5) for i, write in enumerate(anatomy.writes)]
    layers = [anatomy.writes[i].unit.layer for i in run.order]
    numbered = [layer for layer in layers if layer is not None]
    in_order = all(a <= b for a, b in zip(numbered, numbered[1:], strict=False))
    return [*results, ("the order in which blocks write", 0.0 if in_order else 1.0, 0.5)]


def _misnamed(anatomy: Anatomy, index: int) -> float:
    """0 if a write's name agrees with its block and with what is behind it, else 1."""
    write = anatomy.writes[index]
    layer = write.unit.layer
    if layer is None:
        return 0.0 if write.attention is None and not write.neurons and write.experts is None else 1.0
    if any(index in block.writes and block.layer != layer for block in anatomy.blocks):
        return 1.0
    place = write.unit.place
    wrong = (write.attention is not None and place != "attn") or (
        (write.neurons or write.experts is not None) and place != "mlp"
    )
    return 1.0 if wrong else 0.0


def another_end(input_ids: Tensor) -> Tensor:
    """The prompt [1, pos] with another last token, one that it has elsewhere; itself if it has only one."""
    other = input_ids.clone()
    elsewhere = input_ids[0, input_ids[0] != input_ids[0, -1]]
    if len(elsewhere):
        other[0, -1] = elsewhere[0]
    return other


def embedding_results(anatomy: Anatomy, run: Captured, row: int, other: int) -> list[Result]:
    """Rows that end in different tokens: the token embedding there must differ, and no other embedding may."""
    results = []
    for i, write in enumerate(anatomy.writes):
        if write.unit.kind == "embedding":
            changed = not torch.equal(run.writes[i][row, -1], run.writes[i][other, -1])
            results.append((str(write.unit), 0.0 if changed == (write.unit.place == "embed") else 1.0, 0.5))
    return results


def expert_of(model: torch.nn.Module, matrix: Tensor) -> int | None:
    """Which expert an output matrix belongs to, by its place among the model's parameters; None if it is not there."""
    wanted = [matrix.detach().contiguous().flatten(), matrix.detach().T.contiguous().flatten()]
    for name, parameter in model.named_parameters():
        if parameter.numel() % matrix.numel() or parameter.dtype != matrix.dtype:
            continue
        stack = parameter.detach().reshape(-1, matrix.numel())
        for flat in wanted:
            for place in torch.nonzero(stack[:, 0] == flat[0]).flatten().tolist():
                if torch.equal(stack[place], flat):
                    return place if len(stack) > 1 else _last_number(name)
    return None


def _last_number(name: str) -> int | None:
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    return numbers[-1] if numbers else None
