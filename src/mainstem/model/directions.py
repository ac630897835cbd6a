"""Directions in the stream as targets: d_model numbers, given or read from a `.safetensors` file.

A file holds one tensor of d_model numbers, or several of which one is named `direction`; axes of size 1 are dropped.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mainstem.errors import TargetError
from mainstem.targets import Target

NAME = "direction"


def direction_target(given: str | Path | Sequence[float] | Tensor, d_model: int) -> Target:
    """The target that d_model numbers are.

    Raises:
        TargetError: the file cannot be read or holds something else, the size is another, or a number is not finite.
    """
    if isinstance(given, str | Path):
        numbers, where, text = read_direction(Path(given)), str(given), Path(given).stem
    else:
        numbers, where, text = torch.as_tensor(given), None, NAME
    numbers = numbers.detach().double().squeeze()
    if numbers.shape != (d_model,):
        raise TargetError(
            f"The direction has shape {list(numbers.shape)}, and the stream has {d_model} dimensions",
            where,
            f"Give d_model = {d_model} numbers.",
        )
    return Target(direction=tuple(numbers.tolist()), text=text)


def read_direction(path: Path) -> Tensor:
    """The tensor of a `.safetensors` file that is a direction.

    Raises:
        TargetError: there is no such file, it is no safetensors file, or it is not clear which tensor is meant.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = "it is not safetensors" if path.is_file() else "there is no such file"
        remedy = "Save d_model numbers with safetensors, or name a unit that reads one, such as L27N846 or L23H4@3."
        raise TargetError(f"No direction: {reason}", str(path), remedy) from error
    if NAME in tensors:
        return tensors[NAME]
    if len(tensors) != 1:
        known = ", ".join(sorted(tensors)[:8]) or "none"
        raise TargetError(
            f"The file holds {len(tensors)} tensors ({known}), none of them named {NAME!r}",
            str(path),
            f"Name the one that is meant {NAME!r}.",
        )
    return next(iter(tensors.values()))
