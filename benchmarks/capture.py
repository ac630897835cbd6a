"""What capture and decomposition cost on the default model, as multiples of the bare forward without cache.

    make bench            or     python -m benchmarks.capture [--rounds 15] [--lengths 16 128 1024]

"capture" keeps every write, every attention output before W_O, all keys and values, and the query rows of the asked
destination; "with neurons" also its neurons' activations; "with reads" also the result of every read and the stream
that enters each block, from which the certificate of reads is made, as a trace does.
"""

import argparse
from dataclasses import replace
from functools import partial

import torch

import mainstem
from benchmarks.ratios import compare, peak_memory, table
from mainstem.analysis.decompose import LEVELS, decompose
from mainstem.model.anatomy import Anatomy
from mainstem.run.capture import capture

TEXT = "The river rises in the hills and runs through the town to the sea. "


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 128, 1024])
    arguments = parser.parse_args()
    model = mainstem.open("demo")
    print(f"{model.loaded.name}, {model.loaded.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for length in arguments.lengths:
        measure(model, length, max(5, arguments.rounds if length <= 128 else arguments.rounds // 2))


def measure(model: "mainstem.Model", length: int, rounds: int) -> None:
    """Times and memory at one prompt length."""
    ids = (model.encode(TEXT * (length // 8 + 2)))[:length]
    trace = model.trace(ids)
    inputs = trace.inputs
    last = inputs.destinations([-1])
    moment = trace.run.moment()

    @torch.no_grad()
    def bare() -> object:
        return model.module(input_ids=inputs.ids, **inputs.forward)

    def captured(anatomy: Anatomy, reads: bool) -> object:
        return capture(model.module, anatomy, inputs.ids, last, reads=reads, **inputs.forward)

    whole = model.anatomy
    writes = tuple(replace(write, source=None) if write.neurons else write for write in whole.writes)
    captures = {
        "capture": partial(captured, replace(whole, writes=writes), False),
        "with neurons": partial(captured, whole, False),
        "with reads": partial(captured, whole, True),
    }
    table(f"{length} tokens: times over the bare forward", compare(bare, captures, rounds))
    levels = {f"decompose: {level}": (lambda level=level: decompose(moment, level)) for level in LEVELS}
    table(f"{length} tokens: decomposition", compare(bare, levels, rounds))
    memory = {"bare forward": peak_memory(bare)} | {name: peak_memory(run) for name, run in captures.items()}
    memory |= {f"decompose: {level}": peak_memory(lambda level=level: decompose(moment, level)) for level in LEVELS}
    table(f"{length} tokens: peak memory in MiB", memory)


if __name__ == "__main__":
    main()
