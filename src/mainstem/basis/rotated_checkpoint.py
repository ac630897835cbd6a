"""A rotated copy as a checkpoint that plain Transformers loads, written whole or not at all.

It is written beside its place, loaded again as anyone would load it, compared with the copy, and renamed last. What
differs then was lost on the way: a tensor that the configuration ties again, or a table that the code computes anew.
"""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mainstem.causal.rotated import Rotated
from mainstem.errors import LoadError, MainstemError, RefusedError, UsageError
from mainstem.model.checkpoints import read_directory
from mainstem.model.discovery import probe_ids
from mainstem.model.translation import quiet
from mainstem.model.turning import Turning
from mainstem.results.basis_rotations import Checkpoint
from mainstem.run.inputs import base_arguments

if TYPE_CHECKING:
    from mainstem.session import Model

TOLERANCE = 1e-5


def check_place(out: Path) -> Path:
    """Where the checkpoint will be.

    Raises:
        UsageError: something is there, or there is no directory to make it in.
    """
    place = out.expanduser().absolute()
    if place.exists():
        raise UsageError("There is something there already", str(out), "Give the name of a directory to make.")
    if not place.parent.is_dir():
        raise UsageError("There is no such directory", str(place.parent), f"Make it first: mkdir -p {place.parent}")
    return place


def check_writable(model: "Model", turning: Turning) -> None:
    """Refuses a copy that no checkpoint can hold, before it is made.

    Raises:
        RefusedError: with the reason and the place.
    """
    if turning.brackets:
        raise RefusedError(
            "A factor for each dimension enters the stream here and cannot be folded into a matrix",
            turning.brackets[0].where,
            "no checkpoint can hold it",
            "Leave out --out: such a model is rotated while it runs.",
        )
    if not hasattr(model.module, "save_pretrained") or not hasattr(model.module, "config"):
        raise RefusedError(
            "Only models of Transformers' own classes are written as checkpoints", type(model.module).__name__
        )
    saved = model.module.state_dict()
    lost = next((str(turn.place) for turn in turning.turns if str(turn.place) not in saved), None)
    if lost is not None:
        raise RefusedError(
            "A table that the model's code computes would have to be rotated", lost, "no checkpoint can hold it"
        )


def write_checkpoint(model: "Model", rotated: Rotated, place: Path) -> Checkpoint:
    """Writes the copy with an untied configuration and the model's tokenizer, and loads it again.

    Args:
        model: the model.
        rotated: its rotated copy.
        place: the directory to make.

    Raises:
        RefusedError: what comes back is not what was written; names the tensor.
        MainstemError: it cannot be written, such as on a full disk; nothing is left.
    """
    with _building(place) as built:
        copied: Any = rotated.model
        if rotated.untied:
            copied.config = _untied(copied.config)
        with quiet():
            copied.save_pretrained(built)
            if model.tokenizer is not None:
                model.tokenizer.save_pretrained(built)
        apart = _compared(rotated, built)
        files = sorted(path for path in built.iterdir() if path.is_file())
        made = Checkpoint(str(place), [f.name for f in files], sum(f.stat().st_size for f in files), apart)
        built.rename(place)
    return made


def _untied(config: Any) -> Any:
    """The configuration with every tie of embeddings undone."""
    own = copy.deepcopy(config)
    for part in (own, *(getattr(own, name) for name in getattr(own, "sub_configs", None) or ())):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
    return own


@torch.no_grad()
def _compared(rotated: Rotated, built: Path) -> float:
    """How far the logits of what is loaded are from the copy's, relative to the largest."""
    module = rotated.model
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    options: dict[str, Any] = {"dtype": dtype}
    if kernels := getattr(module.config, "_attn_implementation", None):
        options["attn_implementation"] = kernels  # which round otherwise than others
    try:
        again: Any = read_directory(built, lambda message: None, **options)
    except LoadError as error:
        raise RefusedError(
            f"Transformers does not load such a checkpoint by itself: {error.what}",
            type(module).__name__,
            remedy="Nothing was written.",
        ) from error
    again.to(next(module.parameters()).device)
    ids = probe_ids(module)
    expected = module(input_ids=ids, **base_arguments(module)).logits
    seen = again(input_ids=ids, **base_arguments(again)).logits
    apart = float((seen - expected).abs().max() / expected.abs().max())
    if not apart <= TOLERANCE:
        raise RefusedError(
            "The checkpoint loads as another model than the rotated copy",
            _changed(module, again) or type(module).__name__,
            "its configuration cannot say what the rotated copy needs",
            "Nothing was written.",
        )
    return apart


def _changed(module: nn.Module, again: nn.Module) -> str | None:
    """The first tensor that came back otherwise."""
    written = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    read = dict(again.named_parameters(remove_duplicate=False)) | dict(again.named_buffers())
    return next((name for name, own in written.items() if name in read and not torch.equal(own, read[name])), None)


@contextmanager
def _building(place: Path) -> Iterator[Path]:
    """A directory beside `place` to build in; what is left of it is removed, also after an interruption."""
    try:
        workplace = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise _unwritable(error, place) from error
    try:
        content = workplace / "content"
        content.mkdir()
        yield content
    except OSError as error:
        raise _unwritable(error, place) from error
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _unwritable(error: OSError, place: Path) -> MainstemError:
    return MainstemError(
        f"The checkpoint cannot be written: {error.strerror or error}",
        str(place),
        "Choose another place, or free some space; nothing was left there.",
    )
