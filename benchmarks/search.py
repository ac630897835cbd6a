"""What scores of every unit cost on the default model, as multiples of the bare forward without cache.

    make bench            or     python -m benchmarks.search [--rounds 9] [--lengths 16 128 1024] [--measure]

All FFN neurons and attention subvalues of a prompt's last position, for the model's prediction. Searches start from a
captured run: their times hold everything from the first product with the unembedding to the ranked units. `exhaustive`
is timed on a sample of units in the search's own chunks, and scaled up to all. Counts, which no machine changes, come
last: for the shapes of a 7-billion-parameter model beside the method's published code.
"""

import argparse
import statistics
import time

import torch

import mainstem
from benchmarks.ratios import BASELINE, compare, peak_memory, table
from mainstem.analysis.attribution import attribute
from mainstem.analysis.decompose import Decomposition, decompose
from mainstem.analysis.search import CHUNKS, IncreaseSearch
from mainstem.targets import Target

TEXT = "The river rises in the hills and runs through the town to the sea. "
KINDS = {"ffn_neuron", "attention_subvalue"}
CHUNK = CHUNKS[-1]
SAMPLE = 4 * CHUNK


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--measure", action="store_true", help="first measure the neurons' reach, if it is not cached")
    arguments = parser.parse_args()
    model = mainstem.open("demo")
    print(f"{model.loaded.name}, {model.loaded.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if arguments.measure:
        model.reach(measure=True)
    for length in arguments.lengths:
        measure(model, length, arguments.rounds if length <= 128 else max(3, arguments.rounds // 3))
    counts()


def measure(model: "mainstem.Model", length: int, rounds: int) -> None:
    """Times, units scored and memory at one prompt length."""
    ids = model.encode(TEXT * (length // 8 + 2))[:length]
    trace = model.trace(ids)
    made = decompose(trace.run.moment(), "units")
    target = Target(ids=(int(trace.logits().argmax()),))
    reach = model.reach()

    @torch.no_grad()
    def bare() -> object:
        return model.module(input_ids=trace.inputs.ids, **trace.inputs.forward)

    def top(count: int, norm, negative: bool = False):
        return lambda: IncreaseSearch([(made, target)], norm, KINDS, reach).top(count, negative)

    known = "cached reach" if reach else "no cached reach"
    runs = {"additive score of every unit": lambda: attribute(made, target, "additive")}
    for norm in ("frozen", "recompute"):
        runs[f"top 100, {norm} norm"] = top(100, norm)
        runs[f"most negative 10, {norm} norm, {known}"] = top(10, norm, negative=True)
    if reach:
        runs["looking the reach up"] = model.reach
    times = compare(bare, runs, rounds)
    table(f"{length} tokens: times over the bare forward", times)
    scored = {name: run() for name, run in runs.items() if name.startswith(("top", "most"))}
    table(f"{length} tokens: units scored", {name: f"{r.scored} of {r.units:,}" for name, r in scored.items()})
    every = exhaustive(made, target) / times[BASELINE]
    faster = {f"top 100, {norm} norm": every / times[f"top 100, {norm} norm"] for norm in ("frozen", "recompute")}
    table(f"{length} tokens: exhaustive scoring", {"over the bare forward (from a sample)": every})
    table(f"{length} tokens: times faster than exhaustive scoring", faster)
    memory = {BASELINE: peak_memory(bare)}
    memory |= {name: peak_memory(run) for name, run in runs.items()}
    memory["trace, explain"] = peak_memory(lambda: model.explain(ids, top=10))
    table(f"{length} tokens: peak memory in MiB", memory)


def exhaustive(made: Decomposition, target: Target) -> float:
    """Seconds to score every unit in the search's own chunks, from the median chunk of a sample."""
    search = IncreaseSearch([(made, target)], "frozen", KINDS)
    total = int(search.starts[-1])
    places = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:SAMPLE]
    seconds = []
    for chunk in places.split(CHUNK):
        started = time.perf_counter()
        search.scores(chunk)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * total / CHUNK


# --- counts -------------------------------------------------------------------------------------------------

SEVEN_B = {"layers": 32, "d_model": 4096, "d_mlp": 11008, "heads": 32, "d_head": 128, "d_vocab": 32000}
PUBLISHED = 1_400_000
"""Products with the unembedding that the method's published notebook takes for one prompt of such a model."""


def counts(tokens: int = 16, scored: int = 110, shapes: dict[str, int] = SEVEN_B) -> None:
    """Products with the unembedding, and multiplications, for a top 100 from counts alone."""
    table(f"counts for {shapes}, {tokens} tokens, top 100", counted(tokens, scored, shapes))


def counted(tokens: int, scored: int, shapes: dict[str, int]) -> dict[str, object]:
    """The rows of the table; `scored` is the number of units scored for a top 100."""
    layers, width, vocabulary = shapes["layers"], shapes["d_model"], shapes["d_vocab"]
    neurons, subvalues = layers * shapes["d_mlp"], layers * shapes["heads"] * tokens
    one = width * vocabulary
    bases = 2 * layers
    products = 2 * bases + scored
    per_layer = 4 * width**2 + 3 * width * shapes["d_mlp"]
    inner = 2 * (neurons * width + subvalues * shapes["d_head"] + layers * width**2)
    forward = tokens * (layers * per_layer + one)
    search = products * one + inner
    every = (bases + neurons + subvalues) * one
    return {
        "units": f"{neurons + subvalues:,}",
        "unembeddings: search": f"{products:,} ({bases} streams, {bases} means, {scored} units)",
        "unembeddings: every unit": f"{bases + neurons + subvalues:,}",
        "unembeddings: the published notebook": f"{PUBLISHED:,}",
        "multiplications: bare forward": f"{forward:.3g}",
        "multiplications: search": f"{search:.3g}, {search / forward:.2f} forwards",
        "multiplications: every unit": f"{every:.3g}, {every / forward:.0f} forwards",
        "multiplications: the published notebook": f"{PUBLISHED * one:.3g}, {PUBLISHED * one / forward:.0f} forwards",
    }


if __name__ == "__main__":
    main()
