"""One model in a rotated basis: the copy, the proof that it computes the same, what each precision makes of it.

What becomes of the model's numbers under a rotation is known (nothing), so the first thing done is to compare logits
in float64 with the model's casts lifted; only then are losses compared in float32, bfloat16 and float16, where
rounding differs from basis to basis, and kurtosis before and after.

Cost: two copies of the model at a time, one of them in float64.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mainstem.analysis.kurtosis import random_expectation
from mainstem.analysis.rotations import KINDS, learned, orthogonality, rotation
from mainstem.basis.reference import Reference, reference
from mainstem.basis.rotated_checkpoint import check_place, check_writable, write_checkpoint
from mainstem.causal.edited import unedited
from mainstem.causal.evaluation import evaluate
from mainstem.causal.rotated import Rotated, check
from mainstem.causal.rotated import rotated as rotated_copy
from mainstem.causal.stream_points import StreamPoint, stream_points, tap_at
from mainstem.causal.stream_statistics import PointMoments, watch
from mainstem.errors import ChoiceError, NotFiniteError, RefusedError
from mainstem.lab.texts import Text
from mainstem.model.discovery import probe_ids
from mainstem.model.hooks import tapped
from mainstem.model.outputs import logits_of
from mainstem.model.turning import Turning
from mainstem.model.turning_search import find_turning
from mainstem.model.widened import widened
from mainstem.results.basis_report import BasisReport
from mainstem.results.basis_rotations import KurtosisRow, PrecisionRow, RotationSection
from mainstem.run.inputs import base_arguments

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS, SAMPLED, SAMPLE_TOKENS = 512, 512, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Say = Callable[[str], None]


def turning_of(model: "Model") -> Turning:
    """What turns with the stream in a model.

    Raises:
        ParallelStreamsError, RefusedError: the model cannot be rotated; names the place.
    """
    narrow = next((n for n, p in model.module.named_parameters() if not p.is_floating_point() and p.dim() > 1), None)
    if narrow is not None:
        raise RefusedError("This model is quantised already", narrow, "Rotate the model that it was made of.")
    with unedited(model.module):
        return find_turning(model.module, **base_arguments(model.module))


def choose_rotation(
    model: "Model",
    kind: str = "hadamard",
    seed: int | None = None,
    objective: str = "kurtosis",
    on: Reference | None = None,
    say: Say = lambda text: None,
) -> Float[Tensor, "d_model d_model"]:
    """R for a model; with R 1 = 1 where it takes means over its stream.

    Args:
        model: the model.
        kind: `random`, `hadamard`, or `learned` from a Hadamard one.
        seed: the model's by default.
        objective: what a learned one minimises: `kurtosis` or `rounding`.
        on: the text whose stream a learned one is learned on.
        say: is told what is going on.

    Raises:
        ChoiceError: an unknown kind or objective.
    """
    if kind not in KINDS:
        raise ChoiceError("rotation", kind, KINDS)
    turning = model.basis.turning
    seed = model.seed if seed is None else seed
    if kind != "learned":
        return rotation(kind, turning.d_model, seed, turning.centred)
    start = rotation("hadamard", turning.d_model, seed, turning.centred)
    sample = stream_sample(model, on or reference(model, tokens=SAMPLE_TOKENS), seed)
    return learned(
        sample,
        start,
        objective,
        turning.centred,
        report=lambda done, of: say(f"Learning a rotation: step {done} of {of}"),
    )


@torch.no_grad()
def stream_sample(model: "Model", on: Reference, seed: int = 0, rows: int = SAMPLED) -> Float[Tensor, "row d_model"]:
    """Random rows of the stream's states in the first window of a text, its first position left out."""
    ids = on.windows.ids[:1, :SAMPLE_TOKENS].to(next(model.module.parameters()).device)
    kept: list[Tensor] = []
    points = stream_points(model.anatomy, "stream")
    taps = [tap_at(p, lambda x: kept.append(x[0, 1:].double().cpu()), lambda: (1, ids.shape[1])) for p in points]
    with unedited(model.module), tapped(model.module, taps):
        model.module(input_ids=ids, **base_arguments(model.module))
    everything = torch.cat(kept)
    return everything[torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))[:rows]]


def rotate(model: "Model", kind: str = "hadamard", dtype: torch.dtype | None = None, **options: object) -> Rotated:
    """A rotated copy of a model, after its logits were compared in float64.

    Args:
        model: the model; it is not changed.
        kind: `random`, `hadamard` or `learned`.
        dtype: of the copy; the model's own by default.
        options: those of `choose_rotation`.

    Raises:
        ChoiceError: an unknown kind or objective.
        ParallelStreamsError, RefusedError: the model cannot be rotated; names the place.
        CertificateError: the copy does not compute the same.
    """
    turned = choose_rotation(model, kind, **options)  # type: ignore[arg-type]
    wide = rotated_copy(model.module, model.basis.turning, turned, torch.float64)
    _certified(model, copy.deepcopy(model.module).double(), wide)
    own = dtype or model.anatomy.dtype
    return replace(wide, model=wide.model.to(own))


def _certified(model: "Model", plain: nn.Module, wide: Rotated) -> float:
    return check(plain, wide, probe_ids(model.module), stream_points(model.anatomy, "stream"))


def read_rotation(
    model: "Model",
    kind: str = "hadamard",
    out: Path | str | None = None,
    seed: int | None = None,
    objective: str = "kurtosis",
    text: Text | str | Path = "drama",
    tokens: int = TOKENS,
    window: int | None = None,
    say: Say = lambda text: None,
) -> BasisReport:
    """Rotates a copy of a model, compares the two, and writes the copy as a checkpoint if that is asked for.

    Args:
        model: the model; it is not changed.
        kind: `random`, `hadamard` or `learned`.
        out: a directory to make, for a checkpoint that plain Transformers loads.
        seed: of the rotation; the model's by default.
        objective: what a learned rotation minimises: `kurtosis` or `rounding`.
        text: what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of it are evaluated.
        window: tokens of a window; 512 by default, or the model's context where that is shorter.
        say: is told what is going on.

    Raises:
        ChoiceError: an unknown kind or objective.
        TextError: the text cannot be had, or is shorter than a window.
        ParallelStreamsError, RefusedError: the model cannot be rotated, or its rotated copy cannot be written.
        CertificateError: the copy does not compute the same.
        UsageError: there is something at `out`.
    """
    if kind not in KINDS:
        raise ChoiceError("rotation", kind, KINDS)
    place = None if out is None else check_place(Path(out))
    on = reference(model, text, tokens, window)
    say("Looking for what turns with the stream")
    turning = model.basis.turning
    if place is not None:
        check_writable(model, turning)
    turned = choose_rotation(model, kind, seed, objective, on, say)
    say("Rotating a copy in float64")
    wide = rotated_copy(model.module, turning, turned, torch.float64)
    plain = copy.deepcopy(model.module).double()
    certificate = _certified(model, plain, wide)
    rows = [_precision(plain, wide, on, lifted, say) for lifted in (True, False)]
    del plain
    rows += [_precision(copy.deepcopy(model.module).to(t), wide.to(t), on, False, say, model) for t in DTYPES]
    own = replace(wide, model=wide.model.to(model.anatomy.dtype))
    say("Measuring kurtosis")
    points = kurtosis_rows(model, own, on)
    if place is not None:
        say(f"Writing {place}")
    section = RotationSection(
        rotation=kind,
        objective=objective if kind == "learned" else None,
        seed=model.seed if seed is None else seed,
        d_model=turning.d_model,
        orthogonality=orthogonality(turned),
        keeps_ones=turning.centred,
        turned=len(turning.turns),
        folded=len(turning.gains),
        untied=[str(place) for place in wide.untied],
        at_run_time=[bracket.where for bracket in turning.brackets],
        certificate={"logits": certificate},
        expectation=random_expectation(turning.d_model),
        precisions=rows,
        points=points,
        checkpoint=None if place is None else write_checkpoint(model, own, place),
    )
    return BasisReport(
        provenance=model.provenance(),
        warnings=[],
        model=model.summary,
        text=on.summary(),
        rotations=section,
        notes=_notes(section),
        command="basis rotate",
    )


def _notes(section: RotationSection) -> list[str]:
    if not section.at_run_time:
        return []
    count = len(section.at_run_time)
    return [
        f"{count} factors for each dimension enter the stream (such as gains of norms after a sublayer, first at "
        f"{section.at_run_time[0]}) and cannot be folded into a matrix: there the copy turns back and forth while it "
        "runs, and no checkpoint can hold it."
    ]


def kurtosis_rows(model: "Model", other: Rotated, on: Reference) -> list[KurtosisRow]:
    """Kurtosis of every state of the stream and of what every sublayer reads, before and after."""
    points = stream_points(model.anatomy, "stream", "input")
    before, after = PointMoments(points), PointMoments(points)
    with unedited(model.module):
        watch(model.module, _forward(model.module), points, on.windows, [before])
    with other.running():
        watch(other.model, _forward(other.model), points, on.windows, [after])
    return [
        KurtosisRow(
            point.name,
            point.kind,
            point.layer,
            before.without_first(number).kurtosis,
            after.without_first(number).kurtosis,
        )
        for number, point in enumerate(points)
    ]


def _forward(module: nn.Module) -> Callable[[Int[Tensor, "batch pos"]], Float[Tensor, "batch pos d_vocab"]]:
    device, arguments = next(module.parameters()).device, base_arguments(module)
    return lambda ids: logits_of(module(input_ids=ids.to(device), **arguments))


class _Apart:
    """The largest difference of logits of two runs of the same tokens, relative to the largest logit."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.difference = self.largest = 0.0

    def keep(self, logits: Tensor) -> Tensor:
        self.first = logits
        self.largest = max(self.largest, float(logits.abs().max()))
        return logits

    def compare(self, logits: Tensor) -> Tensor:
        assert self.first is not None
        self.difference = max(self.difference, float((logits.double() - self.first.double()).abs().max()))
        return logits


def _precision(
    plain: nn.Module, other: Rotated, on: Reference, lifted: bool, say: Say, named: "Model | None" = None
) -> PrecisionRow:
    """Both on the text; what fails is said with its layer where `named` has the anatomy."""
    dtype = str(next(p.dtype for p in plain.parameters() if p.is_floating_point())).removeprefix("torch.")
    say(f"Comparing in {dtype}" + (", casts lifted" if lifted else ""))
    apart, around = _Apart(), widened if lifted else nullcontext
    first, second = _forward(plain), _forward(other.model)

    def run(ids: Tensor) -> Tensor:
        with around():
            return apart.keep(first(ids))

    def run_rotated(ids: Tensor) -> Tensor:
        with around(), other.running():
            return apart.compare(second(ids))

    try:
        made = evaluate({"the model": run, "the rotated copy": run_rotated}, on.windows)
    except NotFiniteError as error:
        return _failed(dtype, lifted, f"not finite: {_where(error, plain, other, on, named)}")
    except RuntimeError as error:  # a kernel that this device has not in this dtype
        return _failed(dtype, lifted, str(error).splitlines()[0])
    mine, turned = made["the model"], made["the rotated copy"]
    return PrecisionRow(
        dtype,
        lifted,
        mine.loss,
        turned.loss,
        turned.loss - mine.loss,
        float(turned.kl.mean()),
        turned.flip_rate,
        apart.difference / apart.largest,
    )


def _failed(dtype: str, lifted: bool, reason: str) -> PrecisionRow:
    return PrecisionRow(dtype, lifted, None, None, None, None, None, None, reason)


def _where(error: NotFiniteError, plain: nn.Module, other: Rotated, on: Reference, named: "Model | None") -> str:
    """Which run, and the first point of the stream that is not finite in it."""
    run = str(error.where)
    points: list[StreamPoint] = [] if named is None else stream_points(named.anatomy, "stream")
    module = plain if run == "the model" else other.model
    around: AbstractContextManager = nullcontext() if run == "the model" else other.running()
    found = next(_not_finite(module, points, on, around), None)
    return f"{run}, {found or 'after the last state of the stream'}"


def _not_finite(
    module: nn.Module, points: list[StreamPoint], on: Reference, around: AbstractContextManager
) -> Iterator[str]:
    """The names of the points that are not finite, in the order of the run."""
    for ids in on.windows.ids:
        names: list[str] = []
        taps = [_finite_tap(point, names, len(ids)) for point in points]
        with around, tapped(module, taps), torch.no_grad():
            _forward(module)(ids[None])
        yield from names


def _finite_tap(point: StreamPoint, names: list[str], length: int):
    def see(x: Tensor) -> None:
        if not bool(torch.isfinite(x).all()):
            names.append(point.name)

    return tap_at(point, see, lambda: (1, length))
