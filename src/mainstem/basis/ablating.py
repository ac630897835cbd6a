"""What dimensions of the stream do: the two ablations of LLM.int8() (Dettmers et al. 2022, section 4), with controls.

The first asks each layer's attention by itself: the top-1 mass of its *attention* softmax with the dimensions zeroed in
what that layer reads, while the regular values go on to the next. The second lets the altered states go on and takes
the perplexity; the top-1 mass of the *output* softmax is that of these runs. The paper's numbers are ones of the first
(about 40 % to 20 %) and of the second (up by 600 to 1,000 %) and must not be mixed.

Beside zero there is the mean over the text (Sun et al. 2024): what a constant in its place does. Controls are ten draws
of other dimensions: random ones, ones of nearly the same size, and random ones of which as much is subtracted, token
by token, as the dimensions have there. Controls are made on fewer tokens than the ablation itself, and are compared
with it on those.

Cost: with the defaults (3,072 tokens, of which 128 for controls and patterns) about 8 runs of the text, 60 of the
controls' tokens, and for patterns 33 times the matrices before attention.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.outliers import Criterion
from mainstem.analysis.warnings import Warning
from mainstem.basis import ablation_rows as rows
from mainstem.basis.choosing_dimensions import CHOICES, chosen_dimensions, given_dimensions, require_controls
from mainstem.basis.measuring import forward_of
from mainstem.basis.reference import Reference, reference
from mainstem.causal.changes import Change
from mainstem.causal.evaluation import Evaluation, evaluate
from mainstem.causal.rotated import plain_run
from mainstem.causal.stream_statistics import PointMoments, PointOutliers
from mainstem.causal.stream_watch import watch
from mainstem.causal.top_attention import top_attention
from mainstem.causal.zeroed_dimensions import (
    ReadInput,
    Where,
    at_mean,
    changed_run,
    left_out,
    nearest_dimensions,
    random_dimensions,
    read_inputs,
    subtracted,
    zeroed,
)
from mainstem.errors import ChoiceError, LevelRefusedError
from mainstem.lab.texts import Text
from mainstem.results.basis_ablations import AblationSection
from mainstem.results.basis_report import BasisReport
from mainstem.run.inputs import base_arguments
from mainstem.run.windows import Windows
from mainstem.units import Unit
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

TOKENS, CONTROL_TOKENS, DRAWS, COUNT = 3_072, 128, 10, 6
WHERES: tuple[Where, ...] = ("attention", "everywhere")
MOST_ALONE = 16
"""How many dimensions are also taken out one by one."""

Say = Callable[[str], None]


def ablate_dimensions(
    model: "Model",
    dimensions: Sequence[int] | None = None,
    *,
    by: str = CHOICES[0],
    count: int = COUNT,
    text: Text | str | Path = "drama",
    tokens: int = TOKENS,
    control_tokens: int = CONTROL_TOKENS,
    window: int | None = None,
    draws: int = DRAWS,
    top: int = 10,
    say: Say = lambda text: None,
) -> BasisReport:
    """Takes dimensions out where matrices read the stream, and compares with others.

    Args:
        model: the model; it is not changed.
        dimensions: which; by default as `by` says.
        by: "outliers", the published criterion over the text (the most varied ones, if it finds none), or "variance",
            the `count` dimensions that vary most in what attention reads.
        count: how many, where variance chooses.
        text: what `mainstem.lab.texts.open_text` takes, or a text.
        tokens: how many tokens of it perplexities are computed on.
        control_tokens: how many of them for controls and for patterns.
        window: tokens of a window; 512 by default, or `tokens` or the model's context where that is shorter.
        draws: draws of each control.
        top: how many heads and tokens are shown.
        say: is told what is going on.

    Raises:
        UsageError: a dimension that the stream does not have, none, or so many that there are no others; a number that
            is too small.
        ChoiceError: `by` is no way to choose.
        TextError: the text cannot be had, or is shorter than a window.
        RefusedError: nothing is seen to read the stream for attention.
        NotFiniteError: a run gives no numbers.
    """
    for name, number in (("draws", draws), ("top", top)):
        whole_number(name, number, 1)
    whole_number("control_tokens", control_tokens, 2)
    if by not in CHOICES:
        raise ChoiceError("way to choose dimensions", by, CHOICES)
    d_model = model.anatomy.sizes.d_model
    given = None if dimensions is None else given_dimensions(dimensions, d_model)
    if given is None:
        require_controls(whole_number("count", count), d_model)
    on = reference(model, text, tokens, window)
    section, warnings, notes = ablation_section(model, on, given, by, count, control_tokens, draws, top, say)
    return BasisReport(
        provenance=model.provenance(),
        warnings=[warning.as_dict() for warning in warnings],
        model=model.summary,
        text=on.summary(),
        ablations=section,
        notes=notes,
        command="basis ablate",
    )


def ablation_section(
    model: "Model",
    on: Reference,
    given: list[int] | None = None,
    by: str = CHOICES[0],
    count: int = COUNT,
    control_tokens: int = CONTROL_TOKENS,
    draws: int = DRAWS,
    top: int = 10,
    say: Say = lambda text: None,
) -> tuple[AblationSection, list[Warning], list[str]]:
    """The section of the report, warnings and notes; see `ablate_dimensions`."""
    inputs: dict[Where, list[ReadInput]] = {where: read_inputs(model.anatomy, where) for where in WHERES}
    moments, outliers = _measured(model, inputs, on.windows, say)
    chosen = chosen_dimensions(by, count, moments["attention"], outliers, given)
    short = on.first(control_tokens).windows
    work = _Work(model, inputs, moments, torch.tensor(chosen.dimensions), draws, say)
    whole, controls = work.whole(on.windows), work.controls(short)
    patterns, heads, refused = work.patterns(short)
    section = AblationSection(
        chosen_by=chosen.by,
        dimensions=rows.dimension_rows(chosen.dimensions, work.sizes, controls),
        tokens=len(whole["nowhere none"].nats),
        control_tokens=len(controls["nowhere none"].nats),
        pattern_tokens=short.length - 1,
        runs=rows.run_rows(whole, model.seed) + rows.run_rows(controls, model.seed),
        patterns=rows.pattern_rows(patterns),
        layers=rows.layer_rows(heads, patterns),
        heads=rows.head_rows(heads, patterns),
        moved_tokens=rows.token_rows(whole, on, model.token, top),
        groups=rows.group_rows(whole, on.windows),
        verdicts=rows.verdicts(controls),
        top=top,
    )
    return section, rows.warnings(whole, controls), [*chosen.notes, *left_out(model.anatomy), *refused]


def _measured(
    model: "Model", inputs: Mapping[Where, list[ReadInput]], on: Windows, say: Say
) -> tuple[dict[Where, PointMoments], PointOutliers]:
    """Moments of every input, and outliers over those of layers, in one pass over the text."""
    points = [each.point for each in inputs["everywhere"]]
    whole = PointMoments(points)
    outliers = PointOutliers(points, "input", Criterion.magnitude)
    said = _progress(say, "measuring", on.n_tokens)
    watch(model.module, forward_of(model), points, on, [whole, outliers], report=said)
    attention = whole.only([_number_of(each, inputs["everywhere"]) for each in inputs["attention"]])
    return {"everywhere": whole, "attention": attention}, outliers


def _number_of(part: ReadInput, inputs: Sequence[ReadInput]) -> int:
    """Which of the inputs a part of them is: the one that its matrices are among."""
    return next(
        number
        for number, each in enumerate(inputs)
        if each.point.name == part.point.name and set(part.sites) <= set(each.sites)
    )


def _progress(say: Say, what: str, total: int) -> Callable[[int], None]:
    return lambda done: say(f"{what}: {done:,} of {total:,} tokens")


@dataclass(eq=False)
class _Work:
    """The runs of one question, whose controls are the same draws in all of them."""

    model: "Model"
    inputs: Mapping[Where, list[ReadInput]]
    moments: Mapping[Where, PointMoments]
    dimensions: Int[Tensor, " dimension"]
    draws: int
    say: Say

    def __post_init__(self) -> None:
        sizes = [own.rms.square() for own in map(self.moments["attention"].whole, range(len(self.inputs["attention"])))]
        self.sizes: Float[Tensor, " d_model"] = torch.stack([each / each.sum() for each in sizes]).mean(0)
        generator, chosen = torch.Generator().manual_seed(self.model.seed), self.dimensions.tolist()
        self.random = [random_dimensions(len(self.sizes), chosen, generator) for _ in range(self.draws)]
        self.nearest = [nearest_dimensions(self.sizes, chosen, generator) for _ in range(self.draws)]
        self.forward = base_arguments(self.model.module)

    def ablations(self, where: Where) -> dict[str, list[Change]]:
        """The dimensions themselves: zeroed, or at their means."""
        inputs, moments = self.inputs[where], self.moments[where]
        return {
            "zero": zeroed(inputs, self.dimensions),
            "mean": at_mean(inputs, self.dimensions, moments, by_place=False),
            "mean_by_place": at_mean(inputs, self.dimensions, moments, by_place=True),
        }

    def compared(self, where: Where) -> dict[str, list[Change]]:
        """The controls, each draw under its name and number."""
        inputs, found = self.inputs[where], {}
        for i, (random, nearest) in enumerate(zip(self.random, self.nearest, strict=True)):
            found[f"random {i}"] = zeroed(inputs, random)
            found[f"nearest {i}"] = zeroed(inputs, nearest)
            found[f"same_norm {i}"] = subtracted(inputs, self.dimensions, random)
        return found

    def whole(self, on: Windows) -> dict[str, Evaluation]:
        """The model as it is and without the dimensions, on the whole text."""
        changes = {f"{where} {what}": made for where in WHERES for what, made in self.ablations(where).items()}
        return self._evaluated("ablations", changes, on)

    def controls(self, on: Windows) -> dict[str, Evaluation]:
        """The model as it is, without the dimensions, without each alone, and the controls, on fewer tokens."""
        changes = {}
        for where in WHERES:
            changes[f"{where} zero"] = self.ablations(where)["zero"]
            changes |= {f"{where} {name}": made for name, made in self.compared(where).items()}
        if 1 < len(self.dimensions) <= MOST_ALONE:
            for dimension in self.dimensions:
                changes[f"alone {int(dimension)}"] = zeroed(self.inputs["attention"], dimension[None])
        return self._evaluated("controls", changes, on)

    def _evaluated(self, what: str, changes: Mapping[str, Sequence[Change]], on: Windows) -> dict[str, Evaluation]:
        module = self.model.module
        runs = {"nowhere none": plain_run(module)}
        runs |= {name: changed_run(module, made, **self.forward) for name, made in changes.items()}
        return evaluate(runs, on, report=_progress(self.say, what, on.n_tokens))

    def patterns(self, on: Windows) -> tuple[dict[str, Float[Tensor, "unit measure"]], list[Unit], list[str]]:
        """Of the first window every head's measures under each variant, each layer by itself; the heads; notes.

        Where no attention can be taken apart there are no heads, and a note says why.
        """
        ids = on.ids[:1].to(next(self.model.module.parameters()).device)
        variants = {"none": [], **self.ablations("attention"), **self.compared("attention")}
        found: dict[str, list[Tensor]] = {name: [] for name in variants}
        heads: list[Unit] = []
        try:
            for own, measures in top_attention(self.model.module, self.model.anatomy, ids, variants, **self.forward):
                heads += own
                self.say(f"attention patterns: {own[0].sublayer}")
                for name, measured in measures.items():
                    found[name].append(measured.cpu())
        except LevelRefusedError as refusal:
            return {}, [], [f"{refusal.description}."]
        return {name: torch.cat(measures) for name, measures in found.items()}, heads, []
