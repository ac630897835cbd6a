"""One model in a rotated basis: the copy, the proof that it computes the same, what each precision makes of it.

What becomes of the model's numbers under a rotation is known (nothing), so the first thing done is to compare logits
in float64 with the model's casts lifted; only then are losses compared in float32, bfloat16 and float16, where
rounding differs from basis to basis, and kurtosis before and after.

Cost: four copies of the model at a time, two of them in float64.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mainstem.analysis.kurtosis import random_expectation
from mainstem.analysis.rotations import KINDS, OBJECTIVES, learned, orthogonality, rotation
from mainstem.basis.reference import Reference, reference
from mainstem.basis.rotated_checkpoint import check_place, check_writable, write_checkpoint
from mainstem.basis.rotated_losses import precision_rows
from mainstem.causal.linear_layers import refuse_quantised
from mainstem.causal.reference import reference_text
from mainstem.causal.rotated import Rotated, check, plain_run
from mainstem.causal.rotated import rotated as rotated_copy
from mainstem.causal.stream_points import stream_points, tap_at
from mainstem.causal.stream_statistics import PointMoments
from mainstem.causal.stream_watch import watch
from mainstem.errors import ChoiceError
from mainstem.lab.texts import Text
from mainstem.model.discovery import probe_ids
from mainstem.model.hooks import tapped
from mainstem.model.turning import Turning
from mainstem.model.turning_search import find_turning
from mainstem.results.basis_report import BasisReport
from mainstem.results.basis_rotations import KurtosisRow, RotationSection
from mainstem.run.inputs import base_arguments

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS, SAMPLED, SAMPLE_TOKENS = 256, 512, 256

Say = Callable[[str], None]


def turning_of(model: "Model") -> Turning:
    """What turns with the stream in a model.

    Raises:
        ParallelStreamsError, RefusedError: the model cannot be rotated; names the place.
    """
    refuse_quantised(model.module)
    return find_turning(model.module, **base_arguments(model.module))


def choose_rotation(
    model: "Model",
    kind: str = "hadamard",
    seed: int | None = None,
    objective: str = "kurtosis",
    learn_on: Text | str | Path | None = None,
    say: Say = lambda text: None,
) -> Float[Tensor, "d_model d_model"]:
    """R for a model; with R 1 = 1 where it takes means over its stream.

    Args:
        model: the model.
        kind: `random`, `hadamard`, or `learned` from a Hadamard one.
        seed: the model's by default.
        objective: what a learned one minimises: `kurtosis` or `rounding`.
        learn_on: the text whose stream a learned one is learned on; by default the one that comes with Mainstem for
            calibration, which is none of those that a rotation is judged on.
        say: is told what is going on.

    Raises:
        ChoiceError: an unknown kind or objective.
        TextError: the text that one is learned on cannot be had.
    """
    _check_words(kind, objective)
    turning = model.basis.turning
    seed = model.seed if seed is None else seed
    if kind != "learned":
        return rotation(kind, turning.d_model, seed, turning.centred)
    start = rotation("hadamard", turning.d_model, seed, turning.centred)
    text = Text("reference", "a text that comes with Mainstem", reference_text()) if learn_on is None else learn_on
    sample = stream_sample(model, reference(model, text, SAMPLE_TOKENS), seed)
    return learned(
        sample,
        start,
        objective,
        turning.centred,
        report=lambda done, of: say(f"Learning a rotation: step {done} of {of}"),
    )


def _check_words(kind: str, objective: str) -> None:
    if kind not in KINDS:
        raise ChoiceError("rotation", kind, KINDS)
    if objective not in OBJECTIVES:
        raise ChoiceError("objective", objective, OBJECTIVES)


@torch.no_grad()
def stream_sample(model: "Model", on: Reference, seed: int = 0, rows: int = SAMPLED) -> Float[Tensor, "row d_model"]:
    """Random rows of the stream's states in the first window of a text, its first position left out."""
    ids = on.windows.ids[:1, :SAMPLE_TOKENS].to(next(model.module.parameters()).device)
    kept: list[Tensor] = []
    points = stream_points(model.anatomy, "stream")
    taps = [tap_at(p, lambda x: kept.append(x[0, 1:].double().cpu()), lambda: (1, ids.shape[1])) for p in points]
    with tapped(model.module, taps):
        model.module(input_ids=ids, **base_arguments(model.module))
    everything = torch.cat(kept)
    return everything[torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))[:rows]]


def rotate(model: "Model", kind: str = "hadamard", dtype: torch.dtype | None = None, **options: object) -> Rotated:
    """A rotated copy of a model, after its logits were compared in float64.

    Args:
        model: the model; it is not changed.
        kind: `random`, `hadamard` or `learned`.
        dtype: of the copy's parameters; by default each tensor keeps the model's own.
        options: those of `choose_rotation`.

    Raises:
        ChoiceError: an unknown kind or objective.
        ParallelStreamsError, RefusedError: the model cannot be rotated; names the place.
        CertificateError: the copy does not compute the same.
    """
    turned = choose_rotation(model, kind, **options)  # type: ignore[arg-type]
    turning = model.basis.turning
    wide = rotated_copy(model.module, turning, turned, torch.float64)
    _certified(model, copy.deepcopy(model.module).double(), wide)
    return rotated_copy(model.module, turning, turned) if dtype is None else wide.to(dtype, model.module)


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
    learn_on: Text | str | Path | None = None,
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
        tokens: how many tokens of it are evaluated; in half precision 128 at most.
        window: tokens of a window; 512 by default, or `tokens` or the model's context where that is shorter.
        learn_on: the text that a learned rotation is learned on, and not judged on; see `choose_rotation`.
        say: is told what is going on.

    Raises:
        ChoiceError: an unknown kind or objective.
        TextError: the text cannot be had, or is shorter than a window.
        ParallelStreamsError, RefusedError: the model cannot be rotated, or its rotated copy cannot be written.
        CertificateError: the copy does not compute the same.
        UsageError: there is something at `out`.
    """
    _check_words(kind, objective)
    place = None if out is None else check_place(Path(out))
    on = reference(model, text, tokens, window)
    say("Looking for what turns with the stream")
    turning = model.basis.turning
    if place is not None:
        check_writable(model, turning)
    turned = choose_rotation(model, kind, seed, objective, learn_on, say)
    say("Rotating a copy in float64")
    wide = rotated_copy(model.module, turning, turned, torch.float64)
    plain = copy.deepcopy(model.module).double()
    certificate = _certified(model, plain, wide)
    rows = precision_rows(model, plain, wide, on, say)
    del plain, wide
    own = rotated_copy(model.module, turning, turned)
    say("Measuring kurtosis")
    points = kurtosis_rows(model, own, on)
    section = RotationSection(
        rotation=kind,
        objective=objective if kind == "learned" else None,
        seed=model.seed if seed is None else seed,
        certificate={"logits": certificate},
        precisions=rows,
        points=points,
        checkpoint=None,
        **_counts(own),
    )
    if place is not None:
        say(f"Writing {place}")
        section = replace(section, checkpoint=write_checkpoint(model, own, place))
    return BasisReport(
        provenance=model.provenance(),
        warnings=[],
        model=model.summary,
        text=on.summary(),
        rotations=section,
        notes=_notes(section),
        command="basis rotate",
    )


def _counts(made: Rotated) -> dict[str, Any]:
    """What a copy is, in numbers."""
    turning = made.turning
    return {
        "d_model": turning.d_model,
        "orthogonality": orthogonality(made.rotation),
        "keeps_ones": turning.centred,
        "turned": len(turning.turns),
        "folded": len(turning.gains),
        "untied": [str(place) for place in made.untied],
        "at_run_time": [bracket.where for bracket in turning.brackets],
        "expectation": random_expectation(turning.d_model),
    }


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
    watch(model.module, plain_run(model.module), points, on.windows, [before])
    with other.running():
        watch(other.model, plain_run(other.model), points, on.windows, [after])
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
