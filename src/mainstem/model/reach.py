"""How far each neuron can move each logit: numbers of the weights alone, made once and kept in the user's cache.

A neuron's write is its activation times a column of W_out, so what it does to all logits is a number times a =
W_U (gain * centre(column)), whatever the prompt. Of a four numbers are kept: its lowest and highest entry, its mean,
and the sum of squares around the mean. With them the search for the most negative units scores about as few as the one
for the most positive.

Cost: one product of all neurons with the vocabulary, d_vocab x d_model x neurons multiplications, in chunks; 16 bytes
a neuron on disk. The cache's name and identity are a hash of every weight used (unembedding, gain, W_out), taken anew
at each look-up at the speed of memory, so that numbers of other weights are never used.
Limits: neurons of routed experts have none.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.model.anatomy import Anatomy, Write
from mainstem.model.cache import Report, build_once, cache_directory, is_complete, report_to_stderr
from mainstem.units import Unit

FORMAT = "1"
NAME = "reach-"
CHUNK = 128
_KEYS = torch.randint(-(2**62), 2**62, (4096,), generator=torch.Generator().manual_seed(20)) * 2 + 1


@dataclass(frozen=True, eq=False)
class Reach:
    """What each neuron of one write does to all logits, for an activation and a final scale of 1.

    Lowest, highest and mean change, and the sum over the vocabulary of squares around the mean.
    """

    low: Float[Tensor, " part"]
    high: Float[Tensor, " part"]
    mean: Float[Tensor, " part"]
    squares: Float[Tensor, " part"]


def stored_reach(anatomy: Anatomy) -> dict[str, Reach] | None:
    """What the cache holds for these weights, by the address of each write's first neuron; None if nothing."""
    if not any(cache_directory().glob(f"{NAME}*")):
        return None
    key = fingerprint(anatomy)
    directory = cache_directory() / _name(key)
    return _load(directory, anatomy) if is_complete(directory, _identity(key)) else None


def measured_reach(anatomy: Anatomy, report: Report = report_to_stderr) -> dict[str, Reach]:
    """The same, measured and stored first if it is not there.

    Raises:
        CacheError: the cache cannot be written.
    """
    key = fingerprint(anatomy)

    def build(directory: Path, scratch: Path) -> None:
        import time

        from safetensors.torch import save_file

        writes = list(neuron_writes(anatomy))
        count = sum(matrix.shape[1] for _, matrix in writes)
        report(f"Measuring how far {count:,} neurons can move {anatomy.sizes.d_vocab:,} logits ...")
        started = time.perf_counter()
        tensors = {}
        for first, matrix in writes:
            made = measure(anatomy, matrix)
            tensors |= {f"{first}/{name}": getattr(made, name).cpu() for name in Reach.__annotations__}
        save_file(tensors, directory / "reach.safetensors")
        size = (directory / "reach.safetensors").stat().st_size / 1e6
        report(f"Measured in {time.perf_counter() - started:.1f} s; {size:.2f} MB kept in {cache_directory()}.")

    return _load(build_once(_name(key), _identity(key), build, report=report), anatomy)


def neuron_writes(anatomy: Anatomy) -> Iterable[tuple[str, Tensor]]:
    """For each write made of neurons that every token uses: the first neuron's address, and W_out [d_model, neuron]."""
    for write in anatomy.writes:
        if write.neurons and write.projection is not None and write.unit.layer is not None:
            yield _first_neuron(write), write.projection.columns(slice(None))


def _first_neuron(write: Write) -> str:
    layer, nth = write.unit.layer, write.unit.nth
    assert layer is not None
    if write.shared_expert is not None:
        return str(Unit.shared_neuron(layer, write.shared_expert, 0, nth=nth))
    return str(Unit.ffn_neuron(layer, write.first_neuron, nth=nth))


@torch.no_grad()
def measure(anatomy: Anatomy, matrix: Float[Tensor, "d_model neuron"]) -> Reach:
    """One pass over the vocabulary for every column, a few columns at a time."""
    readout, norm = anatomy.readout, anatomy.readout.norm
    dtype = torch.float64 if readout.unembedding.dtype == torch.float64 else torch.float32
    weight = readout.unembedding
    found = []
    for columns in matrix.split(CHUNK, dim=1):
        rows = columns.T.double()
        if norm is not None:
            rows = norm.linear(rows, torch.ones(1, dtype=rows.dtype, device=rows.device))
        rows = rows if readout.before is None else readout.before(rows)
        rows = (rows * readout.scale).to(dtype)
        a = torch.cat([rows @ piece.to(dtype).T for piece in weight.split(8192)], -1)
        mean = a.mean(-1, keepdim=True)
        low, high = a.aminmax(dim=-1)
        found.append(torch.stack([low, high, mean[:, 0], a.sub_(mean).pow_(2).sum(-1)]))
    return Reach(*torch.cat(found, -1))


def fingerprint(anatomy: Anatomy) -> str:
    """A hash of every weight that the numbers depend on, in hexadecimal."""
    readout, norm = anatomy.readout, anatomy.readout.norm
    digest = hashlib.sha256()
    constants = f"{readout.scale} {norm is not None and norm.centred}"
    digest.update(constants.encode())
    tensors = [("unembedding", readout.unembedding), *neuron_writes(anatomy)]
    if norm is not None and norm.gain is not None:
        tensors.append(("gain", norm.gain))
    if readout.before is not None:
        tensors += [(f"before {i}", factor) for i, factor in enumerate(readout.before.factors)]
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(_folded(tensor))
    return digest.hexdigest()


def _folded(tensor: Tensor) -> bytes:
    """A tensor's bytes, every 32 KB folded into 8: sums of words times fixed odd numbers, modulo 2^64.

    A change of any one word changes the sum; it is some eight times as fast as a cryptographic hash of all bytes.
    """
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    block = 8 * len(_KEYS)
    whole = len(data) // block * block
    folded = torch.mv(data[:whole].view(torch.int64).reshape(-1, len(_KEYS)), _KEYS) if whole else torch.empty(0)
    return folded.numpy().tobytes() + data[whole:].numpy().tobytes()


def _name(key: str) -> str:
    return f"{NAME}{key[:16]}"


def _identity(key: str) -> dict[str, str]:
    return {"weights": key, "format": FORMAT}


def _load(directory: Path, anatomy: Anatomy) -> dict[str, Reach]:
    from safetensors.torch import load_file

    tensors = load_file(directory / "reach.safetensors", device=str(anatomy.readout.unembedding.device))
    firsts = dict.fromkeys(name.partition("/")[0] for name in tensors)
    return {first: Reach(*(tensors[f"{first}/{name}"] for name in Reach.__annotations__)) for first in firsts}
