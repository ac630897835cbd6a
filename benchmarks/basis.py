"""What streaming statistics cost on the default model, as multiples of the bare forward over the same windows.

    python -m benchmarks.basis [--rounds 7] [--tokens 1024] [--window 512]

The pass ends when its last point has gone by, before the unembedding, which the bare forward computes. Every state of
the stream and what every sublayer and every output matrix reads are measured: moments, kurtosis, outlier
features, massive activations. The null of random rotations is not in it.
"""

import argparse

import torch

import mainstem
from benchmarks.ratios import compare, peak_memory, table
from mainstem.basis.measuring import Watched, forward_of
from mainstem.basis.reference import reference
from mainstem.causal.stream_points import stream_points
from mainstem.causal.stream_statistics import PointMoments
from mainstem.causal.stream_watch import watch


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=512)
    arguments = parser.parse_args()
    model = mainstem.open("demo")
    print(f"{model.loaded.name}, {model.loaded.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    on, forward = reference(model, "drama", arguments.tokens, arguments.window), forward_of(model)
    points = stream_points(model.anatomy)

    @torch.no_grad()
    def bare() -> None:
        for rows in on.windows.batches(1):
            forward(on.windows.ids[rows])

    def run(make):
        return lambda: watch(model.module, forward, points, on.windows, make())

    contestants = {
        "taps alone": run(list),
        "moments": run(lambda: [PointMoments(points)]),
        "all statistics": run(lambda: Watched(points).watchers),
    }
    title = f"{on.windows.n_tokens} tokens, {len(points)} points: "
    table(f"{title}times over the bare forward", compare(bare, contestants, arguments.rounds))
    memory = {name: peak_memory(work) for name, work in {"bare forward": bare, **contestants}.items()}
    table(f"{title}peak memory in MiB", memory)


if __name__ == "__main__":
    main()
