"""Capture beside other tools, each in an environment of its own, on the same model with the same tokens.

    make bench-peers      or     python -m benchmarks.peers [--install] [--rounds 9] [--lengths 128 1024]

A peer's ratio is its capture over its own bare forward, measured in its own process as everywhere in these benchmarks.
Environments live under .peers/ and are made only with --install; a peer that is not there is left out by name.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

import mainstem
from benchmarks.ratios import AGAIN, compare, table
from mainstem.model import demo
from mainstem.run.capture import capture

PACKAGES = {"transformer_lens": ["transformer-lens"], "nnsight": ["nnsight", "transformers", "accelerate"]}
HOME = Path(".peers")


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
    rows = {name: run_peer(name, arguments.rounds, arguments.lengths) for name in PACKAGES}
    for length in arguments.lengths:
        own = measure_own(length, arguments.rounds)
        shown: dict[str, object] = {"Mainstem": own["capture"], "Mainstem's noise": own[AGAIN]}
        for name, found in rows.items():
            if found is None:
                shown[name] = "not installed (use --install)"
            else:
                shown[name] = found[str(length)]["capture"]
                shown[f"{name}'s noise"] = found[str(length)]["noise"]
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


def run_peer(name: str, rounds: int, lengths: list[int]) -> dict | None:
    """What `peer_run` measured in the peer's environment; None if there is none or it failed."""
    if not interpreter(name).exists():
        return None
    script = Path(__file__).with_name("peer_run.py")
    command = [str(interpreter(name)), str(script), name, str(demo.ensure()), str(rounds), *map(str, lengths)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name} failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_own(length: int, rounds: int) -> dict[str, float]:
    """Mainstem's own ratio on the same tokens."""
    model = mainstem.open("demo")
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
