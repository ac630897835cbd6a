"""Small images with their classes: scikit-learn's digits, and CIFAR-10 from its standard files.

Digits, 1,797 scans of 8x8 (Alpaydin and Kaynak 1998), come with scikit-learn: nothing is fetched, and a network is
trained on them in seconds. They are split once, 1,437 for training and 360 for testing, whatever the seed.

CIFAR-10 (Krizhevsky 2009), 60,000 photographs of 32x32, is read from a directory in either form in which it is
published: the binary one, or the one for Python, whose files are pickles and could run code. So a pickle is opened only
if it is, by its published MD5, the file that was published, and then by an unpickler that knows arrays and nothing
else. In training its images are moved by up to four pixels and flipped at random, as He et al. 2015 do.

Of all images the mean image of those for training is subtracted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mainstem.errors import ImagesError, UsageError
from mainstem.lab.cifar import read_cifar10

ImageBatch = tuple[Float[Tensor, "batch channel height width"], Int[Tensor, " batch"]]

DIGITS_TESTED = 360
"""How many of the digits are for testing: a fifth."""

PADDING = 4
"""By how many pixels photographs are moved at most."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images for training and testing.

    Attributes:
        train_x, test_x: the images, float32, without the mean image of those for training.
        train_y, test_y: their classes.
        name: in a word.
        source: where they come from.
        padding: by how many pixels images are moved in training, and then perhaps flipped; 0: taken as they are.
    """

    train_x: Float[Tensor, "batch channel height width"]
    train_y: Int[Tensor, " batch"]
    test_x: Float[Tensor, "batch channel height width"]
    test_y: Int[Tensor, " batch"]
    name: str
    source: str
    padding: int = 0

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.train_y.max()) + 1


def digits() -> Images:
    """The digits of scikit-learn, with values from 0 to 1 before the mean is subtracted.

    Raises:
        ImagesError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        what, remedy = "The digits come with scikit-learn, which is not installed", "pip install 'mainstem[lab]'"
        raise ImagesError(what, None, f"Install it with `{remedy}`, or give the files of CIFAR-10.") from error
    loaded: Any = load_digits()
    x = torch.from_numpy(loaded.images).float()[:, None] / 16
    y = torch.from_numpy(loaded.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:DIGITS_TESTED], order[DIGITS_TESTED:]
    return _centred(x[train], y[train], x[test], y[test], "digits", "scikit-learn, load_digits", 0)


def cifar10(folder: str | Path, fetch: bool = False) -> Images:
    """CIFAR-10, with values from 0 to 1 before the mean is subtracted.

    Args:
        folder: where its files are, `data_batch_1.bin` and so on or `data_batch_1` and so on, or the directory that
            holds theirs.
        fetch: whether torchvision may fetch them into the folder if they are not there.

    Raises:
        ImagesError: a file is missing or damaged (it is named), or torchvision is needed and not installed.
    """
    folder = Path(folder).expanduser()
    train_x, train_y, test_x, test_y = read_cifar10(folder, fetch)
    return _centred(
        train_x.float() / 255, train_y, test_x.float() / 255, test_y, "CIFAR-10", f"CIFAR-10, {folder}", PADDING
    )


def image_batches(images: Images, size: int, seed: int) -> Callable[[int], ImageBatch]:
    """The batch of step i: every epoch all images in an order of its own, but for the few that fill no batch.

    It depends on i and the seed alone, so that training may be resumed at any step.

    Raises:
        UsageError: the size is not positive, or larger than the set.
    """
    count = len(images.train_x)
    if not 1 <= size <= count:
        raise UsageError(f"Batches of {size} are not to be had", f"{count} images", f"Give 1 to {count}.")
    steps = count // size

    def batch(step: int) -> ImageBatch:
        epoch, place = divmod(step, steps)
        order = torch.randperm(count, generator=_generator(seed, epoch))
        chosen = order[place * size : (place + 1) * size]
        x = images.train_x[chosen]
        if images.padding:
            x = moved_and_flipped(x, images.padding, _generator(seed, -1 - step))
        return x, images.train_y[chosen]

    return batch


def moved_and_flipped(
    x: Float[Tensor, "batch channel height width"], padding: int, generator: torch.Generator
) -> Float[Tensor, "batch channel height width"]:
    """Each image padded with zeros, cropped to its size at a random place, and flipped in half of all cases."""
    count, _, height, width = x.shape
    down, right = torch.randint(2 * padding + 1, (2, count), generator=generator)
    flipped = torch.randint(2, (count, 1), generator=generator).bool()
    columns = torch.arange(width).expand(count, width)
    columns = torch.where(flipped, columns.flip(1), columns) + right[:, None]
    rows = torch.arange(height) + down[:, None]
    padded = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1)
    found = padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2).contiguous()


def _generator(seed: int, part: int) -> torch.Generator:
    """A generator for a part of the run; seeds and parts are kept apart by the digits of a larger number."""
    return torch.Generator().manual_seed((seed * 2_000_003 + part) % 2**63)


def _centred(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, name: str, source: str, padding: int
) -> Images:
    mean = train_x.mean(0)
    return Images(train_x - mean, train_y, test_x - mean, test_y, name, source, padding)
