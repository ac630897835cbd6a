"""The state of a training on disk: what is needed to go on as if it had never stopped.

    FOLDER/step-000300/weights.safetensors      parameters and buffers, each once where they are tied
                       optimisers.safetensors   every tensor of the optimisers' states
                       state.json               which training it is, the step, what was recorded, the states' numbers

A checkpoint is written to a folder of a temporary name, flushed to the disk and renamed, and only then is the one
before it deleted: whatever stops the writing, a full disk or a lost machine, a whole checkpoint remains.

The same bits come back: tensors get the memory layout that they had, because the order in which a matrix product adds
depends on it.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mainstem.errors import CheckpointError

_WEIGHTS, _OPTIMISERS, _STATE = "weights.safetensors", "optimisers.safetensors", "state.json"
_NAME = re.compile(r"step-(\d+)")
_TENSOR, _STRIDE, _KEYS = "tensor", "stride", "whole-number keys"


@dataclass(frozen=True)
class Progress:
    """How far a training is, and what it recorded.

    Attributes:
        step: how many steps are done.
        recorded: plain data.
    """

    step: int
    recorded: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training in one folder, of which the last is kept.

    Args:
        folder: where; made if it is not there.
        identity: what the training is, as plain data; a checkpoint of another one is refused.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity = json.loads(json.dumps(identity))

    def save(self, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer], progress: Progress) -> None:
        """Writes a checkpoint, then deletes the one before.

        Raises:
            CheckpointError: it cannot be written; the one before stays.
        """
        final = self.folder / f"step-{progress.step:06}"
        fresh = self.folder / f".{final.name}.new"
        tensors: dict[str, Tensor] = {}
        states = [_plain(optimiser.state_dict(), str(i), tensors) for i, optimiser in enumerate(optimisers)]
        document = {
            "of": self.identity,
            "step": progress.step,
            "recorded": progress.recorded,
            "optimisers": states,
        }
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            save_file(
                {name: each.detach().contiguous() for name, each in own_tensors(module).items()}, fresh / _WEIGHTS
            )
            save_file(tensors, fresh / _OPTIMISERS)
            (fresh / _STATE).write_text(json.dumps(document), encoding="utf-8")
            for name in (_WEIGHTS, _OPTIMISERS, _STATE):
                _flush(fresh / name)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(fresh, final)
            _flush_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            kept = self._last()
            stays = f"; the one of step {kept[0]} stays" if kept else ""
            what = f"The checkpoint of step {progress.step} cannot be written: {error}{stays}"
            raise CheckpointError(what, str(self.folder), "Free some space, or name another folder.") from error
        for step, path in self._all():
            if step != progress.step:
                shutil.rmtree(path, ignore_errors=True)

    def restore(self, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> Progress | None:
        """Puts the last checkpoint into a model and its optimisers; None if there is none.

        Raises:
            CheckpointError: it is of another training, and how it differs; it is damaged.
        """
        last = self._last()
        if last is None:
            return None
        path = last[1]
        try:
            document = json.loads((path / _STATE).read_text(encoding="utf-8"))
            self._check(document["of"], path)
            tensors = load_file(path / _OPTIMISERS)
            _put(module, load_file(path / _WEIGHTS))
            for optimiser, state in zip(optimisers, document["optimisers"], strict=True):
                optimiser.load_state_dict(_rich(state, tensors))
            return Progress(document["step"], document["recorded"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"The checkpoint is damaged: {error}", str(path)) from error

    def _check(self, of: Mapping[str, Any], path: Path) -> None:
        differing = sorted(_differences(of, self.identity))
        if differing:
            raise CheckpointError(f"The checkpoint is of another training: {'; '.join(differing)}", str(path))

    def _all(self) -> list[tuple[int, Path]]:
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]), path) for match, path in found if match)

    def _last(self) -> tuple[int, Path] | None:
        return next(reversed(self._all()), None)


def digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint of the contents of tensors, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, each once where they are tied."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def _put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = own_tensors(module)
    if own.keys() != tensors.keys():
        raise ValueError(f"it lacks, or has too many, of: {', '.join(sorted(own.keys() ^ tensors.keys()))}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A nested state as JSON has it; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous()
        return {_TENSOR: path, _STRIDE: list(value.stride())}
    if isinstance(value, Mapping):
        whole = [key for key in value if isinstance(key, int)]
        named = {str(key): _plain(each, f"{path}.{key}", tensors) for key, each in value.items()}
        return {_KEYS: named} if whole else named
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{path}.{i}", tensors) for i, each in enumerate(value)]
    return value


def _rich(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_plain` was given; tuples come back as lists."""
    if isinstance(value, list):
        return [_rich(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR, _STRIDE}:
        stored = tensors[value[_TENSOR]]
        return torch.empty_strided(stored.shape, value[_STRIDE], dtype=stored.dtype).copy_(stored)
    if value.keys() == {_KEYS}:
        return {int(key): _rich(each, tensors) for key, each in value[_KEYS].items()}
    return {key: _rich(each, tensors) for key, each in value.items()}


def _differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Where two pieces of plain data differ, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            line
            for key in found.keys() | wanted.keys()
            for line in _differences(found.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if found == wanted else [f"{path} is {found!r} there and {wanted!r} here"]


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """The new name reaches the disk before the checkpoint before it is deleted; where folders can be flushed."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
