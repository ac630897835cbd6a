"""One peer's capture over its own bare forward; run by `benchmarks.peers` in the peer's environment.

    python peer_run.py PEER MODEL_DIRECTORY ROUNDS LENGTH...

Imports nothing of Mainstem but `ratios`, which stands beside it. Prints one JSON object.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from ratios import AGAIN, compare  # noqa: E402


def transformer_lens(directory: str, ids: torch.Tensor):
    """TransformerBridge with everything cached, its default."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(directory, dtype=torch.float32)

    def capture():
        return bridge.run_with_cache(ids)

    return bridge.original_model, capture


def nnsight(directory: str, ids: torch.Tensor):
    """Three sites a layer: attention output, MLP output, block output."""
    from nnsight import LanguageModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = LanguageModel(module, tokenizer=AutoTokenizer.from_pretrained(directory))

    def capture():
        kept = []
        with model.trace(ids):
            for layer in model.model.layers:
                kept.append(layer.self_attn.output[0].save())
                kept.append(layer.mlp.output.save())
                kept.append(layer.output.save())
        return kept

    return module, capture


PEERS = {"transformer_lens": transformer_lens, "nnsight": nnsight}


def main() -> None:
    """Measures one peer at each length."""
    name, directory, rounds, *lengths = sys.argv[1:]
    out = {}
    for length in map(int, lengths):
        ids = torch.arange(1000, 1000 + length)[None]
        module, capture = PEERS[name](directory, ids)

        @torch.no_grad()
        def bare(module=module, ids=ids):
            return module(input_ids=ids, use_cache=False)

        with torch.no_grad():
            measured = compare(bare, {name: capture}, int(rounds))
        out[length] = {"capture": measured[name], "noise": measured[AGAIN]}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
