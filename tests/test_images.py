"""Images: the digits' fixed split, the files of CIFAR-10 whole and damaged, batches that a step alone decides."""

import hashlib
import pickle
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mainstem.errors import ImagesError, UsageError
from mainstem.lab import cifar
from mainstem.lab.images import Images, cifar10, digits, image_batches, moved_and_flipped

FEW, PIXELS = 4, 3072
NAMES = [*cifar.TRAINING, cifar.TESTING]


# --- digits -------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_centred() -> None:
    one, again = digits(), digits()
    assert (len(one.train_x), len(one.test_x)) == (1437, 360) and one.train_x.shape[1:] == (1, 8, 8)
    assert torch.equal(one.train_x, again.train_x) and one.classes == 10
    assert float(one.train_x.mean(0).abs().max()) < 1e-6 and set(one.test_y.tolist()) == set(range(10))
    values = torch.cat([one.train_x, one.test_x])
    assert -1 <= float(values.min()) < 0 < float(values.max()) <= 1


def test_without_scikit_learn_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImagesError, match=r"pip install 'mainstem\[lab\]'"):
        digits()


# --- CIFAR-10 -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "PER_FILE", FEW)


def contents(number: int) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, (FEW, PIXELS), dtype=np.uint8), generator.integers(0, 10, FEW).tolist()


def as_of_python_2(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A pickle as the published ones are written: by Python 2, whose strings are bytes."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        + b"(K\x01(K" + bytes([FEW]) + b"M" + struct.pack("<H", PIXELS) + b"t"
        + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + b"T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    )  # fmt: skip
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + listed + b"u."


def write_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch, **instead: bytes) -> Path:
    """The form for Python; the published digests are those of these files."""
    directory = folder / "cifar-10-batches-py"
    directory.mkdir()
    published = {}
    for number, name in enumerate(NAMES):
        data = instead.get(name) or as_of_python_2(*contents(number))
        (directory / name).write_bytes(data)
        published[name] = hashlib.md5(data).hexdigest()
    monkeypatch.setattr(cifar, "MD5", published)
    return directory


def write_binary(folder: Path) -> Path:
    directory = folder / "cifar-10-batches-bin"
    directory.mkdir()
    for number, name in enumerate(NAMES):
        pixels, labels = contents(number)
        rows = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], 1)
        (directory / f"{name}.bin").write_bytes(rows.tobytes())
    return directory


def check(images: Images) -> None:
    pixels, labels = zip(*(contents(number) for number in range(6)), strict=True)
    train = torch.from_numpy(np.concatenate(pixels[:5])).reshape(-1, 3, 32, 32).float() / 255
    assert torch.allclose(images.train_x, train - train.mean(0)) and images.train_y.tolist() == sum(labels[:5], [])
    assert images.test_x.shape == (FEW, 3, 32, 32) and images.test_y.tolist() == labels[5]
    assert torch.allclose(images.test_x + train.mean(0), torch.from_numpy(pixels[5]).reshape(-1, 3, 32, 32) / 255)


def test_both_forms_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_binary(tmp_path)
    check(cifar10(tmp_path))
    check(cifar10(directory))
    other = tmp_path / "other"
    other.mkdir()
    write_pickles(other, monkeypatch)
    check(cifar10(other))


def test_a_pickle_that_is_not_the_published_one_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_pickles(tmp_path, monkeypatch)
    whole = (directory / "data_batch_3").read_bytes()
    (directory / "data_batch_3").write_bytes(whole[:-100] + b"\x00" + whole[-99:])
    monkeypatch.setattr(cifar.ArrayUnpickler, "load", lambda self: pytest.fail("opened") if self else None)
    monkeypatch.setattr(cifar, "TRAINING", ("data_batch_3",))
    with pytest.raises(ImagesError, match=r"MD5 is .*data_batch_3"):
        cifar10(tmp_path)


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def test_a_pickle_that_names_anything_but_arrays_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one whose digest is right."""
    monkeypatch.chdir(tmp_path)
    write_pickles(tmp_path, monkeypatch, data_batch_2=pickle.dumps({"data": Harmful(), "labels": []}))
    with pytest.raises(ImagesError, match=r"only arrays.*data_batch_2"):
        cifar10(tmp_path)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    "made",
    [{"data": [1, 2], "labels": [3]}, {"labels": []}, [1], {"data": np.zeros((FEW, PIXELS)), "labels": [0] * FEW}],
)
def test_a_pickle_of_something_else_is_named(made: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pickles(tmp_path, monkeypatch, test_batch=pickle.dumps(made, protocol=4))
    with pytest.raises(ImagesError, match="test_batch"):
        cifar10(tmp_path)


def test_damaged_binary_files_are_named(tmp_path: Path) -> None:
    directory = write_binary(tmp_path)
    file = directory / "data_batch_4.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ImagesError, match=r"12,291 bytes and not 12,292.*data_batch_4"):
        cifar10(tmp_path)
    file.write_bytes(bytes([10]) + whole[1:])
    with pytest.raises(ImagesError, match=r"classes from \d to 10.*data_batch_4"):
        cifar10(tmp_path)
    file.unlink()
    with pytest.raises(ImagesError, match=r"missing.*data_batch_4"):
        cifar10(tmp_path)


def test_a_directory_without_files_is_named_and_torchvision_may_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImagesError, match=f"no files of CIFAR-10.*{tmp_path.name}"):
        cifar10(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ImagesError, match="torchvision, which is not installed"):
        cifar10(tmp_path, fetch=True)

    def fetched(folder: str, download: bool) -> None:
        assert download
        write_pickles(Path(folder), monkeypatch)

    monkeypatch.setitem(sys.modules, "torchvision.datasets", SimpleNamespace(CIFAR10=fetched))
    check(cifar10(tmp_path, fetch=True))


# --- batches ------------------------------------------------------------------------------------------------


def numbered(count: int = 10, padding: int = 0) -> Images:
    x = torch.arange(count).float()[:, None, None, None].expand(count, 1, 6, 6).clone()
    y = torch.arange(count)
    return Images(x, y, x, y, "numbers", "made by hand", padding)


def test_an_epoch_has_every_image_once_and_the_next_another_order() -> None:
    batch = image_batches(numbered(), 5, seed=0)
    epochs = [torch.cat([batch(2 * epoch + place)[1] for place in (0, 1)]).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != epochs[2]
    x, y = batch(7)
    assert torch.equal(x[:, 0, 0, 0].long(), y)


@pytest.mark.parametrize("padding", [0, 2])
def test_a_batch_depends_on_its_step_and_seed_alone(padding: int) -> None:
    first, second, other = (image_batches(numbered(padding=padding), 4, seed) for seed in (1, 1, 2))
    torch.manual_seed(5)
    later = first(9)
    for step in range(9):
        second(step)
    assert all(torch.equal(a, b) for a, b in zip(later, second(9), strict=True))
    assert not torch.equal(torch.cat([first(step)[1] for step in range(4)]), torch.cat([other(s)[1] for s in range(4)]))


def test_images_are_moved_and_flipped_whole() -> None:
    x = torch.randn(200, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    found = moved_and_flipped(x, 2, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for number in range(200):
        fits = {
            (down, right, flip)
            for down in range(5)
            for right in range(5)
            for flip in (False, True)
            if torch.equal(
                found[number].flip(2) if flip else found[number],
                padded[number, :, down : down + 5, right : right + 7],
            )
        }
        assert len(fits) == 1
        seen |= fits
    assert len(seen) > 40  # of 50


@pytest.mark.parametrize("size", [0, 11])
def test_batches_that_are_not_to_be_had_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="Batches of"):
        image_batches(numbered(), size, seed=0)
