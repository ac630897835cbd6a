"""What quantisers do to a model: to each linear layer's product, and to what it predicts, on several texts.

Every run of a text is compared with full precision token by token: the change of the loss, KL(full || quantised), and
the tokens whose likeliest prediction changed, means with paired bootstrap intervals. A copy of the model in another
basis may be quantised beside it; it too is compared with the model as it is.

Which layers, and how: `mainstem.causal.linear_layers`, `mainstem.analysis.quantizers`. SmoothQuant is calibrated on a
text that comes with Mainstem and is none of those measured.

Cost: for each quantiser and basis about a run of the texts, and a byte for each weight and way of rounding it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mainstem.analysis.quantizers import QUANTISERS, Quantiser
from mainstem.analysis.statistics import difference, interval
from mainstem.analysis.warnings import Warning
from mainstem.basis.reference import Reference, reference
from mainstem.causal.evaluation import Evaluation, Run, evaluate
from mainstem.causal.linear_layers import LinearLayer, linear_layers, unquantised
from mainstem.causal.quantised import Prepared, input_maxima, layer_errors, plain_run, prepared, quantised_run
from mainstem.causal.reference import reference_text
from mainstem.errors import ChoiceError, UsageError
from mainstem.lab.texts import SHIPPED, Text
from mainstem.model.anatomy import Anatomy
from mainstem.results.basis_quantisers import (
    AS_IT_IS,
    FULL,
    CloserRow,
    LayerErrorRow,
    QuantiserRow,
    QuantiserSection,
    named,
)
from mainstem.results.basis_report import BasisReport

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS = 1_024
MIXED = "llm.int8"
"""The quantiser whose threshold is swept, and that is compared with those without decomposition."""

Say = Callable[[str], None]
Bases = Mapping[str, tuple[torch.nn.Module, Anatomy]]
"""The model as it is, first, and copies of it in other bases, each with its anatomy."""


def quantise(
    model: "Model",
    quantisers: Sequence[str] = (),
    *,
    texts: Sequence[Text | str | Path] = tuple(SHIPPED),
    tokens: int = TOKENS,
    window: int | None = None,
    thresholds: Sequence[float] = (),
    say: Say = lambda text: None,
) -> BasisReport:
    """Quantises the linear layers in runs of some texts; the model is not changed.

    Args:
        model: the model, in floating point.
        quantisers: names out of `mainstem.analysis.quantizers.QUANTISERS`; all of them by default.
        texts: each what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of each.
        window: tokens of a window; 512 by default, or the model's context where that is shorter.
        thresholds: of LLM.int8(), each a quantiser of its own beside those named.
        say: is told what is going on.

    Raises:
        ChoiceError: no quantiser of this name.
        UsageError: no text, or a threshold that is not above zero.
        TextError: a text cannot be had, or is shorter than a window.
        RefusedError: the model is quantised already, or a layer cannot be; names the place.
        NotFiniteError: a layer overflows; names it.
    """
    chosen = chosen_quantisers(quantisers, thresholds)
    if not texts:
        raise UsageError("No text to predict", None, f"Name one, such as {next(iter(SHIPPED))}.")
    on = [reference(model, text, tokens, window) for text in texts]
    section = quantiser_section(model, on, chosen, say=say)
    return BasisReport(
        provenance=model.provenance(),
        warnings=quantiser_warnings(section),
        model=model.summary,
        text=on[0].summary(),
        quantisers=section,
        command="basis quantise",
    )


def chosen_quantisers(names: Sequence[str] = (), thresholds: Sequence[float] = ()) -> dict[str, Quantiser]:
    """Quantisers by their names, all by default, and LLM.int8() at each threshold.

    Raises:
        ChoiceError: no quantiser of this name.
        UsageError: a threshold that is not above zero.
    """
    for name in names:
        if name not in QUANTISERS:
            raise ChoiceError("quantiser", name, QUANTISERS)
    for threshold in thresholds:
        if not threshold > 0:
            raise UsageError("A threshold is above zero", f"threshold {threshold:g}", "Use 6, for example.")
    chosen = {name: QUANTISERS[name] for name in names or QUANTISERS}
    return chosen | {f"{MIXED} at {t:g}": replace(QUANTISERS[MIXED], threshold=float(t)) for t in thresholds}


def quantiser_section(
    model: "Model",
    on: Sequence[Reference],
    quantisers: Mapping[str, Quantiser],
    copies: Bases | None = None,
    say: Say = lambda text: None,
) -> QuantiserSection:
    """The section of the report.

    Args:
        model: the model.
        on: the texts.
        quantisers: by name.
        copies: the model in other bases, by what was done to it, such as "rotated".
        say: is told what is going on.

    Raises:
        RefusedError, NotFiniteError: as `quantise`.
    """
    ids, seed = on[0].windows.ids[:1].to(next(model.module.parameters()).device), model.seed
    calibration = torch.tensor([model.encode(reference_text())[: on[0].windows.length]], device=ids.device)
    runs: dict[tuple[str, str], Run] = {}
    errors: list[LayerErrorRow] = []
    layers: tuple[LinearLayer, ...] = ()
    for basis, (module, anatomy) in {AS_IT_IS: (model.module, model.anatomy), **(copies or {})}.items():
        say(f"Rounding matrices ({basis})")
        own = linear_layers(module, anatomy, ids)
        layers = layers or own
        smooth = any(quantiser.smoothing is not None for quantiser in quantisers.values())
        made = prepared(own, quantisers, input_maxima(module, own, calibration) if smooth else None)
        runs[basis, FULL] = plain_run(module)
        runs |= {(basis, name): quantised_run(module, layers) for name, layers in made.items()}
        errors += _errors(basis, module, made, ids)
    done = [_Measured(each.text.name, _evaluated(runs, each, say), seed) for each in on]
    left, held = _left(model, layers), sum(layer.weight.numel() for layer in layers)
    return QuantiserSection(
        texts=[each.summary() for each in on],
        quantisers=[{"name": name, **asdict(quantiser)} for name, quantiser in quantisers.items()],
        rows=[row for each in done for row in each.rows()],
        closer=[row for each in done for row in each.closer(quantisers)],
        layers=errors,
        layer_tokens=ids.shape[1],
        parameters=held,
        matrices=held + sum(left.values()),
        left=list(left),
    )


def quantiser_warnings(section: QuantiserSection) -> list[dict[str, Any]]:
    """A warning where much of the model was left in the float dtype."""
    if not section.left:
        return []
    share = 1 - section.parameters / section.matrices
    text = f"{share:.1%} of the matrices that are no embedding are not quantised, {section.left[0]} among them."
    return [Warning("unquantised", text, share).as_dict()]


def _left(model: "Model", layers: Sequence[LinearLayer]) -> dict[str, int]:
    """The matrices that are neither quantised nor embeddings, by name, with their sizes."""
    modules = dict(model.module.named_modules())
    embeddings = [modules[write.module] for write in model.anatomy.writes if write.unit.kind == "embedding"]
    tables = [parameter for module in embeddings for parameter in module.parameters(recurse=False)]
    known = {tensor.untyped_storage().data_ptr() for tensor in [*tables, model.anatomy.readout.unembedding]}
    return {
        name: parameter.numel()
        for name, parameter in unquantised(model.module, layers).items()
        if parameter.untyped_storage().data_ptr() not in known
    }


def _errors(
    basis: str, module: torch.nn.Module, made: Mapping[str, Prepared], ids: torch.Tensor
) -> list[LayerErrorRow]:
    return [
        LayerErrorRow(basis, name, layer, error.relative_error, error.outliers / error.d_in)
        for name, layers in layer_errors(module, made, ids).items()
        for layer, error in layers.items()
    ]


def _evaluated(runs: Mapping[tuple[str, str], Run], on: Reference, say: Say) -> dict[tuple[str, str], Evaluation]:
    total = on.windows.n_tokens
    by_name = {f"{name} ({basis})": (basis, name) for basis, name in runs}
    made = evaluate(
        {label: runs[key] for label, key in by_name.items()},
        on.windows,
        report=lambda done: say(f"{on.text.name}: {done:,} of {total:,} tokens"),
    )
    return {by_name[label]: evaluation for label, evaluation in made.items()}


@dataclass(frozen=True)
class _Measured:
    """The runs of one text, by basis and quantiser."""

    text: str
    runs: Mapping[tuple[str, str], Evaluation]
    seed: int

    def rows(self) -> list[QuantiserRow]:
        """A row for each run."""
        full = self.runs[AS_IT_IS, FULL].nats.tolist()
        rows = []
        for (basis, name), run in self.runs.items():
            change, kl = difference(run.nats.tolist(), full, self.seed), interval(run.kl.tolist(), self.seed)
            rows.append(
                QuantiserRow(
                    self.text, basis, name, len(full), run.perplexity, change.mean, change.low, change.high,
                    kl.mean, kl.low, kl.high, run.flip_rate,
                )
            )  # fmt: skip
        return rows

    def closer(self, quantisers: Mapping[str, Quantiser]) -> list[CloserRow]:
        """LLM.int8() against every int8 quantiser that takes nothing out, and every other basis against the first."""
        plain = [
            name
            for name, quantiser in quantisers.items()
            if quantiser.inputs is not None and quantiser.inputs.steps == 254 and quantiser.threshold is None
        ]
        pairs = [((AS_IT_IS, MIXED), (AS_IT_IS, name)) for name in plain if MIXED in quantisers]
        pairs += [((basis, name), (AS_IT_IS, name)) for basis, name in self.runs if basis != AS_IT_IS and name != FULL]
        return [self._pair(first, second) for first, second in pairs]

    def _pair(self, first: tuple[str, str], second: tuple[str, str]) -> CloserRow:
        found = difference(self.runs[first].kl.tolist(), self.runs[second].kl.tolist(), self.seed)
        names = (named(name, basis) for basis, name in (first, second))
        return CloserRow(self.text, *names, found.mean, found.low, found.high)
