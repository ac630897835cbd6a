"""What a patching sweep costs on the default model, in bare forwards of the same prompt.

    make bench            or     python -m benchmarks.patching [--grids resid heads-positions] [--memory 64]

All layers and positions of the residual stream on a prompt of 14 tokens (420 cells, and 14 of the final stream), and
heads by positions; and causal tracing of all layers, positions and kinds of states. The prompts differ at the first
token, so that no position is free because both runs are equal
there. One cell is one run; a loop would make a forward for each. A bare forward is timed after every batch of the
sweep, so that what slows one slows the other; the time of the sweep holds everything, from recording and proofs to the
check of single cells. Peak memory is the rise of resident memory during a sweep, beside the budget that it was given.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import mainstem
from benchmarks.ratios import peak_memory, table
from mainstem.causal.causal_tracing import CausalTrace
from mainstem.causal.patching import Sweep

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "After Mary and John went to the store, Mary gave a drink to"
ANSWERS = (" Mary", " John")
MIB = 2**20
FORWARDS = 5
"""How many bare forwards are timed on either side of causal tracing."""


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["resid", "heads-positions"])
    parser.add_argument("--memory", type=int, nargs="+", default=[1024, 64], help="budgets in MiB for the peak memory")
    arguments = parser.parse_args()
    model = mainstem.open("demo")
    print(f"{model.loaded.name}, {model.loaded.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    model.anatomy  # noqa: B018 (discovered once for a model, whatever is asked of it)
    for name in arguments.grids:
        measure(model, name)
    measure_tracing(model)
    rows: dict[str, object] = {
        f"budget of {budget} MiB": peak_memory(lambda budget=budget: sweep(model, "resid", memory=budget * MIB))
        for budget in arguments.memory
    }
    table("resid: peak memory of a sweep over the model, in MiB", rows)


def sweep(model: "mainstem.Model", grid: str, after: Callable[[], object] = lambda: None, **options) -> Sweep:
    """One sweep; `after` is called after each batch."""
    return model.patch(CLEAN, CORRUPTED, *ANSWERS, grid=grid, progress=lambda done, total: after() and None, **options)


def timed(model: "mainstem.Model", grid: str) -> tuple[Sweep, float, float]:
    """A sweep, its seconds, and those of a bare forward."""
    ids = torch.tensor([model.encode(CLEAN)])
    forwards: list[float] = []

    @torch.no_grad()
    def bare() -> None:
        started = time.perf_counter()
        model.module(input_ids=ids, use_cache=False)
        forwards.append(time.perf_counter() - started)

    bare()
    forwards.clear()
    started = time.perf_counter()
    made = sweep(model, grid, bare)
    taken = time.perf_counter() - started - sum(forwards)
    return made, taken, statistics.median(forwards)


def measure(model: "mainstem.Model", grid: str) -> None:
    """The time of a sweep over that of as many bare forwards."""
    made, taken, forward = timed(model, grid)
    rows = {
        "runs": made.run,
        "cells equal in both prompts": made.identical,
        **costs("sweep", made, taken, forward),
    }
    table(f"{grid}: {len(made.rows)} x {len(made.columns)}, {made.position + 1} tokens", rows)


def costs(what: str, made: Sweep | CausalTrace, taken: float, forward: float) -> dict[str, object]:
    """Rows of a table: what took how long, in seconds and in bare forwards, how exact it was, what was switched off."""
    return {
        "bare forward, seconds": forward,
        f"{what}, seconds": taken,
        f"{what}, bare forwards": taken / forward,
        "times faster than a bare forward for each run": made.run * forward / taken,
        "largest difference of a logit from a full forward": f"{made.error:.1e}",
        "switched off": "; ".join(made.notes) or "nothing",
    }


def measure_tracing(model: "mainstem.Model") -> None:
    """The time of causal tracing over that of as many bare forwards, which are timed before it and after it."""
    ids = torch.tensor([model.encode(CLEAN)])

    @torch.no_grad()
    def bare() -> float:
        started = time.perf_counter()
        model.module(input_ids=ids, use_cache=False)
        return time.perf_counter() - started

    bare()
    forwards = [bare() for _ in range(FORWARDS)]
    started = time.perf_counter()
    made = model.causal_trace(CLEAN, CORRUPTED, *ANSWERS, "logit-difference")
    taken = time.perf_counter() - started
    forward = statistics.median([*forwards, *(bare() for _ in range(FORWARDS))])
    rows = {"runs": made.run, **costs("tracing", made, taken, forward)}
    table(f"causal tracing: {', '.join(made.restored)} x {len(made.layers)} layers, {ids.shape[1]} tokens", rows)


if __name__ == "__main__":
    main()
