"""One peer's capture and patching sweep over its own bare forward; run by `benchmarks.peers` in the peer's environment.

    python peer_run.py PEER REQUEST

The request is a JSON object: `directory` of the model, `rounds`, `lengths` to capture at, and of the sweep the `clean`
and `corrupted` ids, `answers` [right, wrong], and the `cells` [layer, position] to patch; the answer is one, too.
Imports nothing of Mainstem but `ratios`, which stands beside it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from ratios import AGAIN, compare  # noqa: E402

Cell = Callable[[int, int], torch.Tensor]
"""The logits [1, pos, d_vocab] of one run: the stream that enters a layer taken from the other run at a position."""


@dataclass
class Peer:
    """A tool with the model: the bare module, a capture of a run, and the cells of a patching sweep of two prompts."""

    module: torch.nn.Module
    capture: Callable[[torch.Tensor], object]
    cells: Callable[[torch.Tensor, torch.Tensor], Cell]


def transformer_lens(directory: str) -> Peer:
    """TransformerBridge with everything cached, its default; a cell is a run with one hook."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(directory, dtype=torch.float32)

    def cells(clean: torch.Tensor, corrupted: torch.Tensor) -> Cell:
        _, kept = bridge.run_with_cache(clean)

        def cell(layer: int, position: int) -> torch.Tensor:
            name = f"blocks.{layer}.hook_resid_pre"

            def put(value, hook):
                value = value.clone()
                value[:, position] = kept[name][:, position]
                return value

            return bridge.run_with_hooks(corrupted, fwd_hooks=[(name, put)])

        return cell

    return Peer(bridge.original_model, bridge.run_with_cache, cells)


def nnsight(directory: str) -> Peer:
    """Three sites a layer: attention output, MLP output, block output; a cell is a trace with one assignment."""
    from nnsight import LanguageModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = LanguageModel(module, tokenizer=AutoTokenizer.from_pretrained(directory))

    def capture(ids):
        kept = []
        with model.trace(ids):
            for layer in model.model.layers:
                kept.append(layer.self_attn.output[0].save())
                kept.append(layer.mlp.output.save())
                kept.append(layer.output.save())
        return kept

    def cells(clean: torch.Tensor, corrupted: torch.Tensor) -> Cell:
        kept = []
        with model.trace(clean):
            for layer in model.model.layers:
                kept.append(layer.input.save())

        def cell(layer: int, position: int) -> torch.Tensor:
            with model.trace(corrupted):
                model.model.layers[layer].input[:, position] = kept[layer][:, position]
                logits = model.lm_head.output.save()
            return logits  # noqa: RET504 (there is no leaving a trace with a value)

        return cell

    return Peer(module, capture, cells)


PEERS = {"transformer_lens": transformer_lens, "nnsight": nnsight}


def captures(name: str, peer: Peer, lengths: list[int], rounds: int) -> dict[int, dict[str, float]]:
    """The capture's ratio at each length."""
    out = {}
    for length in lengths:
        ids = torch.arange(1000, 1000 + length)[None]
        others = {name: lambda ids=ids: peer.capture(ids)}
        measured = compare(lambda ids=ids: peer.module(input_ids=ids, use_cache=False), others, rounds)
        out[length] = {"capture": measured[name], "noise": measured[AGAIN]}
    return out


def sweep(peer: Peer, request: dict) -> dict[str, object]:
    """The time of a cell over that of a bare forward after it, as a median, and each cell's logit difference."""
    clean, corrupted = (torch.tensor([request[name]]) for name in ("clean", "corrupted"))
    right, wrong = request["answers"]
    cell = peer.cells(clean, corrupted)
    cell(*request["cells"][0])
    ratios, values = [], []
    for layer, position in request["cells"]:
        started = time.perf_counter()
        logits = cell(layer, position)
        taken = time.perf_counter() - started
        started = time.perf_counter()
        peer.module(input_ids=corrupted, use_cache=False)
        ratios.append(taken / (time.perf_counter() - started))
        values.append(float(logits[0, -1, right] - logits[0, -1, wrong]))
    return {"cell": statistics.median(ratios), "values": values}


@torch.no_grad()
def main() -> None:
    """Measures one peer."""
    name, request = sys.argv[1], json.loads(sys.argv[2])
    peer = PEERS[name](request["directory"])
    swept = sweep(peer, request)
    print(json.dumps({"captures": captures(name, peer, request["lengths"], request["rounds"]), "sweep": swept}))


if __name__ == "__main__":
    main()
