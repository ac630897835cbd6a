"""Attribution patching on the default model: its cost in bare forwards, and how well it orders units.

    make bench            or     python -m benchmarks.attribution [--rounds 5] [--sample 100]

The prompt is that of the indirect object; the corrupted one names the other person a second time. The answers' logit
difference is the metric. Each estimate is compared with patching a sample of units for real, in absolute value where it
has no sign; "top" are the units among the first 20 of the sample by either.
"""

import argparse

import torch

import mainstem
from benchmarks.ratios import compare, table
from mainstem.causal.attribution_patching import GRADIENTS, KINDS, AttributionPatcher, AttributionPatching
from mainstem.causal.exact_patching import Agreement, agreement, exact_effects
from mainstem.causal.metrics import Metric
from mainstem.causal.tracked import Prompt
from mainstem.run.inputs import base_arguments

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
GROUPS = {"heads and sublayers": ("head", "sublayer"), "queries": ("query",), "keys": ("key",), "values": ("value",)}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample", type=int, default=100)
    arguments = parser.parse_args()
    model = mainstem.open("demo")
    print(f"{model.loaded.name}, {model.loaded.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    answers = tuple(model.encode(name)[0] for name in (" Mary", " John"))
    metric = Metric("logit-difference", answers[:1], answers[1:])
    forward = base_arguments(model.module)
    prompts = [Prompt(torch.tensor(ids), len(ids) - 1, forward) for ids in map(model.encode, (CLEAN, CORRUPTED))]
    costs(model, prompts, metric, arguments.rounds)
    for direction, (base, donor) in {"corrupt": prompts, "restore": prompts[::-1]}.items():
        agreements(model, direction, base, donor, metric, arguments.sample)


def costs(model: "mainstem.Model", prompts: list[Prompt], metric: Metric, rounds: int) -> None:
    """Times over the bare forward."""
    ids = prompts[0].ids[None]

    @torch.no_grad()
    def bare() -> object:
        return model.module(input_ids=ids, **prompts[0].forward)

    units = AttributionPatcher(model.module, model.anatomy, *prompts, metric, KINDS)
    operands = AttributionPatcher(model.module, model.anatomy, *prompts, metric, (*KINDS, "query", "key", "value"))
    ways = {
        "gradient, every unit": units.estimate,
        "with queries and keys through the softmax": lambda: operands.estimate(query_key="exact"),
        "integrated, 1 step": lambda: units.estimate("integrated", steps=1),
        "integrated, 2 steps": lambda: units.estimate("integrated", steps=2),
    }
    measured = compare(bare, ways, rounds)
    layers = model.anatomy.sizes.n_layers
    dropped = compare(bare, {f"grad-drop, {layers} layers": lambda: units.estimate("grad-drop")}, 1)
    table(f"{ids.shape[1]} tokens: times over the bare forward", measured | dict(list(dropped.items())[-1:]))


def agreements(
    model: "mainstem.Model", direction: str, base: Prompt, donor: Prompt, metric: Metric, sample: int
) -> None:
    """Spearman's correlations with exact patching, and the units that are farthest off."""
    kinds = ("head", "sublayer", "query", "key", "value")
    patcher = AttributionPatcher(model.module, model.anatomy, base, donor, metric, kinds)
    exact = {}
    for own in GROUPS.values():
        places = [place for place in patcher.places if place.kind in own]
        exact |= exact_effects(model.module, places, base, donor, metric, sample)
    ways = [(gradient, "linear") for gradient in GRADIENTS] + [("gradient", "exact")]
    for gradient, query_key in ways:
        made: AttributionPatching = patcher.estimate(gradient, query_key)  # type: ignore[arg-type]
        rows = {}
        for name, own in GROUPS.items():
            if query_key == "linear" or own[0] in ("query", "key"):
                rows[name] = shown(agreement(made, {unit: e for unit, e in exact.items() if unit[0] in own}))
        softmax = ", queries and keys through the softmax" if query_key == "exact" else ""
        table(f"{direction}, {gradient}{softmax}: Spearman [95 %], top, farthest off (exact, estimated)", rows)


def shown(found: Agreement) -> str:
    """One line."""
    both, top = found.correlation, found.top
    exact = found.exact.abs() if found.absolute else found.exact
    farthest = (exact - found.estimated).abs().topk(3).indices.tolist()
    units = ", ".join(f"{found.units[i][1]} ({exact[i]:.2f}, {found.estimated[i]:.2f})" for i in farthest)
    interval = f"{both.value:.2f} [{both.low:.2f}, {both.high:.2f}] of {both.units}"
    return f"{interval}; top {top.value:.2f} of {top.units}; {units}"


if __name__ == "__main__":
    main()
