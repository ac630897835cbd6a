"""The files of CIFAR-10 (Krizhevsky 2009), in the binary form and in that for Python.

Five files for training and one for testing, each of 10,000 images. In the binary form an image is a byte for its class
and 3,072 for its channels, row by row. In the form for Python a file is a pickle of a dictionary, `data` and `labels`.
Unpickling can run any code, so that a file's MD5 must be the published one, and besides only arrays are let through.
"""

import hashlib
import io
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from mainstem.errors import ImagesError

Read = tuple[UInt8[Tensor, "batch channel height width"], Int[Tensor, " batch"]]

PER_FILE = 10_000
SHAPE = (3, 32, 32)
CLASSES = 10

TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
TESTING = "test_batch"
FORMS = {"cifar-10-batches-bin": ".bin", "cifar-10-batches-py": ""}
"""How the two archives name their directories, and how names of files end in them."""

MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""Of the form for Python, as torchvision lists them."""

ARRAYS = {
    **{
        (module, "_reconstruct"): np.empty(0).__reduce__()[0]
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    },
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}
"""What the pickle of an array names."""

_FETCH = "Get cifar-10-binary.tar.gz or cifar-10-python.tar.gz from its author's page again and unpack it there."


def read_cifar10(folder: Path, fetch: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and classes for training, and for testing; images as bytes [batch, 3, 32, 32].

    Args:
        folder: where the files are, or where the directory that an archive unpacks to is.
        fetch: whether torchvision may fetch them if there are none.

    Raises:
        ImagesError: a file is missing or damaged, or torchvision is needed and not installed.
    """
    found = _directory(folder)
    if found is None and fetch:
        _fetch(folder)
        found = _directory(folder)
    if found is None:
        raise ImagesError("There are no files of CIFAR-10", str(folder), _FETCH)
    directory, suffix = found
    read = _read_binary if suffix else _read_pickle
    parts = [read(directory / f"{name}{suffix}") for name in TRAINING]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), *read(directory / f"{TESTING}{suffix}")


def _directory(folder: Path) -> tuple[Path, str] | None:
    """Where files of one of the forms are, any of them, and how their names end."""
    for name, suffix in FORMS.items():
        for directory in (folder, folder / name):
            if any((directory / f"{file}{suffix}").is_file() for file in MD5):
                return directory, suffix
    return None


def _fetch(folder: Path) -> None:
    try:
        datasets = import_module("torchvision.datasets")
    except ImportError as error:
        raise ImagesError("CIFAR-10 is fetched with torchvision, which is not installed", None, _FETCH) from error
    try:
        datasets.CIFAR10(str(folder), download=True)
    except Exception as error:  # whatever a network, a disk or a damaged archive may raise
        raise ImagesError(f"CIFAR-10 could not be fetched: {error}", str(folder), _FETCH) from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        what = "A file of CIFAR-10 is missing" if isinstance(error, FileNotFoundError) else "A file cannot be read"
        raise ImagesError(what, str(path), _FETCH) from error


def _read_binary(path: Path) -> Read:
    data = np.frombuffer(_bytes(path), dtype=np.uint8)
    size = 1 + int(np.prod(SHAPE))
    if len(data) != PER_FILE * size:
        what = f"The file has {len(data):,} bytes and not {PER_FILE * size:,}"
        raise ImagesError(what, str(path), _FETCH)
    rows = data.reshape(PER_FILE, size)
    return _checked(rows[:, 1:], rows[:, 0], path)


def _read_pickle(path: Path) -> Read:
    data = _bytes(path)
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != MD5[path.name]:
        raise ImagesError(f"The file's MD5 is {found}, not the published {MD5[path.name]}", str(path), _FETCH)
    try:
        made = ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
        return _checked(np.asarray(made["data"]), np.asarray(made["labels"]), path)
    except (pickle.UnpicklingError, KeyError, TypeError) as error:
        raise ImagesError(f"The file does not hold images: {error}", str(path), _FETCH) from error


class ArrayUnpickler(pickle.Unpickler):
    """Knows arrays, and refuses everything else that a pickle may name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The function or class that the pickle names.

        Raises:
            pickle.UnpicklingError: it is no part of an array.
        """
        if (module_name, global_name) not in ARRAYS:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and only arrays are let through")
        return ARRAYS[module_name, global_name]


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> Read:
    """The images of one file.

    Raises:
        ImagesError: there are other numbers of them, or other classes, than in any file of CIFAR-10.
    """
    if x.shape != (PER_FILE, int(np.prod(SHAPE))) or x.dtype != np.uint8 or y.shape != (PER_FILE,):
        raise ImagesError(f"The file holds {x.dtype} {x.shape} and classes {y.shape}", str(path), _FETCH)
    if y.min() < 0 or y.max() >= CLASSES:
        raise ImagesError(f"The file has classes from {y.min()} to {y.max()}", str(path), _FETCH)
    return torch.from_numpy(x.reshape(PER_FILE, *SHAPE).copy()), torch.from_numpy(y.astype(np.int64))
