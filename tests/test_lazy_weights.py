"""Weights larger than memory: a sharded checkpoint opened in its own dtype stays in its files while it is analysed."""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mainstem

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """5 MB of bfloat16 in a shard for every few matrices."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("sharded") / "model"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="500KB")
    assert len(list(directory.glob("*.safetensors"))) > 5
    return directory


def mappings(directory: Path) -> list[tuple[range, Path, int]]:
    """Of the checkpoint's files in this process: addresses, file, and bytes that are the process's own."""
    found = []
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        head, *fields = part.splitlines()
        name = head.split(maxsplit=5)[5:]
        if name and Path(name[0]).parent == directory:
            start, end = (int(place, 16) for place in head.split()[0].split("-"))
            own = next(int(field.split()[1]) for field in fields if field.startswith("Anonymous:"))
            found.append((range(start, end), Path(name[0]), own * 1024))
    return found


def outside(module: torch.nn.Module, directory: Path) -> list[str]:
    """The parameters that do not lie in the checkpoint's files."""
    places = [addresses for addresses, _, _ in mappings(directory)]
    return [
        name
        for name, parameter in module.named_parameters()
        if not any(parameter.data_ptr() in addresses for addresses in places)
    ]


def test_weights_stay_in_their_shards(sharded):
    model = mainstem.open(sharded, dtype="auto")
    assert model.loaded.dtype == "bfloat16"
    assert outside(model.module, sharded) == []
    assert {file.name for _, file, _ in mappings(sharded)} == {file.name for file in sharded.glob("*.safetensors")}
    assert model.head_circuits("L3H5", top=2).factors.holds
    assert model.composition(("k",), top=2).certificate.holds
    assert model.compare_subspaces("L1H2.write", "L3H4.key", draws=5)
    assert outside(model.module, sharded) == []
    assert sum(own for _, _, own in mappings(sharded)) == 0


def test_weights_in_another_dtype_are_copies(sharded):
    """What the test above can see: converted weights are the process's own."""
    module = mainstem.open(sharded, dtype="float32").module
    assert outside(module, sharded) == [name for name, _ in module.named_parameters()]
