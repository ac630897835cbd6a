"""Composition of every pair of heads of the default model: seconds, by kind and for all three with both nulls.

    make bench            or     python -m benchmarks.composition [--rounds 3] [--threads 1 2]

"all pairs" is one product for all 72,900 ordered pairs of the 270 heads, from factors at hand; "whole analysis" gathers
the factors of Q-, K- and V-composition from the model, and has both nulls, rates, the repetition without the shared
directions, and the certificate. Discovery and the run that finds rotary embedding come once for a model, before.
"""

import argparse
import time
from collections.abc import Callable

import torch

import mainstem
from benchmarks.ratios import table
from mainstem.analysis.composition import squared, stack
from mainstem.analysis.factored import Factored


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    model = mainstem.open("demo")
    print(f"{model.loaded.name}, {model.loaded.dtype}, torch {torch.__version__}")
    once = seconds(lambda: model.weights, 1)
    print(f"discovery and one run for the operands: {once}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        measure(model, arguments.rounds, threads)


def measure(model: "mainstem.Model", rounds: int, threads: int) -> None:
    """The table for a number of threads."""
    weights = model.weights
    layers = list(dict.fromkeys(head.sublayer for head in weights.heads))

    def rows(made: Callable[..., Factored]) -> torch.Tensor:
        return torch.cat([made(unit).to(torch.float32).narrow() for unit in layers])

    readers = stack(weights.heads, rows(weights.qk))
    writers = stack(weights.heads, rows(lambda unit: weights.ov(unit).T))
    found = model.composition()
    ways = {
        "all pairs of one kind": seconds(lambda: squared(readers, writers), rounds),
        "whole analysis, q k v": seconds(model.composition, rounds),
        "pairs that can compose": f"{found.kinds[0].pairs:,} of each kind",
    }
    table(f"{threads} threads: median seconds [least, most]", ways)


def seconds(work: Callable[[], object], rounds: int) -> str:
    """The median of some runs."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    taken.sort()
    return f"{taken[len(taken) // 2]:.1f} [{taken[0]:.1f}, {taken[-1]:.1f}]"


if __name__ == "__main__":
    main()
