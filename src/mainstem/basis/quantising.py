"""What quantisers do to a model: to each linear layer's product, and to what it predicts, on several texts.

Every run of a text is compared with full precision token by token: the change of the loss, KL(full || quantised), and
the tokens whose likeliest prediction changed, means with paired bootstrap intervals. A copy of the model in another
basis may be quantised beside it; it too is compared with the model as it is.

Which layers, and how: `mainstem.causal.linear_layers`, `mainstem.analysis.quantizers`. SmoothQuant is calibrated on a
text that comes with Mainstem and is none of those measured.

Cost: for each quantiser and basis about a run of the texts, and a byte for each weight and way of rounding it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.quantizers import QUANTISERS, Quantiser
from mainstem.analysis.statistics import difference, interval
from mainstem.analysis.warnings import Warning
from mainstem.basis.reference import Reference, reference
from mainstem.basis.rotating import rotate
from mainstem.causal.evaluation import Evaluation, Run, evaluate
from mainstem.causal.linear_layers import LinearLayer, linear_layers, refuse_quantised, unquantised
from mainstem.causal.quantised import Prepared, input_maxima, layer_errors, prepared, quantised_run
from mainstem.causal.reference import reference_text
from mainstem.errors import AnatomyError, ChoiceError, RefusedError, UsageError
from mainstem.lab.texts import SHIPPED, Text
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover
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
from mainstem.run.inputs import base_arguments

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS = 1_024
ROTATED = "rotated"
MIXED = "llm.int8"
"""The quantiser whose threshold is swept, and that is compared with those without decomposition."""

LAYER_TOKENS = 256
"""Errors of layers are those on so many tokens of the first text."""

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Copy:
    """The model, or a copy of it in another basis: its anatomy, and what must be around its runs."""

    module: torch.nn.Module
    anatomy: Anatomy
    running: Callable[[], AbstractContextManager] = nullcontext

    def run(self, layers: Prepared = ()) -> Run:
        """Logits under a quantiser, or, without layers, of the copy as it is."""
        within = quantised_run(self.module, layers)

        def run(ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
            with self.running():
                return within(ids)

        return run


def quantise(
    model: "Model",
    quantisers: Sequence[str] = (),
    *,
    texts: Sequence[Text | str | Path] = tuple(SHIPPED),
    tokens: int = TOKENS,
    window: int | None = None,
    thresholds: Sequence[float] = (),
    rotation: str | None = None,
    say: Say = lambda text: None,
) -> BasisReport:
    """Quantises the linear layers in runs of some texts; the model is not changed.

    Args:
        model: the model, in floating point.
        quantisers: names out of `mainstem.analysis.quantizers.QUANTISERS`; all of them by default.
        texts: each what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of each.
        window: tokens of a window; 512 by default, or `tokens` or the model's context where that is shorter.
        thresholds: of LLM.int8(), each a quantiser of its own beside those named.
        rotation: also quantise a copy whose stream is rotated so (see `mainstem.basis.rotating.choose_rotation`).
        say: is told what is going on.

    Raises:
        ChoiceError: no quantiser or rotation of this name.
        UsageError: no text, two texts of one name, or a threshold that is not above zero.
        TextError: a text cannot be had, or is shorter than a window.
        RefusedError: the model is quantised already, or a layer cannot be, or the model not rotated; names the place.
        NotFiniteError: a layer overflows; names it.
    """
    chosen = chosen_quantisers(quantisers, thresholds)
    if not texts:
        raise UsageError("No text to predict", None, f"Name one, such as {next(iter(SHIPPED))}.")
    on = [reference(model, text, tokens, window) for text in texts]
    _refuse_same_names(on)
    refuse_quantised(model.module)
    copies = {} if rotation is None else {ROTATED: rotated_copy(model, rotation, say)}
    section = quantiser_section(model, on, chosen, copies, say)
    return BasisReport(
        provenance=model.provenance(),
        warnings=quantiser_warnings(section),
        model=model.summary,
        text=on[0].summary(),
        quantisers=section,
        notes=[] if rotation is None else [f"{ROTATED}: a copy in another basis, by a {rotation} rotation"],
        command="basis quantise",
    )


def _refuse_same_names(on: Sequence[Reference]) -> None:
    """Rows and tables are told apart by the names of their texts."""
    for i, each in enumerate(on):
        if any(other.text.name == each.text.name for other in on[:i]):
            raise UsageError("Two texts have the same name", each.text.name, "Give each once, or rename a file.")


def rotated_copy(model: "Model", rotation: str, say: Say = lambda text: None) -> Copy:
    """A copy of the model whose stream is rotated, checked in float64.

    Raises:
        ChoiceError, RefusedError, ParallelStreamsError, CertificateError: as `mainstem.basis.rotating.rotate`; a copy
            that turns back and forth while it runs is refused where its matrices cannot be found.
    """
    say("Rotating a copy of the model")
    made = rotate(model, rotation)
    try:
        with made.running():
            anatomy = discover(made.model, **base_arguments(made.model))
    except AnatomyError as error:
        if not made.turning.brackets:
            raise
        raise RefusedError(
            "The rotated copy turns back and forth while it runs, so that its matrices are not found",
            made.turning.brackets[0].where,
            remedy="Quantise this model in its own basis.",
        ) from error
    return Copy(made.model, anatomy, made.running)


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
    copies: Mapping[str, Copy] | None = None,
    say: Say = lambda text: None,
) -> QuantiserSection:
    """The section of the report.

    Args:
        model: the model.
        on: the texts.
        quantisers: by name.
        copies: of the model in other bases, by what was done to them, such as "rotated".
        say: is told what is going on.

    Raises:
        RefusedError, NotFiniteError: as `quantise`.
    """
    device = next(model.module.parameters()).device
    ids = on[0].windows.ids[:1, :LAYER_TOKENS].to(device)
    calibration = torch.tensor([model.encode(reference_text())[: on[0].windows.length]], device=device)
    itself = Copy(model.module, model.anatomy)
    bases = {AS_IT_IS: itself, **(copies or {})}
    runs: dict[tuple[str, str], Run] = {}
    errors: list[LayerErrorRow] = []
    layers: dict[str, tuple[LinearLayer, ...]] = {}
    for basis, each in bases.items():
        say(f"Rounding matrices ({basis})")
        with each.running():
            layers[basis] = linear_layers(each.module, each.anatomy, ids)
            made = prepared(layers[basis], quantisers, input_maxima(each.module, layers[basis], calibration))
            errors += _errors(basis, each.module, made, ids)
        runs[basis, FULL] = each.run()
        runs |= {(basis, name): each.run(matrices) for name, matrices in made.items()}
    done = [_Measured(each.text.name, _evaluated(runs, each, say), model.seed) for each in on]
    left = unquantised(model.module, model.anatomy, layers[AS_IT_IS])
    held = sum(layer.weight.numel() for layer in layers[AS_IT_IS])
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


def _errors(
    basis: str, module: torch.nn.Module, made: Mapping[str, Prepared], ids: Int[Tensor, "batch pos"]
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
        one, other = (named(name, basis) for basis, name in (first, second))
        return CloserRow(self.text, one, other, found.mean, found.low, found.high)
