"""What capture and decomposition cost on the default model, as multiples of the bare forward without cache.

    make bench            or     python -m benchmarks.capture [--rounds 15] [--lengths 16 128 1024]

"capture" keeps every write, every attention output before W_O, all keys and values, and the query rows and neuron
activations of the asked destination; "with reads" also the result of every read and the stream that enters each block,
from which the certificate of reads is made, as a trace does.

Memory that a run gives back is left to the process (`MALLOC_TRIM_THRESHOLD_`, for glibc): otherwise it depends on what
ran before whether the next one pays for thousands of page faults, or the bare forward does.
"""

import argparse
import os
import sys
from functools import partial

import torch

import mainstem
from benchmarks.ratios import compare, peak_memory, table
from mainstem.analysis.decompose import LEVELS, decompose
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

    def captured(reads: bool) -> object:
        return capture(model.module, model.anatomy, inputs.ids, last, reads=reads, **inputs.forward)

    captures = {"capture": partial(captured, False), "capture with reads": partial(captured, True)}
    levels = {f"decompose: {level}": (lambda level=level: decompose(moment, level)) for level in LEVELS}
    table(f"{length} tokens: times over the bare forward", compare(bare, captures | levels, rounds))
    memory = {"bare forward": peak_memory(bare)} | {name: peak_memory(run) for name, run in captures.items()}
    memory |= {f"decompose: {level}": peak_memory(lambda level=level: decompose(moment, level)) for level in LEVELS}
    table(f"{length} tokens: peak memory in MiB", memory)


if __name__ == "__main__":
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # is read when a process starts
        kept = {"MALLOC_TRIM_THRESHOLD_": str(1 << 31), "MALLOC_MMAP_THRESHOLD_": str(1 << 31)}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.capture", *sys.argv[1:]], os.environ | kept)
    main()
