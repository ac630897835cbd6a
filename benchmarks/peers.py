"""Capture and patching beside other tools, each in an environment of its own, on the same model with the same tokens.

    make bench-peers      or     python -m benchmarks.peers [--install] [--rounds 9] [--lengths 128 1024]

A peer's ratio is its capture over its own bare forward, measured in its own process as everywhere in these benchmarks.
The sweep is of the residual stream, all layers by all positions (`benchmarks.patching`): one ratio for each tool, a
cell's time over a bare forward's. Mainstem's is of the whole sweep, with all that it begins with and checks; a peer's
is the median of some of the cells, each a full forward of its own. Their logit differences are compared.
Environments live under .peers/ and are made only with --install; a peer that is not there is left out by name.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

import mainstem
from benchmarks.patching import ANSWERS, CLEAN, CORRUPTED, timed
from benchmarks.ratios import AGAIN, compare, table
from mainstem.causal.patching import Sweep
from mainstem.model import demo
from mainstem.run.capture import capture

PACKAGES = {"transformer_lens": ["transformer-lens"], "nnsight": ["nnsight", "transformers", "accelerate"]}
HOME = Path(".peers")
CELLS = 40
"""How many cells of the sweep a peer is timed on."""


def main() -> None:
    """Prints one table for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024])
    arguments = parser.parse_args()
    if arguments.install:
        for name, packages in PACKAGES.items():
            install(name, packages)
    model = mainstem.open("demo")
    model.anatomy  # noqa: B018 (discovered once for a model, whatever is asked of it)
    own_sweep, taken, forward = timed(model, "resid")
    cells = some_cells(own_sweep)
    request = {
        "directory": str(demo.ensure()),
        "rounds": arguments.rounds,
        "lengths": arguments.lengths,
        "clean": model.encode(CLEAN),
        "corrupted": model.encode(CORRUPTED),
        "answers": [model.encode(answer)[0] for answer in ANSWERS],
        "cells": cells,
    }
    rows = {name: run_peer(name, request) for name in PACKAGES}
    show_sweep(own_sweep, taken / forward / own_sweep.run, cells, rows)
    for length in arguments.lengths:
        own = measure_own(model, length, arguments.rounds)
        shown: dict[str, object] = {"Mainstem": own["capture"], "Mainstem's noise": own[AGAIN]}
        for name, found in rows.items():
            if found is None:
                shown[name] = "not installed (use --install)"
            else:
                shown[name] = found["captures"][str(length)]["capture"]
                shown[f"{name}'s noise"] = found["captures"][str(length)]["noise"]
        table(f"{length} tokens: capture over the bare forward", shown)


def interpreter(name: str) -> Path:
    """The Python of a peer's environment."""
    return HOME / name / "bin" / "python"


def install(name: str, packages: list[str]) -> None:
    """An environment with torch first, so that no other build of it is fetched."""
    if interpreter(name).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(HOME / name)], check=True)
    release = torch.__version__.partition("+")[0]
    for wanted in ([f"torch=={release}"], packages):
        subprocess.run([str(interpreter(name)), "-m", "pip", "install", "-q", *wanted], check=True)


def run_peer(name: str, request: dict) -> dict | None:
    """What `peer_run` measured in the peer's environment; None if there is none or it failed."""
    if not interpreter(name).exists():
        return None
    script = Path(__file__).with_name("peer_run.py")
    done = subprocess.run(
        [str(interpreter(name)), str(script), name, json.dumps(request)], capture_output=True, text=True
    )
    if done.returncode:
        print(f"{name} failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def some_cells(made: Sweep) -> list[tuple[int, int]]:
    """Cells from all over a sweep, but for the final stream's row."""
    count = (len(made.rows) - 1) * len(made.columns)
    return [divmod(i, len(made.columns)) for i in range(0, count, max(1, count // CELLS))]


def show_sweep(made: Sweep, own: float, cells: list[tuple[int, int]], rows: dict[str, dict | None]) -> None:
    """One ratio for each tool, and how far a peer's logit differences are from Mainstem's."""
    shown: dict[str, object] = {"Mainstem": own}
    for name, found in rows.items():
        if found is None:
            shown[name] = "not installed (use --install)"
            continue
        shown[name] = found["sweep"]["cell"]
        values = zip(cells, found["sweep"]["values"], strict=True)
        far = max(abs(float(made.values[at]) - value) for at, value in values)
        shown[f"{name}, largest difference"] = f"{far:.1e}"
    size = f"{len(made.rows) - 1} x {len(made.columns)}"
    table(f"patching the residual stream, {size}: bare forwards for a cell", shown)


def measure_own(model: "mainstem.Model", length: int, rounds: int) -> dict[str, float]:
    """Mainstem's own ratio on the same tokens."""
    inputs = model.trace(list(range(1000, 1000 + length))).inputs
    last = inputs.destinations([-1])

    @torch.no_grad()
    def bare() -> object:
        return model.module(input_ids=inputs.ids, **inputs.forward)

    def captured() -> object:
        return capture(model.module, model.anatomy, inputs.ids, last, **inputs.forward)

    return compare(bare, {"capture": captured}, rounds)


if __name__ == "__main__":
    main()
