"""Units that erase: how a model keeps its stream free, by its weights, and confirmed by taking them out of a run.

Candidates come from the weights (`mainstem.analysis.erasers`): neurons at the false discovery rate, listed by their
cosine, because most of those that pass erase little; and heads that negate what they read of the present token. The
strongest neurons are then taken out of a real run. With c the stream after the block along the neuron's direction of
reading,

    erased = 1 - rms(c) / rms(c without the neuron)

over the tokens of a text but its first, which is a sink in many models. Taking a neuron out must change c by what its
activation and its weights predict (`prediction_error`), and is `confirmed` if it erases more than each of the same
layer's neurons that write as strongly on this text would, along the same direction and by the same prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.erasers import Cosines, cosines, eigenvalue_sign
from mainstem.analysis.false_discovery import RATE, q_values
from mainstem.causal.edits import Edit
from mainstem.causal.reference import reference_text
from mainstem.errors import LevelRefusedError, UsageError
from mainstem.results.subspace import Bar, SubspaceReading
from mainstem.units import Unit
from mainstem.weights.neuron_rows import NeuronRows, all_neuron_rows
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model
    from mainstem.tracing import Trace

CONFIRMED = 3
MATCHED = 20
"""How many neurons that write as strongly each is compared with."""

STRONG = -0.5
"""From which cosine on a neuron writes mostly against what it reads."""

NEAR = 1e-3
"""The largest relative error of the prediction of a neuron that is confirmed."""

TOKENS = 64
"""How much of the reference text is read."""

PRESENT = 0.25
"""How much of a head's attention has to be at the present token for it to erase there."""


def reference_ids(model: "Model") -> list[int]:
    """The beginning of the reference text; without a tokenizer random ids."""
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(model.seed)
        return torch.randint(model.input_vocabulary, (TOKENS,), generator=generator).tolist()
    return model.encode(reference_text()[: 8 * TOKENS])[:TOKENS]


def find_erasers(
    model: "Model", text: str | Sequence[int] | None = None, *, top: int = 20, confirm: int = CONFIRMED
) -> SubspaceReading:
    """Neurons and heads that erase.

    Args:
        model: the model.
        text: what to run on; the reference text by default.
        top: how many neurons to list.
        confirm: how many neurons to take out.

    Raises:
        LevelRefusedError: if the model has neither neurons nor heads with weights.
        UsageError: if an argument is wrong, or the text is too short.
    """
    if whole_number("top", top) < 1 or whole_number("confirm", confirm) < 0:
        raise UsageError("Nothing to list", None, "Give a top of at least 1, and 0 or more to confirm.")
    trace = traced(model, text)
    layers, notes = all_neuron_rows(model)
    rows, roles = _candidates(layers)
    seen = _observed(trace)
    heads, missing = _heads(model, seen.present)
    if not rows and not heads:
        raise LevelRefusedError("Nothing could erase", None, "; ".join(notes + missing) or "there are no units")
    tried = [
        _confirmed(model, trace, layers[unit], seen.neurons[unit], row)
        for row in [row for row in rows if row["q"] <= RATE][:confirm]
        if (unit := Unit.parse(row["unit"]).sublayer) in seen.neurons
    ]
    facts = {
        "tokens": trace.inputs.length(0),
        "rate": RATE,
        "strong": STRONG,
        "neurons": sum(len(layer.writing) for layer in layers.values()),
        "found": sum(role["found"] for role in roles),
        "roles": roles,
        "confirmation": tried,
        "heads": sorted(heads, key=lambda head: (not head["erases"], head["sign"]))[:top],
    }
    return _reading(model, facts, rows[:top], sum(head["erases"] for head in heads), notes + missing)


def _reading(model: "Model", facts: dict[str, Any], rows: list[dict], heads: int, notes: list[str]) -> SubspaceReading:
    return SubspaceReading(
        subject="erasers",
        title="Units that erase",
        verdict=_verdict(facts["roles"], facts["confirmation"], heads),
        provenance=model.provenance(),
        warnings=[],
        model=model.summary,
        facts=facts,
        rows=rows,
        caption="neurons with the most negative cosine of reading and writing; q over all neurons of a role",
        bars=[bar for row in facts["confirmation"] for bar in _bars(row)],
        bars_unit="share of the stream along the direction of reading that is erased; lines go from least to most",
        notes=notes,
    )


def _verdict(roles: list[dict[str, Any]], tried: list[dict[str, Any]], heads: int) -> str:
    found, strong = (sum(role[name] for role in roles) for name in ("found", "strong"))
    if not found and not heads:
        return "nothing erases"
    said = f"{found} rows of neurons are against what they write, {strong} of them mostly, and {heads} heads erase"
    held = sum(row["confirmed"] for row in tried)
    return f"{said}; taken out, {held} of {len(tried)} neurons are confirmed" if tried else said


def traced(model: "Model", text: str | Sequence[int] | None) -> "Trace":
    """A run on a text, or on the reference text.

    Raises:
        UsageError: if it is too short.
    """
    trace = model.trace(reference_ids(model) if text is None else text)
    if trace.inputs.length(0) < 4:
        raise UsageError(f"{trace.inputs.length(0)} tokens say nothing", None, "Give a longer text.")
    return trace


# --- neurons ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Observed:
    """Of one run: how much each head attends to the present token on average, and what each neuron is."""

    present: dict[Unit, Float[Tensor, " n_heads"]]
    neurons: dict[Unit, Float[Tensor, "pos neuron"]]


def _observed(trace: "Trace") -> _Observed:
    """All tokens but the first."""
    anatomy, length = trace.model.anatomy, trace.inputs.length(0)
    trace.run.keep(range(1, length))
    present: dict[Unit, list[Tensor]] = {}
    neurons: dict[Unit, list[Tensor]] = {}
    for place in range(1, length):
        moment = trace.run.moment(place)
        for index, write in enumerate(anatomy.writes):
            if write.attention is not None:
                own = moment.attention[write.attention.site].pattern[:, place]
                present.setdefault(write.unit, []).append(own.double().cpu())
            elif write.neurons and index in moment.sources:
                neurons.setdefault(write.unit, []).append(moment.sources[index].double())
    return _Observed(
        {unit: torch.stack(rows).mean(0) for unit, rows in present.items()},
        {unit: torch.stack(rows) for unit, rows in neurons.items()},
    )


def _candidates(layers: dict[Unit, NeuronRows]) -> tuple[list[dict], list[dict]]:
    """Neurons that could erase, those at the rate first, by cosine; and what each role looks like as a whole."""
    made = [(layer, role, cosines(r, layer.writing)) for layer in layers.values() for role, r in layer.reading.items()]
    if not made:
        return [], []
    names = dict.fromkeys(role for _, role, _ in made)
    own = {name: [found.p for _, role, found in made if role == name] for name in names}
    split = {name: iter(q_values(torch.cat(p)).split([len(one) for one in p])) for name, p in own.items()}
    q = [next(split[role]) for _, role, _ in made]
    rows = []
    for (layer, role, found), rates in zip(made, q, strict=True):
        for place in found.cosine.nan_to_num(2.0).argsort()[:64].tolist():
            rows.append(
                {
                    "unit": str(layer.address(place)),
                    "role": role,
                    "cosine": float(found.cosine[place]),
                    "null_mean": found.null_mean,
                    "null_spread": found.null_spread,
                    "p": float(found.p[place]),
                    "q": float(rates[place]),
                }
            )
    rows.sort(key=lambda row: (row["q"] > RATE, row["cosine"]))
    return rows, [
        _role(name, [(f, r) for (_, role, f), r in zip(made, q, strict=True) if role == name]) for name in names
    ]


def _role(name: str, found: list[tuple[Cosines, Tensor]]) -> dict[str, Any]:
    own = torch.cat([one.cosine for one, _ in found])
    defined = own[~own.isnan()]
    return {
        "role": name,
        "mean": float(defined.mean()),
        "smallest": float(defined.min()),
        "undefined": len(own) - len(defined),
        "found": sum(int((rates <= RATE).sum()) for _, rates in found),
        "strong": sum(int(((rates <= RATE) & (one.cosine <= STRONG)).sum()) for one, rates in found),
    }


def _confirmed(
    model: "Model", trace: "Trace", layer: NeuronRows, activations: Float[Tensor, "pos neuron"], row: dict[str, Any]
) -> dict[str, Any]:
    """Takes a neuron out, beside what is predicted of others that write as strongly."""
    unit = Unit.parse(row["unit"])
    place = unit.neuron or 0
    axis = layer.reading[row["role"]][place].double()
    axis = axis / axis.norm()
    writing = layer.writing.double()
    before = trace.run.stream((unit.layer or 0) + 1)[1:].double() @ axis
    without = _without(model, trace, unit, axis)
    predicted = before - activations[:, place] * (writing[place] @ axis)
    size = activations.square().mean(0).sqrt() * writing.norm(dim=1)
    order = (size / size[place].clamp_min(1e-30)).clamp_min(1e-30).log().abs().argsort().tolist()
    others = [other for other in order if other != place][:MATCHED]
    chance = [_erased(before, before - activations[:, other] * (writing[other] @ axis)) for other in others]
    erased = _erased(before, without)
    error = float((without - predicted).norm() / (predicted - before).norm().clamp_min(1e-30))
    return {
        "unit": row["unit"],
        "role": row["role"],
        "erased": erased,
        "matched_mean": sum(chance) / len(chance) if chance else 0.0,
        "matched_min": min(chance, default=0.0),
        "matched_max": max(chance, default=0.0),
        "prediction_error": error,
        "confirmed": bool(chance) and error <= NEAR and erased > max(0.0, *chance),
    }


def _without(model: "Model", trace: "Trace", unit: Unit, axis: Tensor) -> Float[Tensor, " pos"]:
    with model.edited(Edit.zero(str(unit))):
        return model.trace(trace.ids()).run.stream((unit.layer or 0) + 1)[1:].double() @ axis


def _erased(before: Float[Tensor, " pos"], without: Float[Tensor, " pos"]) -> float:
    sizes = [one.square().mean().sqrt() for one in (before, without)]
    return 1 - float(sizes[0] / sizes[1]) if float(sizes[1]) > 0 else 0.0


def _bars(row: dict[str, Any]) -> list[Bar]:
    own = row["erased"]
    chance = Bar("as strong neurons", row["matched_mean"], row["matched_min"], row["matched_max"])
    return [Bar(f"{row['unit']} {row['role']}", own, own, own), chance]


# --- heads --------------------------------------------------------------------------------------------------


def _heads(model: "Model", present: dict[Unit, Tensor]) -> tuple[list[dict[str, Any]], list[str]]:
    weights = model.weights
    missing = [f"{unit} is left out: {error.reason or error.what}." for unit, error in weights.refusals.items()]
    if not weights.heads:
        return [], missing
    signs = [eigenvalue_sign(weights.ov(head)) for head in weights.heads]
    rates = q_values(torch.tensor([sign.p for sign in signs], dtype=torch.float64)).tolist()
    found = []
    for head, sign, rate in zip(weights.heads, signs, rates, strict=True):
        at = float(present[head.sublayer][head.head_index or 0])
        row = {"unit": str(head), "sign": sign.sign, "z": sign.z, "p": sign.p, "q": rate, "present": at}
        found.append({**row, "erases": sign.sign < 0 and rate <= RATE and at >= PRESENT})
    return found, missing
